"""EK-FAC: H as if it were diagonal in a Kronecker basis, matrix by matrix (George et al., 2018).

A linear layer with inputs ``a`` and gradients ``g`` of its outputs has the gradient ``G = Σ g aᵀ`` on an example.
With Q_A and Q_G the eigenvectors of the means of ``a aᵀ`` and ``g gᵀ``, its block of H is taken as diagonal in the
basis ``Q = Q_G ⊗ Q_A``, and the blocks between layers as zero:

    P = s·Q diag(E) Qᵀ + λ,      E = mean of (Q_Gᵀ G Q_A)² = diagonal of QᵀHQ

Every parameter is covered. Where a layer is no linear one, the bases are those of ``G Gᵀ`` and ``Gᵀ G``; where examples
have no gradients of their own (`whence.model.layers`), those of whole batches take their place, whose labels are drawn
from the model: they have H as second moment too. A side that is too wide has the identity for a basis.

What P leaves out, above all the blocks between layers, makes it too small along gradients. The scale s makes up for it:
`whence.attribution.planning` sets it. Derived in docs/math.md, "EK-FAC".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from whence.distributed import ALONE, Ranks
from whence.errors import ModelError, OptionError, VectorError
from whence.model.gauss_newton import ACTIVATION_BUDGET, GaussNewton
from whence.model.inspection import check_finite
from whence.model.layers import Call, Matrix, Passed, matrices
from whence.preconditioners.base import Preconditioner, check_damping
from whence.preconditioners.kronecker import KroneckerBlock
from whence.preconditioners.sums import TOGETHER, Sums, of_one
from whence.preconditioners.turned import Turned, by_position, side_of
from whence.progress import ticker
from whence.tasks import Batch, Task
from whence.tasks.base import noise
from whence.vectors import ParamVector

__all__ = ["Ekfac", "KroneckerBlock", "basis_widths", "draws_of_each", "ekfac"]

#: Q_G and Q_A of a matrix; None for the identity.
_Bases = tuple[ParamVector | None, ParamVector | None]
Curvature = Literal["auto", "exact", "sampled"]

#: Examples with up to this many outputs get the exact curvature by default: a backward pass for each.
_EXACT_OUTPUTS = 2
#: Fewer terms than this are gone over several times with other draws.
_DRAWN_TERMS = 4096
#: Sides up to this width always get a basis; wider ones where finding it costs less than a pass over the data.
_NARROW = 2048
#: Wider ones never do.
_WIDEST = 16384
#: Terms that bases are found from, for every column of the widest.
_TERMS_PER_COLUMN = 32


@dataclass(frozen=True, eq=False)
class Ekfac(Preconditioner):
    """``P = s·Q diag(E) Qᵀ + λ``, matrix by matrix. Made by `ekfac`.

    Products with any power of P are four small matrix products for each. It holds about three times the parameters of a
    square layer, and of an embedding little more than those.

    Attributes:
        damping: λ.
        blocks: of all parameters, each in one of them.
        terms: the terms of the examples that it was made from.
        num_passes: forward passes over them, and as many backward passes for each draw.
        by_batch: parameters whose examples have no gradients of their own, with the reason.
        scale: s.

    Example:
        >>> turned = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
        >>> matrix = Matrix("weight", None, False, (1, 2))
        >>> block = KroneckerBlock.of(matrix, None, turned, torch.tensor([[3.0, 1.0]]))
        >>> P = Ekfac(1.0, (block,), terms=1, num_passes=1, by_batch={})
        >>> P.solve(ParamVector({"weight": torch.tensor([[0.6, 0.8]])}))["weight"]
        tensor([[0.1500, 0.2000]])
        >>> P.smallest
        0.25
    """

    damping: float
    blocks: tuple[KroneckerBlock, ...]
    terms: int
    num_passes: int
    by_batch: dict[str, str]
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_damping(self.damping)
        if not 0 < self.scale < math.inf:
            raise OptionError(f"the scale of EK-FAC is {self.scale}; it must be a positive number")

    def __repr__(self) -> str:
        return (
            f"Ekfac(λ = {self.damping:.3g}, {len(self.blocks)} matrices, {self.terms:,} terms, "
            f"scale {self.scale:.3g})"
        )

    def solve(self, vector: ParamVector) -> ParamVector:
        return self._apply(vector, lambda values: (self.scale * values + self.damping).reciprocal_())

    def root_solve(self, vector: ParamVector) -> ParamVector:
        return self._apply(vector, lambda values: (self.scale * values + self.damping).rsqrt_())

    def _apply(self, vector: ParamVector, function: Callable[[Tensor], Tensor]) -> ParamVector:
        known = {name for block in self.blocks for name in block.matrix.names}
        if known != set(vector):
            raise VectorError(
                f"the vector and the preconditioner differ in {sorted(known ^ set(vector))[:3]}; use it with the "
                "parameters that it was made for"
            )
        parts: dict[str, Tensor] = {}
        for block in self.blocks:
            rows, columns = block.matrix.shape
            widths = (rows * (columns - (block.matrix.bias is not None)), rows)
            for name, width in zip(block.matrix.names, widths, strict=False):
                if vector.shape_of(name).numel() != width:
                    raise VectorError(
                        f"{name!r} has shape {tuple(vector.shape_of(name))} in the vector; the preconditioner was "
                        f"made for {width} numbers. Use it with the model that it was made for"
                    )
            parts |= block.apply(vector, function)
        return vector.like({name: parts[name] for name in vector}, vector.columns)

    @property
    def largest(self) -> float:
        """‖P‖, its largest eigenvalue."""
        tops = [
            block.eigenvalues.max() for block in self.blocks if block.eigenvalues.numel()
        ]  # it may hold no rows
        top = torch.stack([*tops, self.blocks[0].eigenvalues.new_zeros(())]).max()
        return self.damping + self.scale * float(self._ranks.largest(top.double()))

    @property
    def smallest(self) -> float:
        """``λ/‖P‖``, which needs nothing of H but ``H ≽ 0``: ``P^(-1/2)(H + λ)P^(-1/2) ≽ λP⁻¹ ≽ λ/‖P‖``."""
        return self.damping / self.largest

    @property
    def trace(self) -> float:
        """H's trace, but for the error of sampling."""
        sums = [block.eigenvalues.sum(dtype=torch.float64) for block in self.blocks]
        return float(self._ranks.sum(torch.stack(sums)).sum())

    @property
    def frobenius(self) -> float:
        """``‖E‖``, H's Frobenius norm but for what is off the diagonal in the basis."""
        squares = [block.eigenvalues.double().square().sum() for block in self.blocks]
        return math.sqrt(float(self._ranks.sum(torch.stack(squares)).sum()))

    @property
    def _ranks(self) -> Ranks:
        shards = self.blocks[0].parts.shards
        return ALONE if shards is None else shards.ranks

    def with_damping(self, damping: float) -> Ekfac:
        """The same for another λ, at no cost: neither the basis nor E depends on it."""
        return replace(self, damping=damping)

    def with_scale(self, scale: float) -> Ekfac:
        """The same with another s, at no cost."""
        return replace(self, scale=scale)


