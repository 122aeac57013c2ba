"""Which parameters of a model the Hessian is taken over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from whence.errors import ModelError, OptionError, ParameterSelectionError
from whence.model.quantised import is_quantised

__all__ = ["ParameterFilter", "select_parameters"]

ParameterFilter = Callable[[str], bool] | Sequence[str]


def select_parameters(model: nn.Module, params: ParameterFilter | None = None) -> dict[str, nn.Parameter]:
    """The model's trainable parameters, or those of them that ``params`` selects.

    Frozen parameters (``requires_grad=False``) are never selected, but for the adapters of a PEFT model that was loaded
    for inference, where all is frozen. Nor are quantised ones, which have no derivatives: of a quantised model without
    adapters, whatever floating point is left has to be asked for. Tied weights appear once, under the name that
    `torch.nn.Module.named_parameters` gives them first.

    Args:
        model: any module.
        params: a predicate on names, or glob patterns (``["transformer.h.*"]``); None selects all.
    """
    everything = dict(model.named_parameters())
    if not everything:
        raise ModelError(
            f"{type(model).__name__} has no parameters to take a Hessian over; give the trained module itself"
        )
    trainable = {
        name: parameter
        for name, parameter in everything.items()
        if parameter.requires_grad and parameter.is_floating_point()
    }
    quantised = [name for name, parameter in everything.items() if is_quantised(parameter)]
    if quantised:
        _check_quantised(model, everything, quantised, params)
        trainable = {name: parameter for name, parameter in trainable.items() if name not in quantised}
    if not trainable:
        trainable = _adapters(model, everything)
    if not trainable:
        raise ParameterSelectionError(
            f"none of the model's {len(everything)} parameters is trainable: all have requires_grad=False. "
            "Call requires_grad_(True) on those that the attribution is about"
        )
    if params is None:
        return trainable
    matches = _as_predicate(params)
    selected = {name: parameter for name, parameter in trainable.items() if matches(name)}
    if selected:
        return selected
    frozen = [name for name in everything if name not in trainable and matches(name)]
    if frozen:
        raise ParameterSelectionError(
            f"the parameter filter matches only frozen parameters ({_few(frozen)}); "
            "call requires_grad_(True) on them, or choose others"
        )
    raise ParameterSelectionError(
        f"the parameter filter {_describe(params)} matches nothing; it could match: {_few(trainable, 12)}"
    )


def _check_quantised(
    model: nn.Module,
    everything: Mapping[str, nn.Parameter],
    quantised: Sequence[str],
    params: ParameterFilter | None,
) -> None:
    """Refuse to attribute to weights without derivatives, or silently to what little there is beside them."""
    matches = (lambda name: True) if params is None else _as_predicate(params)
    asked = [name for name in everything if matches(name)]
    trained = [name for name in quantised if everything[name].requires_grad and name in asked]
    if trained or (asked and set(asked) <= set(quantised)):
        raise ParameterSelectionError(
            f"these parameters are quantised: {_few(trained or asked)}. Numbers of so few bits have no derivatives, so "
            "nothing can be attributed to them. Train adapters (LoRA) on them and attribute to those, or give the "
            "model in floating point"
        )
    if params is None and not _adapters(model, everything):
        raise ParameterSelectionError(
            f"{len(quantised)} of the model's {len(everything)} parameters are quantised, which have no derivatives, "
            "and it has no adapters. Give the model in floating point, or with its adapters (PEFT); what is left in "
            "floating point can be asked for by params="
        )


def _adapters(model: nn.Module, everything: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Parameters of PEFT's active adapters: its layers name the parts that belong to them."""
    if not hasattr(model, "peft_config"):
        return {}
    found: set[str] = set()
    for prefix, module in model.named_modules():
        active = getattr(module, "active_adapters", ())
        for part in getattr(module, "adapter_layer_names", ()):
            found.update(f"{prefix}.{part}.{adapter}" for adapter in active)
    return {
        name: parameter
        for name, parameter in everything.items()
        if parameter.is_floating_point() and any(name == own or name.startswith(f"{own}.") for own in found)
    }


def _as_predicate(params: ParameterFilter) -> Callable[[str], bool]:
    if isinstance(params, str):
        raise OptionError(f"params must be a list of patterns or a predicate; write [{params!r}]")
    if callable(params):
        return params
    if not isinstance(params, Iterable):
        raise OptionError(
            f"params is {params!r}; give a list of patterns, as ['model.layers.*'], or a predicate"
        )
    patterns = list(params)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise OptionError(f"params must hold name patterns, got {pattern!r}")
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def _describe(params: ParameterFilter) -> str:
    return "function" if callable(params) else repr(list(params))


def _few(names: Iterable[str], limit: int = 5) -> str:
    listed = list(names)
    shown = ", ".join(listed[:limit])
    return shown if len(listed) <= limit else f"{shown}, … ({len(listed)} in all)"
