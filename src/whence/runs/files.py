"""Writing files so that a reader sees the old one or the new one, never half of it.

Everything goes to a temporary file beside its place, is flushed to the disk, and takes its place in one rename. A
process killed at any moment, or a disk that is full, leaves the old file as it was.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from whence.errors import OptionError, RunDirectoryError, StorageError
from whence.runs.codec import decode, encode, inlined

__all__ = [
    "REMEDY",
    "TEMPORARY",
    "checksum",
    "given_path",
    "is_temporary",
    "json_bytes",
    "parse_json",
    "read_table",
    "read_tree",
    "read_value",
    "replace_file",
    "write_bytes",
    "write_table",
    "write_tree",
    "write_value",
]

T = TypeVar("T")

#: How temporary files begin; what a killed process left is cleaned up by its name.
TEMPORARY = ".unfinished-"
_TEMPORARY = re.compile(re.escape(TEMPORARY) + "[0-9a-f]{8}-[a-z0-9_]{8}")  # as `tempfile.mkstemp` goes on
#: What to do about a file that was damaged.
REMEDY = "Put back a copy of it, or delete the directory and run again"
#: Up to so many numbers are written as JSON.
_FEW = 4096


def given_path(value: Any, name: str) -> Path:
    """What a user gave as a path.

    Raises:
        OptionError: it cannot be one.
    """
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise OptionError(f"{name} is {value!r:.100}; give a path, such as 'runs/first'")
    return Path(value)


def is_temporary(name: str) -> bool:
    """Whether a file's name is that of one being written; a user's own, such as ``.unfinished-notes``, is not."""
    return _TEMPORARY.fullmatch(name) is not None


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Have ``write`` fill a temporary file, then put it in the place of ``path`` at once.

    Raises:
        StorageError: when the file cannot be written; what was there before is still there.
    """
    temporary: Path | None = None
    handle: int | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        prefix = f"{TEMPORARY}{zlib.crc32(path.name.encode('utf-8', 'surrogateescape')):08x}-"
        _sweep_left(path.parent, prefix)
        handle, name = tempfile.mkstemp(prefix=prefix, dir=path.parent)
        temporary = Path(name)
        _lock(handle)
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
        _sync_directory(path.parent)
    except (OSError, SafetensorError) as error:
        raise StorageError(_explain(path, error)) from error
    finally:
        if temporary is not None:  # it is in its place by now, or not needed any more
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        if handle is not None:
            os.close(handle)  # and with it the lock


def _sweep_left(directory: Path, prefix: str) -> None:
    """Delete what killed processes left of the same file: temporary ones that nobody holds locked."""
    with contextlib.suppress(OSError):
        for path in directory.glob(f"{prefix}*"):
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if _lock(handle):
                    path.unlink()
            finally:
                os.close(handle)


def _lock(handle: int) -> bool:
    """Lock an open file until it is closed, or its process dies; False where it is another's, or cannot be locked."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whose content is at hand."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    replace_file(path, write)


def checksum(path: Path) -> str:
    """BLAKE2b of a file's bytes."""
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def write_tree(place: Path, tree: Any, tensors: Mapping[str, Tensor]) -> Path:
    """Write what `whence.runs.codec.encode` returned, and return the file.

    That is ``place.json``, with the tensors' numbers, where they are few and no vectors are among them; else
    ``place.safetensors``, with the tree as its metadata.
    """
    few = sum(tensor.numel() for tensor in tensors.values()) <= _FEW
    readable = inlined(tree, tensors) if few else None
    path = place.with_name(place.name + (".safetensors" if readable is None else ".json"))
    if readable is not None:
        write_bytes(path, json_bytes(readable))
    else:
        _write_safetensors(path, tree, tensors)
    return path


def _write_safetensors(path: Path, tree: Any, tensors: Mapping[str, Tensor]) -> None:
    stored = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
    owners = {tensor.untyped_storage().data_ptr(): key for key, tensor in stored.items()}
    for key, tensor in stored.items():  # views of one memory have to be parted
        stored[key] = tensor if owners[tensor.untyped_storage().data_ptr()] == key else tensor.clone()
    notes = {"tree": json.dumps(tree, allow_nan=False)}
    replace_file(path, lambda temporary: save_file(stored, temporary, metadata=notes))


def write_value(path: Path, value: Any) -> None:
    """One file (safetensors) of a value that belongs to no run; `read_value` reads it back."""
    _write_safetensors(path, *encode(value))


