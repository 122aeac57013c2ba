"""Text files as UTF-8: decompressed, decoded, with errors that say where the bytes are wrong."""

from __future__ import annotations

import codecs
import gzip
import os
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from whence.errors import DataError, OptionError

__all__ = ["PlainFile", "decode", "read_text", "suffix_of"]

CHUNK = 1 << 20


def suffix_of(path: Path) -> str:
    """The extension that says what a file holds, without ``.gz``.

    Example:
        >>> suffix_of(Path("train.jsonl.gz"))
        '.jsonl'
    """
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The whole text of a file, decompressed where its name ends in ``.gz``."""
    with _opened(path) as file:
        return decode(file.read(), path, encoding).removeprefix("\ufeff")


def decode(content: bytes, path: Path, encoding: str = "utf-8", *, offset: int = 0) -> str:
    """Decode bytes that start at ``offset`` of a file, or raise a `DataError` that names the bad byte."""
    try:
        return content.decode(known_encoding(encoding))
    except UnicodeDecodeError as error:
        raise _undecodable(path, encoding, error.object[error.start], offset + error.start) from error


def known_encoding(encoding: str) -> str:
    """The encoding's standard name, or an `OptionError`."""
    try:
        return codecs.lookup(encoding).name
    except LookupError as error:
        raise OptionError(
            f"unknown encoding {encoding!r}; use a name that Python knows, such as utf-8, latin-1 or utf-16"
        ) from error


class PlainFile:
    """A text file as uncompressed UTF-8 on disk, so that it can be read from any byte.

    The file itself where it is that already; else a temporary copy, deleted with this object.
    """

    def __init__(self, path: Path, encoding: str = "utf-8") -> None:
        self.source = path
        self.path = path
        if path.suffix.lower() == ".gz" or known_encoding(encoding) not in ("utf-8", "utf-8-sig", "ascii"):
            handle, copy = tempfile.mkstemp(prefix="whence-", suffix=".txt")
            self.path = Path(copy)
            self._remove = weakref.finalize(self, _remove, copy)
            with os.fdopen(handle, "wb") as output:
                for text in _decoded_chunks(path, encoding):
                    output.write(text.encode("utf-8", "surrogatepass"))

    def decode(self, content: bytes, offset: int) -> str:
        """Decode bytes that start at ``offset``."""
        return decode(content, self.source, offset=offset)


def _decoded_chunks(path: Path, encoding: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(encoding)()
    done = 0
    with _opened(path) as file:
        while True:
            chunk = file.read(CHUNK)
            held = len(decoder.getstate()[0])
            try:
                yield decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                position = done - held + error.start
                raise _undecodable(path, encoding, error.object[error.start], position) from error
            done += len(chunk)
            if not chunk:
                return


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
            yield file  # type: ignore[misc]  # a GzipFile reads as any other
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} cannot be decompressed ({error}); fetch or compress it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _undecodable(path: Path, encoding: str, byte: int, offset: int) -> DataError:
    return DataError(
        f"{path} is not {encoding} text: byte 0x{byte:02x} at offset {offset} does not belong there; give the "
        "encoding it was written in (--encoding latin-1, for instance), or convert it to UTF-8"
    )


def _remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)