def ekfac(
    gnh: GaussNewton,
    damping: float,
    *,
    generator: torch.Generator,
    examples: int | None = None,
    curvature: Curvature = "auto",
    samples: int | None = None,
    widest: int = _WIDEST,
) -> Ekfac:
    """EK-FAC for ``H + λ``, from two passes over data: some of it for the bases, then all of it for E in them.

    In the coordinates of the operator's metric, where it has one. The model is left as it is.

    Args:
        gnh: the operator H: model, task, data and selected parameters.
        damping: λ.
        generator: draws the examples, and the residuals of a sampled curvature.
        examples: how many examples to use, drawn without repetition; all by default.
        curvature: ``"exact"`` takes a backward pass for every output of an example: K, times the length of a sequence.
            ``"sampled"`` takes ``samples`` of them, each with residuals drawn anew, and E is unbiased. ``"auto"`` is
            exact up to two outputs.
        samples: draws per example and pass of a sampled curvature; by default one, or more where data are few.
        widest: sides with more rows or columns have the identity for a basis; so have wide ones whose eigenvectors
            would cost more than a pass over the data.

    Example:
        >>> from whence import Regression
        >>> data = [(torch.tensor([1.0, 0.0]), torch.ones(1)), (torch.tensor([0.0, 2.0]), torch.zeros(1))]
        >>> H = GaussNewton(torch.nn.Linear(2, 1, bias=False).eval(), Regression(), data)  # diag(0.5, 2)
        >>> P = ekfac(H, 0.5, generator=torch.Generator().manual_seed(0))
        >>> P.solve(ParamVector({"weight": torch.ones(1, 2)}))["weight"]
        tensor([[1.0000, 0.4000]])
    """
    check_damping(damping)
    _check_options(gnh, examples, curvature, samples, widest)
    positions = torch.arange(len(gnh.terms))
    if examples is not None:
        order = torch.randperm(len(gnh.terms), generator=generator, device=generator.device)
        positions = order[:examples].sort().values.cpu()
    terms = int(gnh.terms.counts()[positions].sum())
    draws = _Draws(gnh, curvature, samples, terms)
    measured = _Measured(gnh, draws, _narrow_enough(gnh, terms, widest), generator)
    blocks = measured.factors(positions)
    return Ekfac(
        damping=float(damping),
        blocks=blocks,
        terms=terms,
        num_passes=2,
        by_batch=dict(measured.layers.missing),
    )


