"""`Task`: how to call a model on a batch, and the loss of its outputs.

A loss is a sum of *terms*: one per example in classification, one per predicted token in language modelling.
For outputs ``h`` and term losses ``ℓ_i(h_i)`` convex in ``h_i``, a task gives

* `losses`: ``ℓ_i``, zero where the batch has no term (padding);
* `hessian_product`: ``S_i t_i`` with ``S_i = ∇²ℓ_i(h_i)``, never a K×K matrix;
* `sample_residual`: a random ``r_i`` with ``E[r_i r_iᵀ] = S_i``, independent across terms.

Tasks know nothing of parameters: Jacobians, sampling and normalisation live in `whence.model.gauss_newton`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from whence.distributed import Ranks
from whence.errors import DataError, ModelError
from whence.tasks.collate import stack_columns

__all__ = ["Batch", "Share", "Task", "accepts", "noise", "read_outputs", "without_cache"]


@dataclass(frozen=True)
class Share:
    """What a process has of a batch that several share.

    Attributes:
        start: its first example's place in the batch.
        held: how many examples it has. Where that is none, its batch is one example that counts for nothing: for
            passes that all processes make together.
        whole: how many the batch has.
    """

    start: int
    held: int
    whole: int

    def of_all(self, ranks: Ranks) -> list[int]:
        """How many examples each process has."""
        least, more = divmod(self.whole, ranks.size)
        return [least + (rank < more) for rank in range(ranks.size)]


@dataclass(frozen=True)
class Batch:
    """Examples ready for the model: its arguments, and the targets of its outputs."""

    args: tuple[Tensor, ...]
    kwargs: Mapping[str, Tensor]
    targets: Tensor
    indices: Tensor | None = None  # where the examples stand in their data set
    weights: Tensor | None = (
        None  # what each example counts for, where they were not drawn with equal chances
    )
    share: Share | None = None  # of a larger batch, where several processes share that

    @property
    def held(self) -> int:
        """How many of the examples count."""
        return self.size if self.share is None else self.share.held

    def shared(self, ranks: Ranks) -> Batch:
        """This process's share of the examples: neighbours, and padded as the whole batch is."""
        if ranks.size == 1:
            return self
        least, more = divmod(self.size, ranks.size)
        start, held = ranks.rank * least + min(ranks.rank, more), least + (ranks.rank < more)
        rows = slice(start, start + held) if held else slice(0, 1)
        mine = self.map(lambda tensor: tensor[rows])
        return replace(
            mine,
            indices=None if self.indices is None else self.indices[rows],
            weights=mine.weights if held else torch.zeros(1, dtype=torch.float64, device=self.targets.device),
            share=Share(start, held, self.size),
        )

    @property
    def size(self) -> int:
        """Number of examples."""
        return int(self.targets.shape[0])

    def name(self, position: int) -> str:
        """What to call an example in a message."""
        where = "of the batch" if self.indices is None else "of the data"
        return f"example {position if self.indices is None else int(self.indices[position])} {where}"

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply ``function`` to every input tensor and to the targets."""
        return replace(
            self,
            args=tuple(function(tensor) for tensor in self.args),
            kwargs={name: function(tensor) for name, tensor in self.kwargs.items()},
            targets=function(self.targets),
            weights=None if self.weights is None else function(self.weights),
        )

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
        """Move to a device; floating-point tensors also to ``dtype`` where given.

        To a GPU through pinned memory, so that the host goes on meanwhile.
        """

        def move(tensor: Tensor) -> Tensor:
            kind = dtype if tensor.is_floating_point() else None
            if device.type == "cuda" and tensor.device.type == "cpu":
                return tensor.pin_memory().to(device, kind, non_blocking=True)
            return tensor.to(device, kind)

        return self.map(move)

    def kinds(self) -> dict[str, str]:
        """Which kind of numbers each field holds: the dtype of an input, and whether targets are real or whole."""
        fields = {f"input {i}" if i else "input": tensor for i, tensor in enumerate(self.args)} | dict(
            self.kwargs
        )
        kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in fields.items()}
        return kinds | {"target": "real numbers" if self.targets.is_floating_point() else "whole numbers"}

    def same_as(self, other: Batch) -> bool:
        """Whether inputs and targets are equal, bit for bit."""
        mine, theirs = ({**dict(enumerate(b.args)), **b.kwargs, "": b.targets} for b in (self, other))
        return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)

    def non_finite(self) -> Tensor:
        """Positions of the examples with NaN or infinity in their inputs or targets."""
        bad = torch.zeros(self.size, dtype=torch.bool)
        for tensor in (*self.args, *self.kwargs.values(), self.targets):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                bad |= ~torch.isfinite(tensor).reshape(self.size, -1).all(1).cpu()
        return bad.nonzero().flatten()


class Task(ABC):
    """What the outputs of a model mean. Subclasses define the loss and its Hessian in the outputs."""

    #: Terms in every example, or None where it varies and the data have to be counted.
    terms_per_example: int | None = 1
    #: Whether the loss is convex in the outputs by its formula; if not, that is looked at on some of the data.
    known_convex = False
    #: What else than the loss a question may be about (`whence.tasks.questions`): "margin", "contrast".
    measures: tuple[str, ...] = ()

    def settings(self) -> Mapping[str, object]:
        """What differs from the defaults: tells a run of this task from one of another."""
        return {}

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.settings().items())
        return f"{type(self).__name__}({settings})"

    # --- data --------------------------------------------------------------------------------------------

    def collate(self, examples: Sequence[Any]) -> Batch:
        """Stack examples, each ``(x, y)`` or a dict with ``labels``, into a `Batch`."""
        return self.assemble(stack_columns(examples))

    def assemble(self, columns: Mapping[str, Tensor] | Sequence[Any]) -> Batch:
        """A `Batch` from stacked columns: ``(x, y)`` or a dict with ``labels``."""
        if isinstance(columns, Mapping):
            inputs = dict(columns)
            for name in ("labels", "label"):
                if name in inputs:
                    targets = inputs.pop(name)
                    return Batch((), inputs, targets)
            raise DataError(
                f"examples have the fields {sorted(inputs)} but no 'labels'; add the target under 'labels'"
            )
        if len(columns) != 2:
            raise DataError(f"an example must be (x, y) or a dict with 'labels', got {len(columns)} items")
        x, targets = columns
        if isinstance(x, Mapping):
            return Batch((), dict(x), targets)
        return Batch((x,), {}, targets)

    def count_terms(self, example: Any) -> int:
        """Number of terms in one example, without running the model."""
        assert self.terms_per_example is not None
        return self.terms_per_example

    # --- model -------------------------------------------------------------------------------------------

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Run ``model`` on ``batch`` and return its outputs, one row of K numbers per (possible) term."""
        return read_outputs(model(*batch.args, **batch.kwargs))

    @abstractmethod
    def check(self, outputs: Tensor, batch: Batch) -> None:
        """Raise a typed error when the outputs cannot be read by this task, or do not fit the targets."""

    def check_model(self, run: Callable[[Batch], Tensor], outputs: Tensor, batch: Batch) -> None:  # noqa: B027 (most can be read)
        """Raise `ModelError` if the model is of another kind: ``run`` gives its outputs on other batches."""

    def check_targets(self, batch: Batch, width: int | None) -> None:  # noqa: B027 (most targets cannot be wrong)
        """Raise `DataError` on targets that ``width`` outputs (None: not known yet) cannot fit.

        Called on every batch before the model runs.
        """

    def output_scale(self, outputs: Tensor) -> float:
        """How much the outputs may move and still be 'moving a little': sets finite differences' step."""
        spread = float(outputs.detach().float().std()) if outputs.numel() > 1 else 0.0
        return spread if 0 < spread < float("inf") else 1.0

    # --- loss --------------------------------------------------------------------------------------------

    @abstractmethod
    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """``ℓ_i`` in nats, ``[examples]`` or ``[examples, positions]``, zero where there is no term."""

    def loss_derivatives(self, outputs: Tensor, tangents: Tensor, batch: Batch) -> Tensor:
        """``⟨∂ℓ_i/∂h_i, t_i⟩`` of every term, in float64. ``tangents`` may have one leading dimension.

        One backward through the loss alone gives every term's slope: terms do not mix.
        """
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            losses = self.losses(leaf, batch)
            (slope,) = torch.autograd.grad(losses.sum(), leaf)
        rows = slope.reshape(*losses.shape, -1)  # an output for each term, or several
        moved = tangents.to(slope.dtype).reshape(-1, *rows.shape)
        found: Tensor = torch.linalg.vecdot(moved, rows).double()
        return found if tangents.ndim > outputs.ndim else found[0]

    @abstractmethod
    def hessian_product(self, outputs: Tensor, tangents: Tensor, batch: Batch) -> Tensor:
        """``S_i t_i`` per term, zero where there is no term. ``tangents`` may have leading dimensions."""

    def derivatives_beside(self, outputs: Tensor, tangents: Tensor, product: Tensor, batch: Batch) -> Tensor:
        """`loss_derivatives`, where ``S_i t_i`` is there already; subclasses that can read them off that do."""
        return self.loss_derivatives(outputs, tangents, batch)

    def curvature(self, outputs: Tensor, batch: Batch) -> Tensor | None:
        """``Σ_i Tr(S_i)`` over each example's terms, ``[examples]``; None if not available."""
        return None

    def sample_residual(self, outputs: Tensor, batch: Batch, generator: torch.Generator) -> Tensor | None:
        """Random ``r_i``, independent across terms, with ``E[r_i r_iᵀ] = S_i``; None if not available."""
        return None

    def divergence_slope(self, outputs: Tensor, anchor: Tensor, batch: Batch) -> Tensor:
        """``∇_h D(h, h') = ∇ℓ(h) - ∇ℓ(h')`` per term, for the loss's Bregman divergence; zero where no term is.

        ``D(h, h') = ℓ(h) - ℓ(h') - ⟨h - h', ∇ℓ(h')⟩`` is zero and flat at ``h = h'`` whether or not the loss is: what
        `whence.validation.pbrf` holds a model to its outputs with. Subclasses that can subtract without losing
        digits do.
        """
        with torch.enable_grad():
            slopes = []
            for point in (outputs, anchor):
                leaf = point.detach().requires_grad_()
                slopes.append(torch.autograd.grad(self.losses(leaf, batch).sum(), leaf)[0])
        return slopes[0] - slopes[1]

    def num_terms(self, batch: Batch) -> Tensor:
        """Number of terms of each example, ``[examples]``."""
        return torch.ones(batch.size, dtype=torch.long, device=batch.targets.device)

    def margins(self, outputs: Tensor, batch: Batch) -> Tensor:
        """``-log(p / (1 - p))`` of the label, as `losses`: of tasks whose `measures` have it."""
        raise NotImplementedError

    def surprisals(self, outputs: Tensor, batch: Batch) -> Tensor:
        """``-log p`` of the label alone, as `losses`, without weights or smoothing: of tasks that know contrasts."""
        raise NotImplementedError

    def contrasting(self, example: Any, other: Any) -> Any:
        """The example with another label, or another answer, in the place of its own."""
        if isinstance(example, Mapping):
            name = "labels" if "labels" in example else "label"
            return {**example, name: _like(other, example.get(name))}
        inputs, label = example
        return inputs, _like(other, label)

    def query_losses(
        self, outputs: Tensor, batch: Batch, *, measure: str = "loss", reduce: str = "mean"
    ) -> Tensor:
        """The quantity a query asks about, ``[examples]``: by default an example's loss averaged over its terms.

        Args:
            outputs: of the model.
            batch: the examples.
            measure: of a term: ``"loss"``, ``"margin"`` (`margins`) or ``"contrast"`` (`surprisals`).
            reduce: ``"mean"`` over an example's terms, or ``"sum"``.
        """
        of_terms = {"loss": self.losses, "margin": self.margins, "contrast": self.surprisals}[measure]
        total = of_terms(outputs, batch).reshape(batch.size, -1).sum(1)
        return total if reduce == "sum" else total / self.num_terms(batch).to(total.device).clamp_min(1)


