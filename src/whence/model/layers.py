"""Every example's own gradient, from one backward pass over a batch of them.

A module that is called with a row for each example tells, by what went in and by the gradient of what came out, the
gradient of its parameters on every example: ``G = Σ_t g_t a_tᵀ`` over the positions t of a linear layer, the sum over
the positions of each token for an embedding, and for any other layer what `torch.func.vjp` of that layer alone says.
What several calls or several owners of a parameter contribute is added up, so tied and shared weights are right.

Whether this is so for a model is found out by trying it on two examples (`ExampleGradients`); a parameter for which it
is not has no examples' gradients here, and says why.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vjp, vmap
from torch.nn import functional as F

from whence.errors import ModelError
from whence.model.fully_sharded import own_type
from whence.model.network import Network
from whence.tasks import Batch

__all__ = ["Call", "ExampleGradients", "Matrix", "Passed", "matrices"]

#: Products of a number that could be taken in the time of writing it and reading it again.
_MOVING = 100
#: Bytes that examples' gradients of one parameter may take: what stays in a processor's cache.
_AT_ONCE = 4 * 2**20
#: What gradients by layers may be off by from those of the whole model, on two examples.
_CLOSE = 0.01


@dataclass(frozen=True)
class Matrix:
    """A parameter seen as one matrix ``[rows, columns]``: of a layer outputs by inputs, with its bias as last column.

    Attributes:
        weight: the parameter's name.
        bias: that of the bias beside it; None where there is none, or where it stands alone.
        transposed: whether the weight is kept as inputs by outputs.
        shape: rows and columns.
        looked_up: whether its rows are those of an embedding, here or in one that it is tied to.
    """

    weight: str
    bias: str | None
    transposed: bool
    shape: tuple[int, int]
    looked_up: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters in it."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def pack(self, tensors: Mapping[str, Tensor], lead: Sequence[int] = ()) -> Tensor:
        """``[*lead, rows, columns]`` from tensors of the parameters' shapes behind ``lead``, or some rows of them."""
        rows, columns = self.shape
        width = columns - (self.bias is not None)
        weight = tensors[self.weight]
        if self.transposed:
            weight = weight.reshape(*lead, width, rows).transpose(-1, -2)
        else:
            weight = weight.reshape(*lead, -1, width)
        return weight if self.bias is None else torch.cat([weight, tensors[self.bias].unsqueeze(-1)], -1)

    def unpack(self, matrix: Tensor, shape: torch.Size) -> dict[str, Tensor]:
        """Inverse of `pack`, for a weight of this shape."""
        weight = matrix if self.bias is None else matrix[..., :-1]
        if self.transposed:
            weight = weight.transpose(-1, -2)
        found = {self.weight: weight.reshape((*matrix.shape[:-2], *shape))}
        return found if self.bias is None else found | {self.bias: matrix[..., -1].contiguous()}


def matrices(network: Network) -> tuple[Matrix, ...]:
    """The selected parameters as matrices: each belongs to one."""
    found: dict[str, Matrix] = {}
    owners = _owners(network)
    joined = set[str]()
    for name, parameter in network.parameters.items():
        (module, kind), *others = owners.get(name, [(network.model, "")])
        alone, rows = len(others) == 0 and kind == "weight", 1
        transposed, bias = alone and _transposed(module), None
        if isinstance(module, _CONVOLUTIONS) and kind == "weight":
            rows = len(parameter)
        elif parameter.ndim:
            rows = parameter.shape[1] if transposed else math.prod(parameter.shape[:-1])
        if parameter.ndim < 2:
            rows = parameter.numel()
        if alone and _is_linear(module):
            bias = next((n for n, own in owners.items() if own == [(module, "bias")]), None)
            joined |= set() if bias is None else {bias}
        columns = parameter.numel() // max(rows, 1) + (bias is not None)
        looked_up = any(isinstance(owner, nn.Embedding) for owner, _ in owners.get(name, ()))
        found[name] = Matrix(name, bias, transposed, (rows, columns), looked_up)
    return tuple(matrix for name, matrix in found.items() if name not in joined)


