"""`ShardedNetwork`: a model that ``fully_shard`` (FSDP2) has parted over processes, as a `Network`.

Every process holds its rows of each parameter, and of every vector the same rows. A pass gathers one block's
parameters at a time, and is made by all processes together, each over its share of the examples; the backward pass
hands every process its rows of the gradient's mean over processes. Parameters cannot be given to such a pass from
outside. For exact tangents, a block's parameters become dual numbers when it has gathered them, in a pass without a
graph; for finite differences, each process moves its own rows in place, and puts them back as they were, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge

from whence.backward import seeded
from whence.distributed import ALONE, Ranks
from whence.errors import ModelError
from whence.model.network import Network, Receiver
from whence.tasks import Batch, Task
from whence.vectors import ParamVector

__all__ = ["ShardedNetwork", "make_network", "own_type"]


def make_network(
    model: nn.Module,
    task: Task,
    parameters: Mapping[str, nn.Parameter],
    metric: ParamVector | None,
    ranks: Ranks,
) -> Network:
    """The network of a model as it is: whole, or sharded; refuses what is parted in another way."""
    kind = type(model).__name__
    if kind in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
        remedy = "shard the module itself by fully_shard" if kind.startswith("Fully") else "give its .module"
        raise ModelError(
            f"the model is wrapped in {kind}, whose passes talk to other processes on their own; {remedy}"
        )
    if not any(_is_parted(parameter) for parameter in model.parameters()):
        return Network(model, task, parameters, metric, ranks)
    return ShardedNetwork(model, task, parameters, metric, ranks)


def own_type(module: nn.Module) -> type:
    """A module's class, without what ``fully_shard`` puts before it."""
    kind = type(module)
    return kind.__mro__[2] if hasattr(module, "_get_fsdp_state") else kind


