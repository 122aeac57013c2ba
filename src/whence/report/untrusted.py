"""Text, links and images that come from data: made safe to put on a page or a terminal, and honest to look at.

Escaping is the templates' (autoescape is on everywhere). Here is what escaping does not do: characters that
would be invisible, would reorder their neighbours or command a terminal, addresses that would run code, bytes that are
no image.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from markupsafe import Markup

__all__ = ["Picture", "href", "json_visible", "picture", "script_json", "visible"]

# Controls but tab and newline; bidirectional marks and overrides; spaces and joiners without width but those that words
# are written with; other ends of lines; halves of surrogate pairs; noncharacters; tags.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufdd0-\ufdef"
    "\ufeff\ufffe\uffff\U000e0000-\U000e007f]"
)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_CONTROL_NAMES = (
    "NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI "
    "DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US"
)
_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF87a": "gif", b"GIF89a": "gif"}
_SMALL = 96  # pixels; images up to this size are enlarged without smoothing


def visible(text: str) -> str:
    r"""Text in which every character can be seen: controls become their names or numbers.

    Example:
        >>> visible("a\x00b\x1b[0m"), visible("one\r\ntwo"), visible("\u202eevil")
        ('a‹NUL›b‹ESC›[0m', 'one\ntwo', '‹U+202E›evil')
    """
    return _HIDDEN.sub(lambda match: _symbol(match[0]), text.replace("\r\n", "\n"))


def json_visible(value: Any) -> str:
    r"""JSON for people and scripts: as readable as `visible` text, and the same value when it is read back.

    Example:
        >>> print(json_visible({"id": "\x9b2J é"}))
        {
          "id": "\u009b2J é"
        }
    """
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return _HIDDEN.sub(lambda match: json.dumps(match[0])[1:-1], text)


def _symbol(character: str) -> str:
    # Not Unicode's own pictures of controls: many fonts lack them, and a missing glyph says nothing.
    code = ord(character)
    return f"‹{_CONTROL_NAMES.split()[code]}›" if code < 0x20 else f"‹U+{code:04X}›"


def href(link: str | None) -> str | None:
    r"""The link if it leads to a page or a file, else None: nothing that runs code or sends mail.

    Example:
        >>> href("docs/with.html"), href("javascript:alert(1)"), href(" java\nscript:alert(1)")
        ('docs/with.html', None, None)
    """
    # Browsers drop white space and controls inside addresses, so "java\nscript:" must not pass as a path.
    if not link or link != link.strip() or _HIDDEN.search(link) or "\t" in link or "\n" in link:
        return None
    if re.match(r"[A-Za-z]:[\\/]", link):  # a Windows path
        link = "file:///" + link.replace("\\", "/")
    # "//host/x" on a page opened from disk is a network share, which some systems log in to by themselves.
    if re.match(r"[\\/]{2}", link):
        return None
    scheme = _SCHEME.match(link)
    if scheme and scheme[1].lower() not in ("http", "https", "file"):
        return None
    try:
        parts = urlsplit(link)
    except ValueError:
        return None
    if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
        return None
    if parts.scheme in ("http", "https") and not parts.netloc:
        return None
    return quote(link, safe="/:?#[]@!$&'()*+,;=%~")


class Picture(NamedTuple):
    """An image as a page holds it: a ``data:`` address, and whether to enlarge it pixel by pixel."""

    uri: str
    small: bool


def picture(data: bytes | None) -> Picture | None:
    """A PNG's bytes as a picture (JPEG, GIF and WebP pass too); None for anything else."""
    data = data or b""
    kind = next((kind for start, kind in _SIGNATURES.items() if data.startswith(start)), None)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "webp"
    if kind is None:
        return None
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")  # of a PNG
    small = kind == "png" and 0 < max(width, height) <= _SMALL
    return Picture(f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}", small)


def script_json(value: Any) -> Markup:
    r"""JSON for a ``<script type="application/json">``: nothing in it can close the element or open a comment.

    Example:
        >>> script_json({"a": "</script>"})
        Markup('{"a": "\\u003c/script\\u003e"}')
    """
    text = json.dumps(value)  # ASCII, so U+2028 and lone surrogates are escaped already
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # escaped for its context just above
