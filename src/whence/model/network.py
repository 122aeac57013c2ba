"""`Network`: a model as a function of its selected parameters, without touching the model.

Leaves are aliases of the parameters (they share storage and cost nothing), so gradients are taken without
writing to the user's ``.grad``, and parameters that are not selected stay constants.

A model in bfloat16 or float16 is computed in float32, at its parameters as they are: in fewer bits, tangents and sums
lose what a solve is about. Every pass then makes a copy of the model in float32. Weights that are quantised stay as
they are, if their scales are in float32 (the model was loaded so), and are else dequantised with the rest.

With a metric D, vectors are in the coordinates ``φ = D^(1/2)θ``: tangents are ``D^(-1/2)`` times what comes in,
gradients ``D^(-1/2)`` times what the backward pass gives. In these coordinates ``H + λ`` is ``H + λD`` of the
parameters, so whatever is said of scalar damping holds for it. Solvers and scores know nothing of it.

Where several processes work together, each holds a part of every vector, and a whole model. What goes through the model
is `opened` first, into whole vectors; what comes out of a process's share of the examples is `closed`: summed over the
processes, of which each keeps its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.func import functional_call

from whence.backward import pulled_back, seeded
from whence.distributed import ALONE, Ranks, Shards
from whence.errors import DataError, ModelError, OptionError, WhenceError
from whence.model.grouped import may_group
from whence.model.quantised import dequantised, is_packed, is_quantised
from whence.tasks import Batch, Task
from whence.vectors import ParamVector

__all__ = ["Network", "Receiver", "adding_to", "backward_explained", "widened"]

#: Takes a parameter's name and its part of a product: ``[shape]``, or ``[k, shape]`` for a block.
Receiver = Callable[[str, Tensor], None]


def adding_to(out: ParamVector, weight: float) -> Receiver:
    """Adds ``weight`` times what it receives to ``out``, in place."""

    def receive(name: str, gradient: Tensor) -> None:
        out[name].add_(gradient, alpha=weight)

    return receive


@contextmanager
def _explaining(batch: Batch) -> Iterator[None]:
    """Whatever a stranger's model raises in here becomes an error that says on which examples."""
    try:
        yield
    except (WhenceError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise _explained(error, batch) from error


@contextmanager
def backward_explained() -> Iterator[None]:
    """What autograd raises in here becomes an error that says what may be the matter."""
    try:
        yield
    except (WhenceError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ModelError(
            f"the model's backward pass failed: {type(error).__name__}: {reason}. If it checkpoints its "
            "activations (torch.utils.checkpoint), switch that off, or give a float32 model with use_reentrant=False "
            "and product='finite-difference': what is computed again is computed with the model's own parameters"
        ) from error


def _explained(error: Exception, batch: Batch) -> DataError | ModelError:
    """What a model raised, with the examples that it raised it on."""
    where = batch.name(0) + (f" or another one of the {batch.size} in its batch" if batch.size > 1 else "")
    if isinstance(error, IndexError):
        indices = [t for t in (*batch.args, *batch.kwargs.values()) if not t.is_floating_point()]
        largest = max((int(t.max()) for t in indices if t.numel()), default=0)
        return DataError(
            f"the model looked up an index out of its range ({error}); the largest in {where} is {largest}. Check that "
            "the tokenizer belongs to the model"
        )
    return ModelError(
        f"the model failed on {where}: {type(error).__name__}: {error}. Check that they have the fields, shapes and "
        "dtype that its forward takes"
    )


class _TaskModule(nn.Module):
    """The model with its task around it, so that `functional_call` serves both."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self.task = task

    def forward(self, batch: Batch) -> Tensor:
        return self.task.outputs(self.model, batch)


class Network:
    """``h(x; θ)`` for a model, a task and the selected parameters θ.

    Args:
        model: the model.
        task: what its outputs mean.
        parameters: the selected ones, by name.
        metric: the diagonal of D, positive, a tensor for every parameter; None for the identity.
        ranks: the processes that work on it together.
    """

    #: Whether a pass is one of all processes together, which none may leave out.
    together = False

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        parameters: Mapping[str, nn.Parameter],
        metric: ParamVector | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.task = model, task
        self.parameters = dict(parameters)
        self.ranks = ranks
        #: How vectors are held; None: whole.
        self.shards = (
            None
            if ranks.size == 1
            else Shards(ranks, {name: parameter.shape for name, parameter in self.parameters.items()})
        )
        self.metric = metric
        self._scale: ParamVector | None = None
        if metric is not None:
            self.zeros().check_same_form(metric, "metric")
            if not all(bool(((part > 0) & part.isfinite()).all()) for part in metric.values()):
                raise OptionError("the metric of damping holds numbers that are not positive and finite")
            self._scale = self.opened(metric).power(-0.5)
        # Building the wrapper must not flip the model's mode: nn.Module starts in training mode.
        self._module = _TaskModule(model, task)
        self._module.training = False
        #: Parameters and buffers that are not selected and have fewer bits than float32: widened beside those that are.
        self.narrow_rest = {
            name: tensor
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if _narrow(tensor) and name not in self.parameters and not is_packed(tensor)
        }
        self._slots = _slots(model, {**self.parameters, **self.narrow_rest})

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @cached_property
    def low_precision(self) -> bool:
        """Whether any floating-point parameter has fewer bits than float32."""
        return any(_narrow(p) for p in self.model.parameters())

    @cached_property
    def may_group(self) -> bool:
        """Whether the model may use fused products of a stack of experts: what every operation is asked about then."""
        return may_group(self.model)

    def in_metric(self, metric: ParamVector | None) -> Network:
        """The same in the coordinates of another metric."""
        return type(self)(self.model, self.task, self.parameters, metric, self.ranks)

    # --- vectors -----------------------------------------------------------------------------------------

    def zeros(self, columns: int | None = None) -> ParamVector:
        """Zero vector in parameter space, in float32 at least; this process's part of it, where there are several."""
        shards = self.shards
        return self._zeros(columns, shards) if shards is not None else self.blank(columns)

    def blank(self, columns: int | None = None) -> ParamVector:
        """A zero vector to add to what passes through the model give: whole."""
        return self._zeros(columns, None)

    def length(self) -> float:
        """‖θ‖."""
        norms = [torch.linalg.vector_norm(p.detach()).double() for p in self.parameters.values()]
        return float(torch.stack(norms).norm())

    def moved(self, vector: ParamVector, delta: float) -> AbstractContextManager[None] | None:
        """While active, the model's own parameters are ``θ + δu``; None where they are to be swapped one by one."""
        return None

    def opened(self, vector: ParamVector) -> ParamVector:
        """A vector as passes through the model take it: whole."""
        return vector.whole()

    def closed(self, total: ParamVector) -> ParamVector:
        """What the processes' passes over their shares of examples gave together; may overwrite it."""
        return total.summed(self.shards)

    def _zeros(self, columns: int | None, shards: Shards | None) -> ParamVector:
        lead = () if columns is None else (columns,)
        zeros = {
            name: torch.zeros(
                (*lead, *(p.shape if shards is None else shards.shape(name))),
                dtype=torch.promote_types(p.dtype, torch.float32),
                device=p.device,
            )
            for name, p in self.parameters.items()
        }
        return ParamVector(zeros, columns=columns, shards=shards)

    def own_rows(self, name: str, whole: Tensor) -> Tensor:
        """What this process holds of a parameter, and so of its gradient."""
        return whole

    def whole(self, name: str, rows: Tensor) -> Tensor:
        """Inverse of `own_rows`, on all processes."""
        return rows

    def norm(self, rows: Tensor) -> float:
        """``‖·‖`` of a tensor of which each process holds its `own_rows`."""
        return float(torch.linalg.vector_norm(rows))

    # --- passes ------------------------------------------------------------------------------------------

    def scaled(self, name: str, tensor: Tensor) -> Tensor:
        """``D^(-1/2)`` times a parameter's part of a vector or of a gradient; itself without a metric."""
        return tensor if self._scale is None else tensor * self._scale[name].to(tensor.dtype)

    def scaled_whole(self, name: str, tensor: Tensor) -> Tensor:
        """The same of all rows of a parameter's part."""
        return (
            tensor if self._scale is None else tensor * self.whole(name, self._scale[name]).to(tensor.dtype)
        )

    def values(self) -> dict[str, Tensor]:
        """The selected parameters, in float32 at least; aliases of the model's own where these are."""
        return {name: widened(p.detach()) for name, p in self.parameters.items()}

    def constants(self) -> dict[str, Tensor]:
        """What else of a low-precision model has to be in float32 beside these; nothing for other models."""
        return {name: widened(tensor.detach()) for name, tensor in self.narrow_rest.items()}

    def leaves(self) -> dict[str, Tensor]:
        """The same as `values`, for gradients to be taken with respect to them."""
        return {name: value.requires_grad_() for name, value in self.values().items()}

    def outputs(self, batch: Batch, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """The outputs, with ``parameters`` in place of the model's own where given; in float32 at least.

        Raises:
            ModelError, DataError: the model raised something; says on which examples.
        """
        if parameters is None and not self.low_precision:
            return self.as_it_is(batch)
        tensors = self.values() if parameters is None else dict(parameters)
        if self.low_precision:
            tensors, batch = self.constants() | tensors, batch.map(widened)
        with _explaining(batch):
            # torch would tie weights by all their names, of which a module with two has each put back over the other
            result = functional_call(self._module, self._in_slots(tensors), (batch,), tie_weights=False)
        assert isinstance(result, Tensor)
        return result

    def as_it_is(self, batch: Batch, instead: Mapping[str, Tensor] | None = None) -> Tensor:
        """The outputs of the model itself, with whatever its parameters hold at the moment, but for these."""
        with _explaining(batch):
            if not instead:
                return self.task.outputs(self.model, batch)
            result = functional_call(self._module, self._in_slots(instead), (batch,), tie_weights=False)
        assert isinstance(result, Tensor)
        return result

    def gradients(
        self,
        outputs: Tensor,
        edges: Sequence[GradientEdge],
        leaves: Mapping[str, Tensor],
        cotangent: Tensor,
        *,
        keep_graph: bool = False,
    ) -> tuple[Sequence[Tensor | None], dict[str, Tensor]]:
        """Gradients at edges of the graph, None where there is none, and of parameters; as if there were no metric.

        Args:
            outputs: of this process's share of the examples.
            edges: where gradients of what a layer put out will arrive.
            leaves: parameters, whose gradients are returned where there are any. Of a sharded model these are this
                process's rows of the mean over processes.
            cotangent: gradient of the outputs.
            keep_graph: whether there will be another pass.
        """
        if not outputs.requires_grad or not (edges or leaves):
            return [None] * len(edges), {}
        found = pulled_back(outputs, [*edges, *leaves.values()], cotangent, keep_graph=keep_graph)
        of_leaves = zip(leaves, found[len(edges) :], strict=True)
        return found[: len(edges)], {name: g for name, g in of_leaves if g is not None}

    def _in_slots(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by every place that they are kept at."""
        return {f"model.{slot}": tensor for name, tensor in tensors.items() for slot in self._slots[name]}

    def pull_back(
        self,
        outputs: Tensor,
        leaves: Mapping[str, Tensor],
        cotangents: Tensor,
        receive: Receiver,
        *,
        keep_graph: bool = False,
    ) -> None:
        """Hand ``Jᵀ c`` to ``receive``, one parameter at a time, as soon as each is known.

        Handing over inside the backward pass means that a whole gradient never exists in memory. With more
        dimensions in ``cotangents`` than in ``outputs``, it is a block.
        """
        if cotangents.ndim > outputs.ndim:
            with backward_explained():
                gradients = pulled_back(outputs, list(leaves.values()), cotangents, keep_graph=keep_graph)
            for name, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None:
                    receive(name, self.scaled(name, gradient))
            return

        def hand_over(name: str, leaf: Tensor) -> None:
            assert leaf.grad is not None
            receive(name, self.scaled(name, leaf.grad))
            leaf.grad = None

        handles = [
            leaf.register_post_accumulate_grad_hook(lambda leaf, name=name: hand_over(name, leaf))
            for name, leaf in leaves.items()
        ]
        try:
            number = seeded(outputs, cotangents)
            with backward_explained():
                torch.autograd.backward(number, inputs=list(leaves.values()), retain_graph=keep_graph)
        finally:
            for handle in handles:
                handle.remove()


def _narrow(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def widened(tensor: Tensor) -> Tensor:
    """In float32, where it has fewer bits."""
    if not _narrow(tensor):
        return tensor
    return dequantised(tensor) if is_quantised(tensor) else tensor.float()


def _slots(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Where each parameter or buffer is kept: several places where it is tied, one of each module."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    found: dict[str, list[str]] = {name: [] for name in tensors}
    for path, module in model.named_modules():  # each module once
        own = (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        )
        for kind, tensor in own:
            if id(tensor) in names:
                found[names[id(tensor)]].append(f"{path}.{kind}" if path else kind)
    return found