def read_tree(path: Path, *, mapped: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """What `write_tree` wrote, the tensors in fresh memory; or mapped from the file, to be read and not written.

    Raises:
        RunDirectoryError: it cannot be read; names the file.
    """
    with _refusing(path):
        if path.suffix == ".json":
            return parse_json(path.read_bytes()), {}
        with safe_open(path, framework="pt") as file:  # compares all sizes with the file's own
            tree = parse_json((file.metadata() or {})["tree"].encode())
            # Copies, in memory aligned as torch's own is: the last bits of an inner product depend on it.
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return tree, found if mapped else {key: tensor.clone() for key, tensor in found.items()}


def read_value(
    path: Path,
    cls: type[T],
    *,
    device: torch.device | str = "cpu",
    more: Iterable[Path] = (),
    mapped: bool = False,
) -> T:
    """The value in a file, its vectors on a device; ``more`` are other files with tensors it refers to.

    Raises:
        RunDirectoryError: the file is not that, or was damaged.
    """
    tree, tensors = read_tree(path, mapped=mapped)
    for other in more:
        tensors |= read_tree(other)[1]
    try:
        return decode(cls, tree, tensors, device=device)
    except RunDirectoryError as error:
        raise RunDirectoryError(f"{path} cannot be used: {error}. {REMEDY}") from error


def write_table(place: Path, columns: Mapping[str, Any]) -> Path:
    """Write equally long numpy columns of whole numbers or float64 as ``place.parquet``, and return the file.

    Nothing is compressed, so that its size tells its length.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, column in columns.items():
        if column.ndim != 1 or (column.dtype.kind not in "iu" and column.dtype != "float64"):
            raise TypeError(
                f"{name!r} is of {column.dtype} and shape {column.shape}; whole numbers or float64 in a row"
            )
    path, table = place.with_name(place.name + ".parquet"), pa.table(dict(columns))
    replace_file(
        path, lambda temporary: pq.write_table(table, temporary, compression="none", use_dictionary=False)
    )
    return path


def read_table(path: Path) -> dict[str, Any]:
    """What `write_table` wrote.

    Raises:
        RunDirectoryError: it cannot be read; names the file.
    """
    import pyarrow.parquet as pq

    with _refusing(path):
        with pq.ParquetFile(path) as file:
            types = {field.name: field.type.to_pandas_dtype() for field in file.schema_arrow}
            if any(
                np.dtype(kind).kind not in "iuf" for kind in types.values()
            ):  # texts may be far longer than their file
                raise ValueError("a column is not of numbers")
            width = sum(np.dtype(kind).itemsize for kind in types.values())
            if file.metadata.num_rows * width > path.stat().st_size:
                raise ValueError(f"{file.metadata.num_rows} rows are more than it has bytes for")
            table = file.read()
        if any(column.null_count for column in table.columns):
            raise ValueError("a column has gaps")
        return {name: table[name].to_numpy().copy() for name in types}


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever is in it
        raise RunDirectoryError(
            f"{path} cannot be read ({error!s:.300}): it was damaged or changed. {REMEDY}"
        ) from error


def json_bytes(tree: Any) -> bytes:
    """JSON for people to read: a line for each entry of an object."""

    def lines(node: Any, indent: str) -> Iterator[str]:
        if not isinstance(node, dict) or not node:
            yield json.dumps(node, ensure_ascii=False, allow_nan=False)
            return
        for number, (key, value) in enumerate(node.items()):
            yield f"{',' if number else '{'}\n{indent}  {json.dumps(key, ensure_ascii=False)}: "
            yield from lines(value, indent + "  ")
        yield f"\n{indent}}}"

    return ("".join(lines(tree, "")) + "\n").encode("utf-8", "backslashreplace")  # as JSON escapes them


def parse_json(content: bytes) -> Any:
    """Standard JSON, each key once; else ValueError."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a key stands there twice")
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not standard")

    try:
        return json.loads(content, object_pairs_hook=once, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _sync_directory(path: Path) -> None:
    # Renames are durable once the directory is; some file systems cannot be asked, and are safe without.
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _explain(path: Path, error: Exception) -> str:
    code = getattr(error, "errno", None)
    text = str(error)
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in text or "too large" in text:
        remedy = "the disk is full. Free some space and run the same command again"
    elif code in (errno.EACCES, errno.EPERM, errno.EROFS) or "Permission denied" in text:
        remedy = "the directory cannot be written to. Change its permissions, or choose another one"
    else:
        remedy = "mend that and run the same command again"
    return f"{path} could not be written ({error}): {remedy}; nothing written before is lost"
