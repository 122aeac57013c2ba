"""The one codec: a value to a JSON tree and its tensors, and back.

Reading follows the type hints of the class that is asked for. A file names no classes that are believed: where a hint
is a union, the tag in the tree only chooses between its members. What is shared comes back shared: tensors of the same
memory, vectors of the same tensors, generators.

A vector that several processes hold together is written whole, so that a file does not tell how many they were: all of
them call `encode`, and the first has the tensors. All call `decode`, and each gets its part.

Hints that are understood: dataclasses, `ParamVector`, `torch.Tensor`, `torch.Generator`, int, float, bool, str, None,
bytes, Path, list, tuple, Sequence, dict and Mapping (keys of str, int or tuples of int), Literal, unions. Fields of a
dataclass with ``init=False`` or ``metadata={"saved": False}`` are left out and come back as their defaults.
"""

from __future__ import annotations

import base64
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from whence.distributed import Shards
from whence.errors import RunDirectoryError
from whence.vectors import ParamVector

__all__ = ["as_json", "decode", "encode", "identity", "inlined", "saved_fields", "vector_keys"]

T = TypeVar("T")

_SEQUENCES, _MAPPINGS, _UNIONS = (list, tuple, Sequence), (dict, Mapping), (Union, types.UnionType)
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_FLOATS, *_INTS, torch.bool)}


def encode(
    value: Any, cls: Any = None, *, prefix: str = "", known: Mapping[Any, str] | None = None
) -> tuple[Any, dict[str, Tensor]]:
    """A value as a JSON tree and its tensors, which are not copied.

    Args:
        value: what to keep.
        cls: the hint it will be read by; its own class by default.
        prefix: begins the tensors' names.
        known: `identity` -> name of tensors that are written elsewhere; they are only referred to.

    Raises:
        TypeError: the value is not what its hints say, or these are not understood.
    """
    writer = _Writer(dict(known or {}))
    return writer.node(type(value) if cls is None else cls, value, prefix), writer.tensors


def decode(
    cls: type[T],
    tree: Any,
    tensors: Mapping[str, Tensor],
    *,
    device: torch.device | str = "cpu",
    shards: Shards | None = None,
) -> T:
    """The value that `encode` was given.

    Args:
        cls: the class, or another hint.
        tree: from `encode`, or `inlined`.
        tensors: from `encode`; they are not copied.
        device: where vectors go, and tensors that were not on the CPU.
        shards: how several processes hold vectors of the model's parameters; others are parted likewise.

    Raises:
        RunDirectoryError: anything is missing, unknown, too much, or of another type.
    """
    reader = _Reader(tensors, torch.device(device), shards)
    try:
        value: T = reader.value(cls, tree)
        if unused := tensors.keys() - reader.used:
            raise ValueError(f"unexpected tensor {min(unused)!r}")
    except Exception as error:  # whatever is in a file, and whatever a class thinks of it
        raise RunDirectoryError(f"it holds no {_name(cls)}: {error}") from error
    return value


def vector_keys(vector: ParamVector, prefix: str) -> dict[str, str]:
    """What `encode` calls the tensors of a vector that it is given alone."""
    return {name: _key_of(f"{prefix}/{name}") for name in vector}


def _key_of(where: str) -> str:
    return where.lstrip("/").encode("utf-8", "backslashreplace").decode() or "value"


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """The same for tensors that share memory, form and type."""
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


@cache
def saved_fields(cls: Any) -> tuple[tuple[Field[Any], Any], ...]:
    """The fields of a dataclass that are kept, each with its hint."""
    hints = get_type_hints(cls)
    return tuple((f, hints[f.name]) for f in fields(cls) if f.init and f.metadata.get("saved", True))


