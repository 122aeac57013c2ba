"""`ParamVector`: a vector in parameter space that keeps the parameters' names and shapes.

Nothing here flattens: on a large model a flat copy is a second model in memory, and on a sharded one it is
not even possible. Algebra is in place where it can be, and one code path serves a single vector and a block
of several (``columns``), so that a solver reads the same for one right-hand side and for thirty. Nor does it read
otherwise for a vector of which each of several processes holds a part (``shards``): algebra is done part by part, and
inner products are summed over the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from whence.distributed import Shards
from whence.errors import VectorError

__all__ = ["ParamVector"]

#: Numbers that exact inner products widen to float64 at once: 4 MB, which stay in the cache.
_EXACT_AT_ONCE = 2**19


class ParamVector(Mapping[str, Tensor]):
    """A vector ``v`` with one tensor per parameter, under the parameter's own name and shape.

    With ``columns=k`` it is a block of k vectors: each tensor has a leading dimension k, inner products
    and norms come per column, and scalars may be given per column.

    Args:
        tensors: name -> tensor. The tensors are kept, not copied.
        columns: number of vectors in the block, or None for a single vector.
        shards: where several processes hold a vector together, who holds what; the tensors are then this process's
            rows of every parameter, `numel`, `nbytes` and `shape_of` are those of the whole vector, and `whole` makes
            one of it. What sums over entries is called on all of the processes.

    Example:
        >>> v = ParamVector({"weight": torch.ones(2, 3), "bias": torch.ones(3)})
        >>> float(v.dot(v))
        9.0
        >>> v.axpy_(2.0, v.clone())["bias"]
        tensor([3., 3., 3.])
    """

    __slots__ = ("_columns", "_shards", "_tensors")

    def __init__(
        self, tensors: Mapping[str, Tensor], *, columns: int | None = None, shards: Shards | None = None
    ) -> None:
        # by hand, not by `checked`: vectors are made in the innermost loops
        if not isinstance(tensors, Mapping):
            kind = type(tensors).__name__
            raise VectorError(f"a ParamVector is made of a mapping from names to tensors, not of a {kind}")
        if not isinstance(columns, int | None) or not isinstance(shards, Shards | None):
            raise VectorError("columns is a whole number or None, and shards are Shards or None")
        if not tensors:
            raise VectorError("a ParamVector needs at least one tensor; got an empty mapping")
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise VectorError(f"{name!r} must be a floating-point tensor, got {kind}")
            if columns is not None and (tensor.ndim == 0 or tensor.shape[0] != columns):
                raise VectorError(
                    f"{name!r} has shape {tuple(tensor.shape)}; a block of {columns} vectors needs "
                    f"a leading dimension of {columns}"
                )
            if shards is not None:
                lead = () if columns is None else (columns,)
                if name not in shards.shapes or tensor.shape != (*lead, *shards.shape(name)):
                    raise VectorError(
                        f"{name!r} has shape {tuple(tensor.shape)}, which is not what {shards.ranks!r} holds of it"
                    )
        self._tensors = dict(tensors)
        self._columns = columns
        self._shards = shards

    # --- a mapping ---------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        block = "" if self._columns is None else f", columns={self._columns}"
        return f"ParamVector({len(self)} tensors, {self.numel:,} numbers{block})"

    @property
    def columns(self) -> int | None:
        """Number of vectors in the block, or None for a single vector."""
        return self._columns

    @property
    def shards(self) -> Shards | None:
        """How several processes hold the vector together; None where this one holds it all."""
        return self._shards

    def held_as(self, shards: Shards | None) -> bool:
        """Whether the vector is held in this way."""
        return shards is self._shards or (self._shards is not None and self._shards.same_as(shards))

    @property
    def numel(self) -> int:
        """Dimension of the space (of one column)."""
        return sum(self.shape_of(name).numel() for name in self)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, all columns together."""
        sizes = (self.shape_of(name).numel() * tensor.element_size() for name, tensor in self.items())
        return sum(sizes) * (self._columns or 1)

    # --- making others -----------------------------------------------------------------------------------

    def like(self, tensors: Mapping[str, Tensor], columns: int | None = None) -> ParamVector:
        """A vector of the same space, held as this one is, of other tensors."""
        return ParamVector(tensors, columns=columns, shards=self._shards)

    def whole(self) -> ParamVector:
        """The vector with all its entries, on every process that holds a part of it; else itself."""
        if self._shards is None:
            return self
        return ParamVector(dict(self._shards.gathered(self._tensors)), columns=self._columns)

    def whole_of(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Some of the whole vector's tensors."""
        some = {name: self._tensors[name] for name in names}
        return some if self._shards is None else dict(self._shards.gathered(some))

    def own_rows(self, name: str, whole: Tensor) -> Tensor:
        """Of a whole tensor under this name, what this process holds; a view."""
        return whole if self._shards is None else self._shards.part(name, whole)

    def parted(self, shards: Shards | None) -> ParamVector:
        """This process's rows of a whole vector, in memory of their own; itself where there is no other process."""
        if shards is None or self._shards is not None:
            return self
        parts = {name: shards.part(name, tensor).clone() for name, tensor in self.items()}
        return ParamVector(parts, columns=self._columns, shards=shards)

    def summed(self, shards: Shards | None) -> ParamVector:
        """This process's rows of the sum of whole vectors, of which every process has one; may overwrite it."""
        if shards is None:
            return self
        return ParamVector(dict(shards.summed(self._tensors)), columns=self._columns, shards=shards)

    def _map(self, function: Callable[[Tensor], Tensor]) -> ParamVector:
        return self.like({n: function(t) for n, t in self._tensors.items()}, self._columns)

    def _drawn(self, draw: Callable[[torch.Size, torch.dtype], Tensor]) -> ParamVector:
        """Numbers drawn for whole tensors, alike on all processes, of which each keeps its rows."""
        lead = () if self._columns is None else (self._columns,)
        found = {}
        for name, tensor in self.items():
            drawn = draw(torch.Size(lead + self.shape_of(name)), tensor.dtype)
            found[name] = self.own_rows(name, drawn).to(tensor.device, copy=self._shards is not None)
        return self.like(found, self._columns)

    def clone(self) -> ParamVector:
        """A copy with storage of its own."""
        return self._map(lambda tensor: tensor.detach().clone(memory_format=torch.contiguous_format))

    def zeros(self, columns: int | None = None) -> ParamVector:
        """Zero vector of the same space; a block of zeros where ``columns`` is given."""
        lead = () if columns is None else (columns,)
        start = 0 if self._columns is None else 1
        zeros = {name: tensor.new_zeros(lead + tensor.shape[start:]) for name, tensor in self.items()}
        return self.like(zeros, columns)

    def zeros_like(self) -> ParamVector:
        """Zeros of the same space and the same number of columns."""
        return self.zeros(self._columns)

    def shape_of(self, name: str) -> torch.Size:
        """Shape of one column's tensor: the parameter's own shape, whatever this process holds of it."""
        if self._shards is not None:
            return self._shards.shapes[name]
        shape = self._tensors[name].shape
        return shape if self._columns is None else shape[1:]

    def randn_like(self, generator: torch.Generator) -> ParamVector:
        """Independent standard normal entries, reproducible from ``generator``."""
        device = generator.device
        return self._drawn(
            lambda shape, dtype: torch.randn(shape, generator=generator, device=device, dtype=dtype)
        )

    def rademacher_like(self, generator: torch.Generator) -> ParamVector:
        """Independent signs ±1, reproducible from ``generator``."""

        def signs(shape: torch.Size, dtype: torch.dtype) -> Tensor:
            bits = torch.randint(0, 2, shape, generator=generator, device=generator.device)
            return bits.to(dtype).mul_(2).sub_(1)

        return self._drawn(signs)

    def column(self, index: int) -> ParamVector:
        """One vector of the block, as a view: writing to it writes to the block."""
        if self._columns is None:
            raise VectorError("this ParamVector is a single vector; it has no columns")
        return self.like({name: tensor[index] for name, tensor in self.items()})

    def part(self, start: int, stop: int) -> ParamVector:
        """The block's columns from start to stop, as a view; fewer where it ends before."""
        if self._columns is None:
            raise VectorError("this ParamVector is a single vector; it has no columns")
        start, stop, _ = slice(start, stop).indices(self._columns)
        return self.like({name: tensor[start:stop] for name, tensor in self.items()}, stop - start)

    def unstack(self) -> list[ParamVector]:
        """The block's vectors, as views; a single vector gives a list of itself."""
        return [self] if self._columns is None else [self.column(k) for k in range(self._columns)]

    @staticmethod
    def stack(vectors: Sequence[ParamVector]) -> ParamVector:
        """A block of the given single vectors (copies them)."""
        if not vectors:
            raise VectorError("cannot stack an empty list of vectors")
        for vector in vectors:
            if vector.columns is not None:
                raise VectorError("stack takes single vectors, not blocks")
            vectors[0].check_same_space(vector)
        stacked = {name: torch.stack([vector[name] for vector in vectors]) for name in vectors[0]}
        return vectors[0].like(stacked, len(vectors))

    @staticmethod
    def join(blocks: Sequence[ParamVector]) -> ParamVector:
        """One block of the columns of all the given blocks (copies them)."""
        for block in blocks:
            blocks[0].check_same_space(block)
        tensors = {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
        return blocks[0].like(tensors, sum(block.columns or 1 for block in blocks))

    @staticmethod
    def mean(vectors: Sequence[ParamVector]) -> ParamVector:
        """The mean of vectors or blocks of one form, as a running mean: one copy, whatever their number."""
        if not vectors:
            raise VectorError("cannot average an empty list of vectors")
        total = vectors[0].clone()
        for count, vector in enumerate(vectors[1:], start=2):
            total.lerp_(vector, 1 / count)
        return total

    # --- in-place algebra --------------------------------------------------------------------------------

    def axpy_(self, alpha: float | Tensor, other: ParamVector) -> ParamVector:
        """``self += alpha · other``; ``alpha`` may hold one number per column."""
        self.check_same_form(other)
        for mine, theirs, factor in self._triples(other, alpha):
            if isinstance(factor, Tensor):
                mine.addcmul_(theirs.to(mine.dtype), factor.to(mine.dtype))
            else:
                mine.add_(theirs, alpha=factor)
        return self

    def scale_(self, alpha: float | Tensor) -> ParamVector:
        """``self *= alpha``; ``alpha`` may hold one number per column."""
        for mine, _, factor in self._triples(self, alpha):
            mine.mul_(factor.to(mine.dtype) if isinstance(factor, Tensor) else factor)
        return self

    def mul_(self, other: ParamVector) -> ParamVector:
        """``self *= other``, entry by entry; a single vector multiplies every column of a block."""
        if other.columns is None:
            self.check_same_space(other)
        else:
            self.check_same_form(other)
        for name, mine in self.items():
            mine.mul_(other[name].to(mine.dtype))
        return self

    def power(self, exponent: float) -> ParamVector:
        """Every entry to this power, a new vector."""
        return self._map(lambda tensor: tensor.pow(exponent))

    def lerp_(self, other: ParamVector, weight: float) -> ParamVector:
        """``self += weight · (other - self)``: one step of a running mean."""
        self.check_same_form(other)
        for name, mine in self.items():
            mine.lerp_(other[name].to(mine.dtype), weight)
        return self

    def copy_(self, other: ParamVector) -> ParamVector:
        """Overwrite with ``other``'s values."""
        self.check_same_form(other)
        for name, mine in self.items():
            mine.copy_(other[name])
        return self

    def zero_(self) -> ParamVector:
        """Overwrite with zeros."""
        for tensor in self._tensors.values():
            tensor.zero_()
        return self

    # --- inner products ----------------------------------------------------------------------------------

    def dot(self, other: ParamVector) -> Tensor:
        """``⟨self, other⟩`` in float64: a scalar, or one number per column."""
        self.check_same_form(other)
        total: Tensor | None = None
        for name, mine in self.items():
            part = _inner(mine, other[name], batched=self._columns is not None)
            total = part if total is None else total + part
        assert total is not None  # a ParamVector is never empty
        return self._over_processes(total)

    def norm(self) -> Tensor:
        """``‖self‖₂`` in float64: a scalar, or one number per column."""
        return self.dot(self).sqrt()

    def gram(self, other: ParamVector, *, exact: bool = False) -> Tensor:
        """All inner products between the columns of two blocks, ``[k, k']`` in float64.

        Args:
            other: the other block.
            exact: multiply in float64, too: for inner products that cancel, or whose matrix is inverted.
        """
        self.check_same_space(other)
        total: Tensor | None = None
        for name, mine in self.items():
            left = mine.reshape(self._columns or 1, -1)
            right = other[name].reshape(other.columns or 1, -1)
            if exact:  # a few megabytes at a time
                part = left.new_zeros(len(left), len(right), dtype=torch.float64)
                size = max(1, _EXACT_AT_ONCE // (len(left) + len(right)))
                for some, others in zip(left.split(size, 1), right.split(size, 1), strict=True):
                    part.addmm_(some.double(), others.double().T)
            else:
                left = _widened(left)
                part = (left @ right.to(left.dtype).T).double()
            total = part if total is None else total + part
        assert total is not None  # a ParamVector is never empty
        return self._over_processes(total)

    def _over_processes(self, sums: Tensor) -> Tensor:
        """The one place where sums over a vector's entries become those of the whole vector."""
        return sums if self._shards is None else self._shards.ranks.sum(sums)

    @property
    def rounding(self) -> float:
        """The rounding unit of the coarsest tensor."""
        return max(torch.finfo(tensor.dtype).eps for tensor in self._tensors.values())

    def mix(self, weights: Tensor) -> ParamVector:
        """The block's columns combined: column j of the result is ``Σ_i weights[i, j] · column i``.

        Args:
            weights: ``[columns, new columns]``; a block times a small matrix.
        """
        if (
            self._columns is None
            or weights.ndim != 2
            or len(weights) != self._columns
            or not weights.shape[1]
        ):
            raise VectorError(f"cannot combine the columns of {self!r} with weights {tuple(weights.shape)}")
        mixed = {
            name: torch.tensordot(weights.T.to(tensor.device, tensor.dtype), tensor, dims=1)
            for name, tensor in self.items()
        }
        return self.like(mixed, weights.shape[1])

    def is_finite(self) -> bool:
        """Whether every entry is finite."""
        bad = sum(not bool(torch.isfinite(tensor).all()) for tensor in self._tensors.values())
        return (
            bad == 0 if self._shards is None else float(self._over_processes(torch.tensor(float(bad)))) == 0
        )

    # --- checks ------------------------------------------------------------------------------------------

    def check_same_space(self, other: ParamVector, what: str = "vector") -> None:
        """Raise `VectorError` unless ``other`` has the same names and parameter shapes."""
        missing = [name for name in self if name not in other]
        unknown = [name for name in other if name not in self]
        if missing or unknown:
            raise VectorError(
                f"the {what} belongs to another model or parameter selection: "
                f"missing {_few(missing)}, unexpected {_few(unknown)}. Build it from the same model with "
                "the same `params` filter"
            )
        if not self.held_as(other.shards):
            raise VectorError(
                f"the {what} is not held as it should be: one is whole, the other in parts on several processes. Make "
                "it whole with whole(), or part it with parted(vector.shards)"
            )
        for name in self:
            if self.shape_of(name) != other.shape_of(name):
                raise VectorError(
                    f"the {what}'s {name!r} has shape {tuple(other.shape_of(name))}, expected "
                    f"{tuple(self.shape_of(name))}. Build it from the same model"
                )

    def check_same_form(self, other: ParamVector, what: str = "vector") -> None:
        """Raise `VectorError` unless ``other`` is of the same space and has as many columns."""
        if other is self:
            return
        if self._columns != other._columns:
            raise VectorError(
                f"cannot combine {self!r} with the {what} {other!r}: different numbers of columns"
            )
        other_shards = other._shards is not self._shards
        if (
            other_shards
            or len(self) != len(other)
            or any(n not in other or other[n].shape != t.shape for n, t in self.items())
        ):
            self.check_same_space(other, what)

    def _triples(
        self, other: ParamVector, alpha: float | Tensor
    ) -> Iterator[tuple[Tensor, Tensor, float | Tensor]]:
        """Own tensor, other's tensor, and ``alpha`` shaped to broadcast over the columns."""
        per_column: Tensor | None = alpha if isinstance(alpha, Tensor) and alpha.ndim == 1 else None
        if per_column is not None and len(per_column) != self._columns:
            raise VectorError(f"{len(per_column)} numbers for {self!r}; give one per column, or a single one")
        for name, mine in self.items():
            factor: float | Tensor
            if per_column is not None:
                factor = per_column.to(mine.device).reshape((-1,) + (1,) * (mine.ndim - 1))
            else:
                factor = float(alpha)
            yield mine, other[name], factor


def _inner(left: Tensor, right: Tensor, *, batched: bool) -> Tensor:
    left = _widened(left)
    right = right.to(left.dtype)
    if batched:
        rows = left.shape[0]
        product: Tensor = torch.linalg.vecdot(left.reshape(rows, -1), right.reshape(rows, -1))
        return product.double()
    return torch.dot(left.reshape(-1), right.reshape(-1)).double()


def _widened(tensor: Tensor) -> Tensor:
    """At least float32: sums of half-precision numbers lose bits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _few(names: Sequence[str], limit: int = 3) -> str:
    if not names:
        return "none"
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
