"""Models are left bit for bit as they were, also after an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from small import DOUBLE, PRODUCTS, Product, evaluated, generator, operator
from whence import (
    Damped,
    GaussNewton,
)
from whence.errors import ModelError
from zoo import vectors

# --- the model is left as it was -----------------------------------------------------------------------------

_HOOKS = [
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
]
_GLOBAL_HOOKS = [
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
]


def _bits(tensor: Tensor | None) -> bytes | None:
    return None if tensor is None else tensor.detach().numpy().tobytes()


def state(model: nn.Module) -> dict[str, Any]:
    """Everything of a model, and of torch, that whence might change."""
    return {
        "parameters": {
            name: (id(p), p.data_ptr(), _bits(p), p.requires_grad, id(p.grad), _bits(p.grad))
            for name, p in model.named_parameters()
        },
        "parameter hooks": {
            name: (list(p._backward_hooks or ()), list(p._post_accumulate_grad_hooks or ()))
            for name, p in model.named_parameters()
        },
        "buffers": {name: (id(b), b.data_ptr(), _bits(b)) for name, b in model.named_buffers()},
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: [list(getattr(module, hooks) or ()) for hooks in _HOOKS]
            for name, module in model.named_modules()
        },
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "global hooks": [list(getattr(torch_module, hooks)) for hooks in _GLOBAL_HOOKS],
        "fast attention": torch.backends.mha.get_fastpath_enabled(),
        "fused attention": torch.backends.cuda.flash_sdp_enabled(),
        "random state": _bits(torch.get_rng_state()),
        "gradients enabled": torch.is_grad_enabled(),
    }


class Fuse:
    """Blows in the n-th call from when it is lit."""

    def __init__(self) -> None:
        self.calls: int | None = None
        self.error: BaseException = RuntimeError("the model's own error")

    def burn(self) -> None:
        if self.calls is not None:
            self.calls -= 1
            if self.calls == 0:
                raise self.error


class Fused(nn.Module):
    """Uses its own weight around a submodule, with the fuse where both are in use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)
        self.fuse = Fuse()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x)) * self.scale
        self.fuse.burn()
        return self.last(self.norm(h))


def used_model() -> Fused:
    """A model with a history: some gradients, a frozen layer, a hook, a harmless layer in training mode."""
    torch.manual_seed(0)
    model = Fused()
    evaluated(model)
    model.first.train()
    model.scale.grad = torch.full_like(model.scale, 7.0)
    model.last.weight.grad = torch.zeros_like(model.last.weight)
    model.norm.bias.requires_grad_(False)
    model.last.register_forward_hook(lambda module, inputs, output: None)
    model.norm.running_mean.normal_()  # type: ignore[union-attr]
    return model


USES: dict[str, Callable[[GaussNewton], object]] = {
    "construction": lambda H: None,
    "matvec": lambda H: H.matvec(H.zeros().randn_like(generator())),
    "block": lambda H: H.matvec(H.zeros(3).randn_like(generator())),
    "quadratic_form": lambda H: H.quadratic_form(H.zeros(2).randn_like(generator())),
    "sample": lambda H: [
        H.sample(4, random).matvec(H.zeros().randn_like(random)) for random in [generator()] for _ in range(5)
    ],
    "sample_factor": lambda H: H.sample_factor(8, generator()),
    "gradients": lambda H: H.gradients(vectors(DOUBLE)[:3]),
}


@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("use", USES)
def test_the_model_is_left_untouched(use: str, product: Product, micro_batch: int | None) -> None:
    model = used_model()
    before = state(model)
    USES[use](operator(model, product=product, micro_batch=micro_batch))
    assert state(model) == before


def test_adding_products_in_place_leaves_the_model_untouched() -> None:
    model = used_model()
    gnh = operator(model)
    before = state(model)
    v = gnh.zeros().randn_like(generator())
    Damped(gnh, 0.1).sample(4, generator()).add_matvec_(v, v, -0.5)
    assert state(model) == before


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("use", ["matvec", "block", "quadratic_form", "sample"])
@pytest.mark.parametrize("error", [RuntimeError("the model's own error"), KeyboardInterrupt()], ids=type)
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_an_error_inside_the_model_leaves_it_untouched(
    call: int, error: BaseException, use: str, product: Product
) -> None:
    model = used_model()
    gnh = operator(model, product=product, micro_batch=5)
    if product == "exact":
        USES[use](gnh)  # the first block product tries whether columns can be vectorised, whatever the error
    before = state(model)
    model.fuse.calls, model.fuse.error = call, error
    # the model's own error is told with the example, and is the cause; an interruption passes as it is
    with pytest.raises(ModelError if isinstance(error, Exception) else type(error)) as caught:
        USES[use](gnh)
    assert (caught.value.__cause__ if isinstance(error, Exception) else caught.value) is error
    assert state(model) == before


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_products_after_an_error_inside_the_model_are_right(call: int) -> None:
    model = used_model()
    gnh = operator(model, product="finite-difference")
    v = gnh.zeros().randn_like(generator())
    model.fuse.calls = call
    with pytest.raises(ModelError, match="RuntimeError: the model's own error"):
        gnh.matvec(v)
    model.fuse.calls = None
    expected = operator(used_model(), product="exact").matvec(v)
    for name, tensor in gnh.matvec(v).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-7, atol=1e-9)