def inlined(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree with the numbers of its tensors in it; None if it holds vectors or generators.

    None, too, where a NaN carries bits that JSON would lose.
    """
    left = dict(tensors)

    def put(node: _TensorNode) -> Any:  # the numbers where it stands first
        return node | _numbers(left.pop(node["tensor"])) if node["tensor"] in left else node

    found = _with_tensors(tree, put)
    exact = all(_same_bits(tensor, _from_numbers(**_numbers(tensor))) for tensor in tensors.values())
    return found if exact and not left else None


def as_json(value: Any) -> Any:
    """A value as JSON for scripts, its tensors as (nested) lists of numbers; "NaN" and "Infinity" are words."""
    tree, tensors = encode(value)

    def plain(numbers: Any) -> Any:
        if isinstance(numbers, list):
            return [plain(each) for each in numbers]
        return _number(numbers) if isinstance(numbers, float) else numbers

    return _with_tensors(tree, lambda node: plain(tensors[node["tensor"]].tolist()))


# --- values to trees ---------------------------------------------------------------------------------------------


class _TensorNode(dict[str, Any]):
    """Where a tensor stands in a tree."""


def _with_tensors(node: Any, put: Callable[[_TensorNode], Any]) -> Any:
    """The tree with something else where its tensors stand."""
    if isinstance(node, _TensorNode):
        return put(node)
    if isinstance(node, dict):
        return {key: _with_tensors(value, put) for key, value in node.items()}
    return [_with_tensors(value, put) for value in node] if isinstance(node, list) else node


class _Writer:
    def __init__(self, keys: dict[Any, str]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._keys = keys
        self._states: dict[torch.Generator, Tensor] = {}

    def node(self, hint: Any, value: Any, where: str) -> Any:
        kind, args = get_origin(hint) or hint, get_args(hint)
        if kind in _UNIONS:
            member = _member(args, value)
            node = self.node(member, value, where)
            plain = _is_plain(member) and not (member is float and node in _NON_FINITE)
            return node if plain or value is None or len(_not_none(args)) == 1 else {_name(member): node}
        if not _fits(hint, value):
            raise TypeError(f"{where or 'the value'} is {value!r:.100}, not of {_name(hint)}")
        if kind is float:
            return _number(value)
        if kind is Path:
            return str(value)
        if kind is bytes:
            return base64.b64encode(value).decode()
        if kind is Tensor:
            return _TensorNode(tensor=self._key(value, where), cpu=value.device.type == "cpu")
        if kind is torch.Generator:
            state = self._states.setdefault(value, value.get_state())
            return {"generator": self._key(state, where), "cpu": value.device.type == "cpu"}
        if kind is ParamVector:
            if value.shards is not None:
                return {"vector": self._gathered(value, value.shards, where), "columns": value.columns}
            keys = {name: self._key(tensor, f"{where}/{name}") for name, tensor in value.items()}
            return {"vector": keys, "columns": value.columns}
        if kind in _SEQUENCES:
            items = zip(_item_hints(hint, len(value)), value, strict=True)
            return [self.node(h, item, f"{where}/{i}") for i, (h, item) in enumerate(items)]
        if kind in _MAPPINGS:
            return {_key_text(args[0], k): self.node(args[1], v, f"{where}/{k}") for k, v in value.items()}
        if _is_record(kind):
            saved = saved_fields(kind)
            return {f.name: self.node(h, getattr(value, f.name), f"{where}/{f.name}") for f, h in saved}
        return value

    def _key(self, tensor: Tensor, where: str) -> str:
        this = identity(tensor)
        if this not in self._keys:
            if tensor.dtype not in _DTYPES.values():
                raise TypeError(f"{where or 'the tensor'} is of {tensor.dtype}, which cannot be kept")
            key = self._new(where)
            self.tensors[key], self._keys[this] = tensor.detach(), key
        return self._keys[this]

    def _new(self, where: str) -> str:
        key = _key_of(where)
        while key in self.tensors or key == "__metadata__":
            key += "'"
        return key

    def _gathered(self, vector: ParamVector, shards: Shards, where: str) -> dict[str, str]:
        """The keys of a vector's tensors; those that are new are made whole, and are the first process's."""
        known = shards.ranks.told(lambda: [self._keys.get(identity(tensor)) for tensor in vector.values()])
        keys = {name: key for name, key in zip(vector, known, strict=True) if key is not None}
        fresh = {name: tensor.detach() for name, tensor in vector.items() if name not in keys}
        for name, whole in shards.gathered(fresh):
            keys[name] = self._new(f"{where}/{name}")
            first = shards.ranks.rank == 0
            self.tensors[keys[name]] = whole.cpu().clone() if first else whole.new_empty(0)
            if first:
                self._keys[identity(vector[name])] = keys[name]
        return {name: keys[name] for name in vector}


# --- trees to values ---------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device, shards: Shards | None) -> None:
        self.used: set[str] = set()
        self._tensors, self._device, self._shards = tensors, device, shards
        self._inline: dict[str, Tensor] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._shared: dict[Any, Any] = {}

    def value(self, hint: Any, node: Any) -> Any:
        kind, args = get_origin(hint) or hint, get_args(hint)
        if kind in _UNIONS:
            return self._choice(args, node)
        if kind is float:
            return _float(node)
        if kind is Path:
            return Path(_typed(str, node))
        if kind is bytes:
            return base64.b64decode(_typed(str, node), validate=True)
        if kind is Tensor:
            node = dict(node) if isinstance(node, _TensorNode) else node  # as `encode` left it
            numbers = {k: v for k, v in _typed(dict, node).items() if k in ("dtype", "shape", "values")}
            _check_keys(node, ("tensor", "cpu", *numbers))
            if numbers:
                self._inline[_typed(str, node["tensor"])] = _from_numbers(**numbers)
            return self._tensor(node["tensor"], on_cpu=_typed(bool, node["cpu"]))
        if kind is torch.Generator:
            _check_keys(node, ("generator", "cpu"))
            key, place = node["generator"], "cpu" if _typed(bool, node["cpu"]) else self._device
            state = self._tensor(key, on_cpu=True)
            return self._once((torch.Generator, key), lambda: torch.Generator(place).set_state(state))
        if kind is ParamVector:
            _check_keys(node, ("vector", "columns"))
            keys, columns = _typed(dict, node["vector"]), self.value(int | None, node["columns"])
            lead = columns is not None
            tensors = {name: self._tensor(key, on_cpu=False, parted_after=lead) for name, key in keys.items()}
            shards = self._shards
            if shards is not None and set(keys) != set(shards.shapes):  # no vector of the model's parameters
                shards = Shards(shards.ranks, {name: self._shapes[key][lead:] for name, key in keys.items()})
            make = partial(ParamVector, tensors, columns=columns, shards=shards)
            return self._once((columns, *keys.items()), make)
        if kind in _SEQUENCES:
            hints = _item_hints(hint, len(_typed(list, node)))
            items = [self.value(h, item) for h, item in zip(hints, node, strict=True)]
            return tuple(items) if kind is tuple else items
        if kind in _MAPPINGS:
            return {_key_value(args[0], k): self.value(args[1], v) for k, v in _typed(dict, node).items()}
        if _is_record(kind):
            hint_of = {f.name: h for f, h in saved_fields(kind)}
            _check_keys(node, hint_of)
            return kind(**{name: self.value(h, node[name]) for name, h in hint_of.items()})
        if not _fits(hint, node):
            raise ValueError(f"{node!r:.100} stands for {_name(hint)}")
        return node

    def _choice(self, members: tuple[Any, ...], node: Any) -> Any:
        others = _not_none(members)
        if node is None and len(others) < len(members):
            return None
        if len(others) == 1:
            return self.value(others[0], node)
        if not isinstance(node, dict):
            return self.value(_member([m for m in others if _is_plain(m)], node), node)
        ((tag, node),) = node.items()
        return self.value({_name(m): m for m in others}[tag], node)

    def _tensor(self, key: Any, *, on_cpu: bool, parted_after: int | None = None) -> Tensor:
        """A tensor; where several processes hold vectors together, rows of one, behind so many dimensions."""
        self.used.add(key)
        parted = None if parted_after is None else self._shards

        def make() -> Tensor:
            found = self._inline[key] if key in self._inline else self._tensors[key]
            self._shapes[key] = found.shape
            if parted is not None:
                found = Shards(parted.ranks, {"": found.shape[parted_after:]}).part("", found).clone()
            return found.to("cpu" if on_cpu else self._device)

        return self._once((key, on_cpu, parted is not None), make)  # type: ignore[no-any-return]

    def _once(self, key: Any, make: Any) -> Any:
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]


# --- what a hint allows --------------------------------------------------------------------------------------------


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value is of a hint, its items aside."""
    kind, args = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:
        return any(type(value) is type(member) and value == member for member in args)
    if kind is None or kind is types.NoneType:
        return value is None
    if kind is float or kind is int:
        return isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if _is_record(kind):
        return type(value) is kind  # a subclass would lose its own fields
    if kind in (bool, str, bytes, Path, Tensor, torch.Generator, ParamVector) or (
        args and kind in _SEQUENCES + _MAPPINGS
    ):
        return isinstance(value, kind) and not (kind is Sequence and isinstance(value, str))
    raise TypeError(f"values of {hint} cannot be kept")


def _member(members: Sequence[Any], value: Any) -> Any:
    """The member of a union that a value is of; an int is a float only where no int is asked for."""
    fitting = sorted((m for m in members if _fits(m, value)), key=lambda m: m is float)
    if not fitting:
        raise TypeError(f"{value!r:.100} is none of {', '.join(map(_name, members))}")
    return fitting[0]


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def _is_plain(member: Any) -> bool:
    return member in (bool, int, float, str) or get_origin(member) is Literal


def _not_none(members: tuple[Any, ...]) -> list[Any]:
    return [member for member in members if member is not types.NoneType]


def _item_hints(hint: Any, count: int) -> Sequence[Any]:
    args = get_args(hint)
    return args if get_origin(hint) is tuple and args[-1] is not ... else args[:1] * count


def _name(hint: Any) -> str:
    kind = get_origin(hint) or hint
    return str(hint) if kind is Literal else str(getattr(kind, "__name__", kind))


def _key_text(hint: Any, key: Any) -> str:
    if get_origin(hint) is tuple and all(type(k) is int for k in key):
        return ",".join(map(str, key))
    if hint in (str, int) and type(key) is hint:
        return str(key)
    raise TypeError(f"the key {key!r} of {hint} cannot be kept; str, int and tuples of int can")


def _key_value(hint: Any, key: str) -> Any:
    value = key if hint is str else int(key) if hint is int else tuple(int(k) for k in key.split(",") if k)
    if _key_text(hint, value) != key:
        raise ValueError(f"{key!r:.100} is no key")
    return value


# --- nodes -------------------------------------------------------------------------------------------------------


def _typed(kind: type[T], node: Any) -> T:
    if type(node) is not kind:
        raise ValueError(f"{node!r:.100} is not of {kind.__name__}")
    return node


def _check_keys(node: Any, expected: Any) -> None:
    if wrong := _typed(dict, node).keys() ^ set(expected):
        raise ValueError(f"{min(wrong)!r:.100} is {'not expected' if min(wrong) in node else 'missing'}")


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _float(node: Any) -> float:
    if isinstance(node, str):
        return _NON_FINITE[node]
    if type(node) not in (int, float) or not math.isfinite(node):
        raise ValueError(f"{node!r:.100} is not a number")
    return float(node)


def _numbers(tensor: Tensor) -> dict[str, Any]:
    values = [_number(value) if isinstance(value, float) else value for value in tensor.reshape(-1).tolist()]
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "values": values}


def _from_numbers(dtype: Any, shape: Any, values: Any) -> Tensor:
    kind, lengths = _DTYPES[dtype], [_typed(int, length) for length in shape]
    if min(lengths, default=0) < 0 or math.prod(lengths) != len(_typed(list, values)):
        raise ValueError(f"{len(values)} numbers stand for a tensor of shape {shape!r:.100}")
    if kind in _FLOATS:
        return (
            torch.tensor([_float(value) for value in values], dtype=torch.float64).to(kind).reshape(lengths)
        )
    plain = bool if kind is torch.bool else int
    return torch.tensor([_typed(plain, value) for value in values], dtype=kind).reshape(lengths)


def _same_bits(left: Tensor, right: Tensor) -> bool:
    whole = torch.contiguous_format  # a copy: a single number counts as contiguous whatever its stride
    return torch.equal(
        *(t.cpu().clone(memory_format=whole).reshape(-1).view(torch.uint8) for t in (left, right))
    )