class ShardedNetwork(Network):
    """``h(x; θ)`` of a model that was sharded by ``fully_shard`` over all processes.

    Raises:
        ModelError: it is sharded in a way that is not supported: in two dimensions, by columns, in mixed precision.
    """

    together = True

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        parameters: Mapping[str, nn.Parameter],
        metric: ParamVector | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._units: list[Any] = [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]
        for unit in self._units:
            unit.reshard()  # a root may have been left whole by a pass before
        for name, parameter in parameters.items():
            _check_parted(name, dict(model.named_parameters())[name], ranks)
            if not parameter.requires_grad:
                raise ModelError(
                    f"{name!r} of the sharded model is frozen; call requires_grad_(True) before sharding"
                )
        super().__init__(model, task, parameters, metric, ranks)
        if self.low_precision or any(_computes_narrowly(unit) for unit in self._units):
            raise ModelError(
                "the sharded model computes in bfloat16 or float16, in which finite differences of its outputs drown. "
                "Load it in float32, and shard it without a MixedPrecisionPolicy"
            )

        if self.narrow_rest:
            raise ModelError(
                f"{next(iter(self.narrow_rest))!r} of the sharded model is quantised, which is not supported; "
                "attribute the adapters of a quantised base in a process that holds it whole"
            )

    def blank(self, columns: int | None = None) -> ParamVector:
        return self._zeros(columns, self.shards)

    def opened(self, vector: ParamVector) -> ParamVector:
        return vector

    def closed(self, total: ParamVector) -> ParamVector:
        return total.scale_(self.ranks.size)  # gradients come as means over the processes

    def length(self) -> float:
        squares = [_rows(p).double().square().sum() for p in self.parameters.values()]
        return math.sqrt(float(self.ranks.sum(torch.stack(squares).sum())))

    def own_rows(self, name: str, whole: Tensor) -> Tensor:
        return whole if self.shards is None else self.shards.part(name, whole)

    def whole(self, name: str, rows: Tensor) -> Tensor:
        return rows if self.shards is None else dict(self.shards.gathered({name: rows}))[name]

    def norm(self, rows: Tensor) -> float:
        return math.sqrt(float(self.ranks.sum(torch.linalg.vector_norm(rows, dtype=torch.float64).square())))

    def values(self) -> dict[str, Tensor]:
        """The parameters themselves: nothing else can stand in their place."""
        return dict(self.parameters)

    def leaves(self) -> dict[str, Tensor]:
        return dict(self.parameters)

    def outputs(self, batch: Batch, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        return self.as_it_is(batch)

    def as_it_is(self, batch: Batch, instead: Mapping[str, Tensor] | None = None) -> Tensor:
        assert not instead  # what is quantised was refused
        try:
            return super().as_it_is(batch)
        except Exception:
            self._units[0].reset_iter_state()  # the outermost one; the pass may have ended anywhere
            raise
        finally:
            for unit in self._units:  # what the root keeps gathered would hide that its rows are moved
                unit.reshard()

    def dual_outputs(self, batch: Batch, vector: Mapping[str, Tensor]) -> Tensor:
        """Outputs on dual numbers ``θ + εu``, in a dual level and without a graph.

        A unit's parameters become dual when it has gathered them, and it lets go of them as of its own.
        """
        swapped: list[tuple[nn.Module, str, Any, Tensor]] = []

        def swap(unit: nn.Module, _: object) -> None:
            places = self._places[unit]
            rows = {name: self.scaled(name, vector[name]) for name, _, _ in places}
            tangents = rows if self.shards is None else dict(self.shards.gathered(rows))
            for name, module, kind in places:
                own: Any = module._parameters[kind]
                if not _is_parted(own) and forward_ad.unpack_dual(own).tangent is None:
                    dual = forward_ad.make_dual(own.detach(), tangents[name].to(own.dtype))
                    module._parameters[kind] = dual
                    swapped.append((module, kind, own, dual))

        handles = [unit.register_forward_pre_hook(swap) for unit in self._places]
        try:
            return self.as_it_is(batch)
        finally:
            for handle in handles:
                handle.remove()
            for module, kind, own, dual in swapped:
                if module._parameters[kind] is dual:
                    module._parameters[kind] = own

    @cached_property
    def _places(self) -> dict[nn.Module, list[tuple[str, nn.Module, str]]]:
        """Of every unit, what it gathers of the selected parameters: name, module and kind."""
        modules = dict(self.model.named_modules())
        found: dict[nn.Module, list[tuple[str, nn.Module, str]]] = {}
        for name, slots in self._slots.items():
            for slot in slots:
                path, _, kind = slot.rpartition(".")
                unit = path
                while modules[unit] not in self._units:
                    unit = unit.rpartition(".")[0]
                found.setdefault(modules[unit], []).append((name, modules[path], kind))
        return found

    def moved(self, vector: ParamVector, delta: float) -> AbstractContextManager[None]:
        return self._moved(vector, delta)

    @contextmanager
    def _moved(self, vector: ParamVector, delta: float) -> Iterator[None]:
        originals: dict[str, Tensor] = {}
        with torch.no_grad():
            try:
                for name, parameter in self.parameters.items():
                    rows, step = _rows(parameter), self.scaled(name, vector[name])
                    originals[name] = rows.clone()
                    rows.add_(self._without_padding(name, step.reshape(rows.shape)), alpha=delta)
                yield
            finally:
                for name, original in originals.items():
                    _rows(self.parameters[name]).copy_(original)

    def _without_padding(self, name: str, step: Tensor) -> Tensor:
        """An embedding's padding row has no gradient, so no tangent."""
        padded = self._padding_rows.get(name)
        if padded is None or self.shards is None:
            return step
        rows = self.shards.rows(name)
        if rows.start <= padded < rows.stop:
            step = step.clone()
            step[padded - rows.start] = 0
        return step

    @property
    def _padding_rows(self) -> dict[str, int]:
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return {
            names[id(module.weight)]: module.padding_idx
            for module in self.model.modules()
            if isinstance(module, nn.Embedding)
            and module.padding_idx is not None
            and id(module.weight) in names
        }

    def pull_back(
        self,
        outputs: Tensor,
        leaves: Mapping[str, Tensor],
        cotangents: Tensor,
        receive: Receiver,
        *,
        keep_graph: bool = False,
    ) -> None:
        for name, rows in self._backward(outputs, cotangents, keep_graph):
            receive(name, self.scaled(name, rows))

    def gradients(
        self,
        outputs: Tensor,
        edges: Sequence[GradientEdge],
        leaves: Mapping[str, Tensor],
        cotangent: Tensor,
        *,
        keep_graph: bool = False,
    ) -> tuple[Sequence[Tensor | None], dict[str, Tensor]]:
        # parameters that a pass gathers are others than the model's, so theirs take a backward pass of their own
        found, _ = super().gradients(outputs, edges, {}, cotangent, keep_graph=keep_graph or bool(leaves))
        if not leaves:
            return found, {}
        rows = self._backward(outputs, cotangent, keep_graph)
        return found, {name: part.clone() for name, part in rows if name in leaves}

    def _backward(
        self, outputs: Tensor, cotangents: Tensor, keep_graph: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """This process's rows of every gradient, a mean over the processes."""
        before = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        for parameter, _ in before:
            parameter.grad = None
        try:
            torch.autograd.backward(seeded(outputs, cotangents), retain_graph=keep_graph)
            for name, parameter in self.parameters.items():
                if parameter.grad is not None:
                    rows = _rows(parameter.grad)
                    shape = rows.shape if self.shards is None else self.shards.shape(name)
                    yield name, rows.reshape(shape)
        finally:
            for parameter, grad in before:
                parameter.grad = grad


def _is_parted(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def _rows(tensor: Any) -> Tensor:
    """What this process holds of a DTensor, in its own memory."""
    found = tensor.detach().to_local()
    assert isinstance(found, Tensor)
    return found


def _check_parted(name: str, parameter: Any, ranks: Ranks) -> None:
    if not _is_parted(parameter):
        raise ModelError(
            f"{name!r} is not sharded and others are; call fully_shard on the whole model too, and not on parts alone"
        )
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.ndim != 1 or mesh.size() != ranks.size or not (placements[0].is_shard(0)):
        raise ModelError(
            f"{name!r} is placed as {placements} on {mesh}; supported is fully_shard over all {ranks.size} processes "
            "in one dimension, by rows (no replicas, no tensor parallelism)"
        )


def _computes_narrowly(unit: Any) -> bool:
    dtype = unit._get_fsdp_state()._mp_policy.param_dtype
    return dtype in (torch.bfloat16, torch.float16)
