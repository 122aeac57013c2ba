"""Files as text: decompressed, decoded and parsed, with errors that name the file and the place in it."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whence.errors import DataError, InputError, OptionError, WhenceError

__all__ = [
    "existing_path",
    "naming_bad_bytes",
    "parse_json",
    "read_text",
    "refusing",
    "suffix_of",
    "utf8_file",
]

CHUNK = 1 << 20


def existing_path(path: str | Path) -> Path:
    """The path, or a `DataError` if there is nothing."""
    place = Path(path).expanduser()
    if not place.exists():
        near = f" in {place.parent.resolve()}" if not place.is_absolute() else ""
        raise DataError(f"there is no file or directory {str(path)!r}{near}; check the name")
    return place


def suffix_of(path: Path) -> str:
    """The extension that says what a file holds, without ``.gz``.

    Example:
        >>> suffix_of(Path("train.jsonl.gz"))
        '.jsonl'
    """
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


@contextmanager
def refusing(kind: type[InputError], problem: str, remedy: str) -> Iterator[None]:
    r"""Turn whatever another library raises on bad files into one of our errors, with the first line it says.

    Example:
        >>> with refusing(DataError, "d.bin cannot be read", "fetch it again"):
        ...     raise RuntimeError("it is cut off\nand more")
        Traceback (most recent call last):
        whence.errors.DataError: d.bin cannot be read: it is cut off; fetch it again
    """
    try:
        yield
    except WhenceError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise kind(f"{problem}: {reason}; {remedy}") from error


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The whole text of a file, decompressed where its name ends in ``.gz``."""
    return "".join(_decoded_chunks(path, encoding)).removeprefix("\ufeff")


def utf8_file(path: Path, encoding: str, owner: object) -> Path:
    """The file as uncompressed UTF-8 on disk, so that it can be read from any byte.

    That is the file itself where possible; else a temporary copy, which is deleted together with ``owner``.
    """
    if path.suffix.lower() != ".gz" and _codec(encoding).name in ("utf-8", "utf-8-sig", "ascii"):
        return path
    handle, name = tempfile.mkstemp(prefix="whence-", suffix=".txt")
    weakref.finalize(owner, Path(name).unlink, missing_ok=True)
    with os.fdopen(handle, "wb") as output:
        for text in _decoded_chunks(path, encoding):
            output.write(text.encode("utf-8", "surrogatepass"))
    return Path(name)


@contextmanager
def naming_bad_bytes(path: Path, encoding: str, offset: int) -> Iterator[None]:
    """Raise a `DataError` at bytes that cannot be decoded; ``offset`` is where in the file they begin."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not {encoding} text: byte 0x{error.object[error.start]:02x} at offset {offset + error.start} "
            "does not belong there; give the encoding it was written in (--encoding latin-1, for instance), or "
            "convert it to UTF-8"
        ) from error


def parse_json(text: str, where: str, remedy: str) -> Any:
    """The value of a JSON text, or a `DataError` that says where it breaks off."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            line = f"line {error.lineno}, " if "\n" in text else ""
            reason = f"{error.msg} at {line}column {error.colno}"
        raise DataError(f"{where} is not JSON: {reason}; {remedy}") from error


def _codec(encoding: str) -> codecs.CodecInfo:
    try:
        " ".encode(encoding)  # refuses codecs that are not for text
        return codecs.lookup(encoding)
    except LookupError as error:
        raise OptionError(
            f"unknown encoding {encoding!r}; use a name that Python knows, such as utf-8, latin-1 or utf-16"
        ) from error


def _decoded_chunks(path: Path, encoding: str) -> Iterator[str]:
    decoder = _codec(encoding).incrementaldecoder()
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    done, chunk = 0, b"begin"
    with (
        refusing(DataError, f"{path} cannot be read", "check the name, or fetch the file again"),
        opened(path, "rb") as file,
    ):
        while chunk:
            chunk = file.read(CHUNK)
            held = len(decoder.getstate()[0])
            with naming_bad_bytes(path, encoding, done - held):
                yield decoder.decode(chunk, final=not chunk)
            done += len(chunk)
