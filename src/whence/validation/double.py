"""Double precision throughout, also where a model asks for single.

``model.double()`` is not enough: many models cast to float32 on purpose (a Llama does in its norms), which
is right for bfloat16 weights and wrong for float64 ones. Ground truth at small ε needs all of its digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["DoublePrecision"]


class DoublePrecision(TorchFunctionMode):
    """While active, whoever asks for float32 gets float64.

    Example:
        >>> with DoublePrecision():
        ...     torch.zeros(2, dtype=torch.float64).float().dtype
        torch.float64
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return Tensor.double(*args, **(kwargs or {}))
        return func(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