def _narrow_enough(gnh: GaussNewton, terms: int, widest: int) -> int:
    """The widest side that gets a basis: its eigenvectors take about 10·width³ operations, a pass 6 per number."""
    affordable = int((0.6 * terms * gnh.num_parameters) ** (1 / 3))
    return min(widest, max(_NARROW, affordable))


def draws_of_each(terms: int) -> int:
    """Draws per example and pass of a sampled curvature, where there are enough outputs."""
    return max(1, _DRAWN_TERMS // max(terms, 1))


def basis_widths(gnh: GaussNewton, terms: int) -> list[int]:
    """Of every basis that is found from so many terms."""
    widest = _narrow_enough(gnh, terms, _WIDEST)
    sides = (side for matrix in matrices(gnh.network) for side in matrix.shape[matrix.looked_up :])
    return [side for side in sides if 1 < side <= widest]


class _Draws:
    """Gradients with respect to the outputs whose second moment is S: all of its root's columns, or random ones."""

    def __init__(self, gnh: GaussNewton, curvature: str, samples: int | None, terms: int) -> None:
        self.task = gnh.task
        pilot = gnh.terms.fetch(gnh.terms.longest(1))
        with torch.no_grad():
            outputs = gnh.network.outputs(pilot).numel()
        self.exact = curvature == "exact" or (curvature == "auto" and outputs <= _EXACT_OUTPUTS)
        if curvature == "auto" and samples is not None:
            self.exact = False
        #: Examples whose roots, where they are needed, fit in memory together.
        self.at_once = max(1, ACTIVATION_BUDGET // (8 * outputs**2))
        if gnh.has_factors and not self.exact:
            self.at_once = len(gnh.terms)
        self.samples = samples or min(outputs, draws_of_each(terms))
        if (self.exact or not gnh.has_factors) and 8 * outputs**2 > ACTIVATION_BUDGET:
            raise OptionError(
                f"an exact curvature needs the root of a matrix for each example, too large for {outputs:,} outputs; "
                + ("use curvature='sampled'" if gnh.has_factors else "use solver='cg' without EK-FAC")
            )

    def of(self, batch: Batch, generator: torch.Generator) -> Callable[[Tensor], Sequence[Tensor]]:
        """The cotangents of a batch, each scaled so that their squares add up to S."""

        def cotangents(outputs: Tensor) -> Sequence[Tensor]:
            found = drawn(outputs)
            # a process without an example passes one along with the others, which counts for nothing
            return found if batch.held else [torch.zeros_like(cotangent) for cotangent in found]

        def drawn(outputs: Tensor) -> Sequence[Tensor]:
            check_finite(outputs)
            wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
            if not self.exact and type(self.task).sample_residual is not Task.sample_residual:
                found = [self.task.sample_residual(wide, batch, generator) for _ in range(self.samples)]
                return [residual / math.sqrt(self.samples) for residual in found if residual is not None]
            root = _root(self.task, wide, batch)  # [n, m, columns]
            if (
                self.exact
            ):  # with a random sign for each example, so that a batch's sum has the same second moment
                columns = (root * _signs(batch, (1, 1), generator).to(root)).unbind(-1)
            else:
                signs = _signs(batch, (root.shape[-1], self.samples), generator).to(root)
                columns = torch.bmm(root, signs / math.sqrt(self.samples)).unbind(-1)
            return [column.reshape(outputs.shape) for column in columns]

        return cotangents


def _signs(batch: Batch, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random signs for every example of a batch."""
    device = generator.device
    bits = noise(
        batch,
        (batch.size, *shape),
        lambda sizes: torch.randint(0, 2, sizes, generator=generator, device=device),
    )
    return 2 * bits - 1


def _root(task: Task, outputs: Tensor, batch: Batch) -> Tensor:
    """``R`` with ``R Rᵀ = S``, ``[n, m, m]``, for all m outputs of each example."""
    n, m = batch.size, outputs[0].numel()
    identity = torch.eye(m, dtype=outputs.dtype, device=outputs.device)
    tangents = identity.reshape(m, 1, *outputs.shape[1:]).expand(m, *outputs.shape)
    hessians = task.hessian_product(outputs, tangents, batch).reshape(m, n, m).transpose(0, 1)
    values, vectors = torch.linalg.eigh(hessians)
    rounding = m * torch.finfo(values.dtype).eps * values.amax(1, keepdim=True)
    root: Tensor = vectors * values.where(values > rounding, 0.0).sqrt().unsqueeze(1)
    return root


class _Measured:
    """Two passes over the data.

    Sums over the examples are `whence.preconditioners.sums`.
    """

    def __init__(self, gnh: GaussNewton, draws: _Draws, widest: int, generator: torch.Generator) -> None:
        self.gnh, self.draws, self.widest, self.generator = gnh, draws, widest, generator
        self.layers = gnh.example_gradients()
        self.matrices = matrices(gnh.network)
        self.turned = Turned(gnh)
        self.size = min(gnh.micro_batch, draws.at_once)

    def factors(self, positions: Tensor) -> tuple[KroneckerBlock, ...]:
        """The blocks, from these examples."""
        some = self._enough_for_bases(positions)
        batches = -(-len(some) // self.size) + -(-len(positions) // self.size)
        with ticker("EK-FAC", batches) as tick:
            bases = self._bases(some, tick)
            return self._blocks(bases, positions, tick)

    def _enough_for_bases(self, positions: Tensor) -> Tensor:
        sides = [side for matrix in self.matrices for side in matrix.shape[matrix.looked_up :]]
        widest = max((side for side in sides if side <= self.widest), default=1)
        wanted = _TERMS_PER_COLUMN * widest / self.gnh.terms.terms_per_example
        many = max(int(wanted), len(positions) // 16)
        if self.draws.exact or many >= len(positions):
            return positions
        device = self.generator.device
        order = torch.randperm(len(positions), generator=self.generator, device=device).cpu()
        return positions[order[:many].sort().values]

    def _passes(self, positions: Tensor, tick: Callable[[], None]) -> Iterator[Passed]:
        """Of this process's share of the examples; of all, where some have gradients as a batch alone."""
        together = bool(self.layers.missing)
        shares = self.gnh.drawing_shares(positions, self.size, self.generator, together=together)
        for batch, drawing in shares:
            yield from self.layers.passes(batch, self.draws.of(batch, drawing), others=True)
            tick()

    # --- the bases ---------------------------------------------------------------------------------------

    def _bases(self, positions: Tensor, tick: Callable[[], None]) -> dict[Matrix, _Bases]:
        moments, ranks = Sums(self.gnh.network, together=bool(self.layers.missing)), self.gnh.network.ranks

        def add(matrix: Matrix, side: int, vectors: Tensor) -> None:
            """``Σ x xᵀ`` over all vectors x of a side that is narrow enough, and more than one wide."""
            if 1 < matrix.shape[side] <= self.widest:
                moments.add_squares((matrix, side), vectors.reshape(-1, vectors.shape[-1]))

        for passed in self._passes(positions, tick):
            for matrix in self.matrices:
                calls = by_position(matrix, passed)
                if calls:
                    for call, kind in calls:
                        self._add_sides(matrix, call, kind, add)
                    continue
                packed = self.turned.packed(matrix, passed)
                if packed is not None:
                    add(matrix, 0, packed.mT)
                    add(matrix, 1, packed)

        widths = [side for matrix in self.matrices for side in matrix.shape if side <= self.widest]
        few = 8 * sum(width**2 for width in widths) <= TOGETHER  # else they are gathered in every pass

        def basis(matrix: Matrix, side: int) -> ParamVector | None:
            moment = moments.pop(
                (matrix, side), self._zeros(matrix).new_zeros(2 * matrix.shape[side : side + 1])
            )
            found = None if moment is None else _eigenvectors(moment.whole()[""], matrix)
            if found is None or moment is None:
                return None
            same = of_one(ranks.same(found))  # one basis for all: eigenvectors are not unique
            return same if few else same.parted(moment.shards)

        return {matrix: (basis(matrix, 0), basis(matrix, 1)) for matrix in self.matrices}

    def _zeros(self, matrix: Matrix) -> Tensor:
        parameter = self.gnh.network.parameters[matrix.weight]
        return torch.zeros((), dtype=_wide(parameter), device=parameter.device)

    def _add_sides(
        self,
        matrix: Matrix,
        call: Call,
        kind: str,
        add: Callable[[Matrix, int, Tensor], None],
    ) -> None:
        g = call.outputs_by_position
        rows, columns = self.turned.scales[matrix]
        if call.is_embedding:
            add(matrix, 1, side_of(g, columns, None))
        elif kind == "bias":
            add(matrix, 0, side_of(g.sum(1), rows, None))
        else:
            # a position that nothing depends on but by rounding, such as padding, tells nothing of the inputs
            sizes = g.abs().amax(-1, keepdim=True)
            met = sizes > math.sqrt(torch.finfo(g.dtype).eps) * sizes.amax(1, keepdim=True)
            add(
                matrix, 1, side_of(call.inputs_by_position(bias=matrix.bias is not None) * met, columns, None)
            )
            if not matrix.looked_up:  # an embedding's inputs are one-hot, and their moment diagonal
                add(matrix, 0, side_of(g, rows, None))

    # --- E -----------------------------------------------------------------------------------------------

    def _blocks(
        self, bases: dict[Matrix, _Bases], positions: Tensor, tick: Callable[[], None]
    ) -> tuple[KroneckerBlock, ...]:
        squares = Sums(self.gnh.network, together=bool(self.layers.missing))
        for passed in self._passes(positions, tick):
            for matrix, sides in bases.items():
                left, right = (None if side is None else side.whole()[""] for side in sides)
                squared: Tensor | None = None
                for few in passed.of_few(matrix.names, math.prod(matrix.shape)):
                    turned = self.turned.of(matrix, left, right, few)
                    if turned is not None:
                        of_few = turned.square().sum(0)
                        squared = of_few if squared is None else squared.add_(of_few)
                if squared is not None:
                    squares.add(matrix, squared)
        # the sum over the examples becomes an unbiased mean over terms with TermSet's weight
        weight = self.gnh.terms.weight(len(positions))
        found = []
        for matrix, (left_basis, right_basis) in bases.items():
            none = self._zeros(matrix).new_zeros(matrix.shape)
            total = squares.pop(matrix, none)
            if total is None:
                total = of_one(none).parted(squares.shards(of_one(none)))
            total.scale_(weight)
            if not total.is_finite():
                raise ModelError(
                    f"gradients of {matrix.weight!r} are not finite, or too large for this precision; check the "
                    "model's parameters, or use float32 or float64"
                )
            found.append(
                KroneckerBlock.joined(matrix, left_basis, right_basis, total, self.gnh.network.ranks)
            )
        return tuple(found)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _eigenvectors(moment: Tensor | None, matrix: Matrix) -> Tensor | None:
    if moment is None:
        return None
    wide = moment.double() if len(moment) <= _NARROW else moment
    if not bool(wide.isfinite().all()):
        raise ModelError(
            f"gradients of {matrix.weight!r} are not finite, or too large for this precision; check the model's "
            "parameters, or use float32 or float64"
        )
    top = float(wide.diagonal().max())
    if not top > 0:
        return None
    found: Tensor = torch.linalg.eigh(wide / top).eigenvectors.to(moment.dtype).contiguous()
    return found


def _check_options(
    gnh: GaussNewton, examples: int | None, curvature: str, samples: int | None, widest: int
) -> None:
    if not isinstance(gnh, GaussNewton):
        raise OptionError(
            f"EK-FAC is made of a network's layers; give a GaussNewton, not a {type(gnh).__name__}"
        )
    if curvature not in ("auto", "exact", "sampled"):
        raise OptionError(f"curvature is {curvature!r}; it must be 'auto', 'exact' or 'sampled'")
    for name, value in (("examples", examples), ("samples", samples), ("widest", widest)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise OptionError(f"{name} is {value!r}; give a whole number of at least 1")
    if examples is not None and examples > len(gnh.terms):
        raise OptionError(
            f"examples is {examples}, and there are {len(gnh.terms)}; leave it out to use them all"
        )