def _like(other: Any, label: Any) -> Any:
    """Another label, of the same kind and shape as the one that is there."""
    if not isinstance(label, Tensor):
        return other
    with_shape = torch.as_tensor(other)
    if with_shape.shape != label.shape and with_shape.numel() == label.numel() == 1:
        with_shape = with_shape.reshape(label.shape)
    if with_shape.shape != label.shape:
        raise DataError(
            f"a contrast has shape {tuple(with_shape.shape)} and the label that it is compared with "
            f"{tuple(label.shape)}; give another label of the same shape"
        )
    if with_shape.is_floating_point() and not label.is_floating_point():
        raise DataError(f"a contrast is {with_shape.dtype} and the label {label.dtype}; give a whole number")
    return with_shape.to(label)


def noise(batch: Batch, shape: Sequence[int], draw: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    """Random numbers of a shape that begins with the examples, or with as many rows for each of them.

    Drawn for the whole of a batch that processes share, so that an example's are the same whoever has it.
    """
    if batch.share is None:
        return draw(tuple(shape))
    rows, share = shape[0] // batch.size, batch.share
    start = rows * (share.start if share.held else 0)
    return draw((rows * share.whole, *shape[1:]))[start : start + shape[0]]


def accepts(model: nn.Module, name: str) -> bool:
    """Whether ``model.forward`` takes a keyword argument of this name."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def without_cache(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, and that a model which would keep keys and values for generating need not."""
    return {**inputs, "use_cache": False} if accepts(model, "use_cache") else dict(inputs)


def read_outputs(result: Any) -> Tensor:
    """The outputs tensor in what a model returned: itself, ``.logits``, or the first of a tuple."""
    if isinstance(result, Tensor):
        return result
    logits = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(result, tuple) and result and isinstance(result[0], Tensor):
        return result[0]
    raise ModelError(
        f"the model returned a {type(result).__name__}; a task reads a tensor, an object with a tensor "
        "`.logits`, or a tuple whose first item is a tensor. Wrap the model in a module that returns one"
    )