@dataclass(frozen=True)
class Call:
    """One call of a layer, over all examples of a batch.

    Attributes:
        module: the layer.
        names: its selected parameters: kind -> name.
        inputs: what went in, a row for each example.
        gradient: of what came out, likewise.
    """

    module: nn.Module
    names: Mapping[str, str]
    inputs: Tensor
    gradient: Tensor

    @property
    def outputs_by_position(self) -> Tensor:
        """g, ``[n, positions, outputs]``, of a linear layer, a convolution or an embedding."""
        g = _wide(self.gradient)
        return (
            g.flatten(2).transpose(1, 2)
            if isinstance(self.module, nn.Conv2d)
            else g.reshape(len(g), -1, g.shape[-1])
        )

    def inputs_by_position(self, *, bias: bool) -> Tensor:
        """a, ``[n, positions, inputs]``, of a linear layer or a convolution; with a last input of 1 for the bias."""
        module, given = self.module, _wide(self.inputs)
        if isinstance(module, nn.Conv2d):
            patches = F.unfold(given, module.kernel_size, module.dilation, module.padding, module.stride)  # type: ignore[arg-type]
            found = patches.transpose(1, 2)
        else:
            found = given.reshape(len(given), -1, given.shape[-1])
        return torch.cat([found, found.new_ones(*found.shape[:2], 1)], 2) if bias else found

    @property
    def is_linear(self) -> bool:
        """Whether its weight's gradient is ``Σ_t g_t a_tᵀ``."""
        return _is_linear(self.module)

    @property
    def transposed(self) -> bool:
        """Whether its weight is kept as inputs by outputs."""
        return _transposed(self.module)

    @property
    def is_embedding(self) -> bool:
        """Whether it looks up rows of its weight."""
        return isinstance(self.module, nn.Embedding)

    def gradients(self, kind: str) -> Tensor:
        """The gradient of a parameter on every example, ``[n, *shape]``."""
        module, n = self.module, len(self.gradient)
        if self.is_linear and kind == "bias":
            return self.outputs_by_position.sum(1)
        if self.is_linear:
            g, a = self.outputs_by_position, self.inputs_by_position(bias=False)
            product = torch.bmm(a.mT, g) if _transposed(module) else torch.bmm(g.mT, a)
            return product.reshape(n, *_parameter(module, kind).shape)
        if isinstance(module, nn.Embedding):
            return self.looked_up(self.outputs_by_position)
        return self._by_itself(kind)

    def products(self, rows: Tensor, kind: str) -> Tensor:
        """``⟨u, G⟩`` of every example with directions ``[k, *shape]``: ``[k, n]``.

        Of a linear layer ``Σ_t g_tᵀ u a_t``, without G, where there are few positions and directions; of an embedding
        ``Σ_t ⟨u_token t, g_t⟩``, without rows that were not looked up.
        """
        if self.is_embedding:
            g, tokens = self._met(self.outputs_by_position)
            return torch.stack([(row[tokens] * g).flatten(1).sum(1) for row in rows])
        if self.is_linear and kind == "weight":
            g, a = self.outputs_by_position, self.inputs_by_position(bias=False)
            n, positions, outputs = g.shape
            if len(rows) * positions < positions + len(rows) + _MOVING:
                weights = rows.reshape(len(rows), -1, outputs).mT if _transposed(self.module) else rows
                found = a.flatten(0, 1) @ weights.reshape(len(rows) * outputs, -1).mT
                found = found.reshape(n * positions, len(rows), outputs) @ g.reshape(
                    n * positions, outputs, 1
                )
                return found.reshape(n, positions, len(rows)).sum(1).mT
        flat = rows.reshape(len(rows), -1)
        few = (call.gradients(kind) for call in self.of_few(flat.shape[1]))
        return torch.cat([flat @ gradients.reshape(len(gradients), -1).mT for gradients in few], 1)

    def of_few(self, numbers: int) -> Iterator[Call]:
        """The same of so few examples at a time that ``numbers`` of each take little memory.

        Examples' gradients are far larger than what they are made from, and need not all be there together.
        """
        size = max(1, _AT_ONCE // (numbers * max(self.gradient.element_size(), 4)))
        for inputs, gradient in zip(self.inputs.split(size), self.gradient.split(size), strict=True):
            yield replace(self, inputs=inputs, gradient=gradient)

    def looked_up(self, g: Tensor) -> Tensor:
        """``Σ_t e_{token t} g_tᵀ``, ``[n, vocabulary, width]``, of an embedding."""
        assert isinstance(self.module, nn.Embedding)
        g, tokens, vocabulary = *self._met(g), self.module.num_embeddings
        result = g.new_zeros(len(g) * vocabulary, g.shape[-1])
        places = tokens + vocabulary * torch.arange(len(g), device=tokens.device).unsqueeze(1)
        return result.index_add_(0, places.flatten(), g.flatten(0, 1)).reshape(len(g), vocabulary, -1)

    def _met(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients at an embedding's positions, and the tokens there; autograd gives a padding's row none."""
        assert isinstance(self.module, nn.Embedding)
        tokens = self.inputs.reshape(len(g), -1)
        if self.module.padding_idx is not None:
            g = g.masked_fill((tokens == self.module.padding_idx).unsqueeze(-1), 0.0)
        return g, tokens

    def _by_itself(self, kind: str) -> Tensor:
        """By differentiating the layer alone, on every example."""
        module = self.module
        everything = {f"layer.{name}": _wide(_whole(p)) for name, p in module.named_parameters()}
        own = f"layer.{kind}"

        def of_one(given: Tensor, gradient: Tensor) -> Tensor:
            def run(parameter: Tensor) -> Tensor:
                result = functional_call(_Alone(module), everything | {own: parameter}, (given.unsqueeze(0),))
                assert isinstance(result, Tensor)
                return result.squeeze(0)

            pull = vjp(run, everything[own])[1]
            (found,) = pull(gradient)
            assert isinstance(found, Tensor)
            return found

        # an operation that cannot be vectorised is done for one example at a time
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            result: Tensor = vmap(of_one)(self.inputs, self.gradient)
        return _wide(result)


@dataclass(frozen=True)
class Passed:
    """What one backward pass over a batch tells.

    Attributes:
        calls: of layers, by the names of their parameters.
        others: gradients of the whole batch, for parameters without examples' gradients; this process's rows of them.
    """

    calls: Mapping[str, Sequence[tuple[Call, str]]]
    others: Mapping[str, Tensor] = field(default_factory=dict)

    def of_few(self, names: Sequence[str], numbers: int) -> Iterator[Passed]:
        """What it tells of these parameters, for a few examples at a time, as `Call.of_few`."""
        own = [
            (name, kind, call.of_few(numbers)) for name in names for call, kind in self.calls.get(name, ())
        ]
        others = self.others
        while True:
            few: dict[str, list[tuple[Call, str]]] = {}
            for name, kind, calls in own:
                call = next(calls, None)
                if call is not None:
                    few.setdefault(name, []).append((call, kind))
            if not few and others is not self.others:
                return
            yield Passed(few, others)
            others = {}

    def products(self, name: str, rows: Tensor) -> Tensor | None:
        """A parameter's part of ``⟨u, ∇⟩`` on every example, for directions ``[k, *shape]``: ``[k, n]``."""
        found = [call.products(rows, kind) for call, kind in self.calls.get(name, ())]
        return sum(found[1:], found[0]) if found else None

    def gradients(self, name: str) -> Tensor | None:
        """A parameter's gradient on every example, ``[n, *shape]``; None where nothing depends on it."""
        total: Tensor | None = None
        for call, kind in self.calls.get(name, ()):
            found = call.gradients(kind)
            total = found if total is None else total + found  # which may be the call's own gradient
        return total


class ExampleGradients:
    """Runs a network on batches, and reads every example's gradient off one backward pass.

    Args:
        network: the model, its task and the selected parameters.
        pilot: a batch of two examples or more, to find out on what can be read.

    Attributes:
        missing: parameters without examples' gradients: name -> why.
    """

    def __init__(self, network: Network, pilot: Batch) -> None:
        self.network = network
        owned: dict[int, tuple[nn.Module, dict[str, str]]] = {}
        self.missing: dict[str, str] = {}
        for name, own in _owners(network).items():
            for module, kind in own:
                owned.setdefault(id(module), (module, {}))[1][kind] = name
        for module, names in owned.values():
            reason = _why_not(module)
            if reason is not None:
                self.missing |= dict.fromkeys(names.values(), reason)
        for name in network.parameters:
            if not any(name in names.values() for _, names in owned.values()):
                self.missing.setdefault(name, "it belongs to no module")
        self._modules = {key: pair for key, pair in owned.items() if not self._all_missing(pair[1])}
        self._shared: set[int] = set()
        self._folded: set[int] = set()
        self._try(pilot)
        self._modules = {key: pair for key, pair in self._modules.items() if not self._all_missing(pair[1])}
        self.missing = {name: self.missing[name] for name in network.parameters if name in self.missing}

    def _all_missing(self, names: Mapping[str, str]) -> bool:
        return all(name in self.missing for name in names.values())

    # --- finding out -------------------------------------------------------------------------------------

    def _try(self, pilot: Batch) -> None:
        """Which parameters' gradients, weighted by example and summed, are those of the whole model."""
        if not self._modules:
            return
        random = torch.Generator().manual_seed(0)
        with torch.enable_grad():
            leaves = self.network.leaves()
            outputs = self.network.outputs(pilot, leaves)
        draw = torch.randn(outputs.shape, generator=random).to(outputs)
        weights = torch.randn(pilot.size, generator=random).to(outputs)
        weighted = draw * weights.reshape(-1, *[1] * (outputs.ndim - 1))
        _, expected = self.network.gradients(outputs, (), leaves, weighted)
        seen, again = self._try_to_share(pilot, leaves, outputs.detach())
        del outputs
        for key in seen.unreadable:
            self.missing |= dict.fromkeys(self._modules[key][1].values(), seen.unreadable[key])
        self._shared, self._folded = seen.shared, seen.folded
        (passed,) = self._backward(seen, again, [draw], leaves, others=False)
        reason = "used in another way than by calling its layer with a row for each example"
        for matrix in matrices(self.network):
            names = [name for name in matrix.names if name not in self.missing]
            size = math.hypot(*(self.network.norm(expected[name]) for name in names if name in expected))
            agree = [self._agree(passed, name, expected.get(name), weights, size) for name in names]
            if not all(agree):
                self.missing |= dict.fromkeys(names, reason)  # of a layer, both or none

    def _try_to_share(
        self, pilot: Batch, leaves: Mapping[str, Tensor], expected: Tensor
    ) -> tuple[_Seen, Tensor]:
        """The calls, with one row that all examples share written as a row for each where the model can do with it."""
        try:
            with torch.enable_grad(), self._watching(pilot.size, trying=True) as seen:
                outputs = self.network.outputs(pilot, leaves)
            if not seen.shared or torch.allclose(outputs.detach(), expected, rtol=_CLOSE, equal_nan=True):
                return seen, outputs
        except Exception:
            if not seen.shared:
                raise
        with torch.enable_grad(), self._watching(pilot.size, trying=True, sharing=False) as seen:
            outputs = self.network.outputs(pilot, leaves)
        return seen, outputs

    def _agree(
        self, passed: Passed, name: str, expected: Tensor | None, weights: Tensor, size: float
    ) -> bool:
        """Whether a gradient is as expected, but for the rounding of its whole matrix's, which has this size."""
        try:
            found = passed.gradients(name)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            return False  # the layer is called with something else than it seems, or cannot be vectorised
        if found is None or expected is None:
            return found is None and expected is None
        if found.shape[1:] != self.network.parameters[name].shape or len(found) != len(weights):
            return False
        total = self.network.own_rows(name, torch.einsum("n,n...->...", weights.to(found), found))
        rounding = min(_CLOSE, 100 * torch.finfo(expected.dtype).eps) * size
        # NaN is close to anything here: outputs that are not finite are refused by name, later
        norm = self.network.norm
        return not norm(total - expected) > _CLOSE * norm(expected) + rounding

    # --- running -----------------------------------------------------------------------------------------

    def passes(
        self,
        batch: Batch,
        cotangents: Callable[[Tensor], Sequence[Tensor]],
        *,
        others: bool = False,
    ) -> Iterator[Passed]:
        """One forward pass, and a backward pass for each of the cotangents that are made of its outputs.

        Args:
            batch: the examples.
            cotangents: from the outputs (detached) to gradients of what is asked about with respect to them.
            others: also the whole batch's gradients of the `missing` parameters.
        """
        with torch.enable_grad():
            leaves = self.network.leaves()
            with self._watching(batch.size) as seen:
                outputs = self.network.outputs(batch, leaves)
        if seen.unreadable:
            key, reason = next(iter(seen.unreadable.items()))
            names = ", ".join(self._modules[key][1].values())
            raise ModelError(
                f"the layer of {names} is {reason} from {batch.name(0)} on, though not on the longest examples: what "
                "the model calls depends on its inputs. Use method='gradients' and solver='cg'"
            )
        yield from self._backward(seen, outputs, cotangents(outputs.detach()), leaves, others=others)

    def _watching(self, examples: int, *, trying: bool = False, sharing: bool = True) -> _Seen:
        found = None if trying else self._folded
        return _Seen(self._modules, examples, None if trying and sharing else self._shared, found)

    def _backward(
        self,
        seen: _Seen,
        outputs: Tensor,
        cotangents: Sequence[Tensor],
        leaves: Mapping[str, Tensor],
        *,
        others: bool,
    ) -> Iterator[Passed]:
        rest = {name: leaves[name] for name in self.missing if others}
        edges = [edge for _, _, edge in seen.calls]
        for number, cotangent in enumerate(cotangents):
            more = number < len(cotangents) - 1
            found, last = self.network.gradients(outputs, edges, rest, cotangent, keep_graph=more)
            calls: dict[str, list[tuple[Call, str]]] = {}
            for (key, inputs, _), gradient in zip(seen.calls, found, strict=True):
                if gradient is None:
                    continue
                module, names = self._modules[key]
                if key in self._folded:
                    gradient = gradient.reshape(len(inputs), -1, gradient.shape[1])
                call = Call(module, names, inputs, gradient)
                for kind, name in names.items():
                    if name not in self.missing:
                        calls.setdefault(name, []).append((call, kind))
            yield Passed(calls, {name: _wide(gradient) for name, gradient in last.items()})


class _Seen:
    """Watches the calls of modules: what went in, and where the gradient of what came out will arrive."""

    def __init__(
        self,
        modules: Mapping[int, tuple[nn.Module, Any]],
        examples: int,
        shared: set[int] | None,
        folded: set[int] | None,
    ) -> None:
        self.modules, self.examples = modules, examples
        self.calls: list[tuple[int, Tensor, GradientEdge]] = []
        self.unreadable: dict[int, str] = {}
        #: Modules whose output is one for all examples, as a position's embedding is.
        self.shared: set[int] = set() if shared is None else shared
        #: Modules that are called with a row for each position, those of the first example first.
        self.folded: set[int] = set() if folded is None else folded
        self._find_shared, self._find_folded = shared is None, folded is None
        self._handles: list[Any] = []

    def __enter__(self) -> _Seen:
        for key, (module, _) in self.modules.items():
            self._handles.append(module.register_forward_hook(self._hook(key)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, key: int) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            given = inputs[0] if len(inputs) == 1 else None
            if not isinstance(given, Tensor) or not isinstance(output, Tensor):
                self.unreadable.setdefault(key, "not called with one tensor, or returns something else")
                return None
            if not output.requires_grad:
                return None
            if self.examples > 1 and given.ndim and len(given) == len(output) == 1:
                if self._find_shared:
                    self.shared.add(key)
                if key in self.shared:
                    given = given.expand(self.examples, *given.shape[1:])
                    output = output.expand(self.examples, *output.shape[1:])
            result = output
            folded = key in self.folded or (self._find_folded and len(given) != self.examples)
            if folded and given.ndim == output.ndim == 2 and len(given) == len(output):
                whole = len(given) % self.examples == 0  # else it is refused below
                if whole:
                    self.folded.add(key)
                    given, output = (t.reshape(self.examples, -1, t.shape[1]) for t in (given, output))
            if given.ndim == 0 or len(given) != self.examples or len(output) != self.examples:
                rows = (
                    f"inputs {tuple(given.shape)}, which are not a row for each of {self.examples} examples"
                )
                self.unreadable.setdefault(key, f"called with {rows},")
                return None
            self.calls.append((key, given.detach(), get_gradient_edge(result)))
            return result

        return note


# --- modules -------------------------------------------------------------------------------------------------

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _owners(network: Network) -> dict[str, list[tuple[nn.Module, str]]]:
    """The modules that hold each selected parameter, and under which name."""
    by_storage: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in network.model.modules():
        for kind, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            by_storage.setdefault(id(parameter), []).append((module, kind))
    return {name: by_storage.get(id(parameter), []) for name, parameter in network.parameters.items()}


def _why_not(module: nn.Module) -> str | None:
    """What can be told of a module's parameters without running it."""
    if next(module.children(), None) is not None:
        return f"held by a {own_type(module).__name__}, which is made of other modules"
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    ):
        return "in an embedding that changes or scales its gradients"
    return None


def _is_linear(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        plain = module.groups == 1 and module.padding_mode == "zeros"
        return plain and not isinstance(module.padding, str)
    return isinstance(module, nn.Linear) or _transposed(module)


def _transposed(module: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2, which keeps its weight as inputs by outputs."""
    return own_type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _wide(tensor: Tensor) -> Tensor:
    """In float32 at least: sums of products in fewer bits lose what they are about."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _Alone(nn.Module):
    """A layer without the hooks of its calls, such as those that gather a unit of ``fully_shard``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, given: Tensor) -> Any:
        return self.layer.forward(given)


def _whole(parameter: Any) -> Tensor:
    """A parameter with all its rows; of a sharded model, all processes ask for it."""
    parameter = parameter.detach()
    found = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    assert isinstance(found, Tensor)
    return found


def _parameter(module: nn.Module, kind: str) -> Tensor:
    parameter = getattr(module, kind)
    assert isinstance(parameter, Tensor)
    return parameter
