"""Small models and operators that the tests of bad input share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from whence import (
    Classification,
    GaussNewton,
)
from zoo import mlp, vectors

DOUBLE = torch.float64
NOT_POSITIVE = [0.0, -1.0, math.nan, math.inf]
PRODUCTS = ["exact", "finite-difference"]
Product = Literal["auto", "exact", "finite-difference"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def evaluated(model: nn.Module) -> nn.Module:
    return model.to(DOUBLE).eval()


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return evaluated(mlp())


def operator(model: nn.Module | None = None, data: Any = None, **options: Any) -> GaussNewton:
    return GaussNewton(
        model if model is not None else classifier(),
        Classification(),
        vectors(DOUBLE) if data is None else data,
        **options,
    )


class Wrapped(nn.Module):
    """A linear layer, and a function of what it returns."""

    def __init__(self, function: Callable[[Tensor], Any], outputs: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, outputs)
        self.function = function
        evaluated(self)

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))
