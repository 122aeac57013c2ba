"""Which products a model gets: exact ones or finite differences, found out by trying, or none."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from whence.errors import ModelError
from whence.model.agreement import TOLERATED, disagreement
from whence.model.exact import dual_forward, tangent_only
from whence.model.finite_difference import FiniteDifferences
from whence.model.network import Network
from whence.tasks import Batch
from whence.vectors import ParamVector

__all__ = ["Product", "choose_product"]

Product = Literal["auto", "exact", "finite-difference"]


def choose_product(network: Network, pilot: Batch, asked: Product) -> tuple[str, str]:
    """How products are computed, and why; refused where that would be wrong.

    Exact where the model has forward-mode derivatives that agree with its backward pass on the pilot, else finite
    differences that do. See `whence.model.agreement`.
    """
    reason = "asked for"
    if asked != "finite-difference":
        problem = _why_forward_mode_fails(network, pilot)
        if problem is not None and asked == "exact":
            raise ModelError(
                f"exact products need forward-mode differentiation, which fails in this model: {problem}. "
                "Use product='finite-difference' (or 'auto'), or load the model with eager attention"
            )
        if problem is None:
            off = disagreement(network, pilot, lambda v: tangent_only(network, pilot, v)[1])
            if off <= TOLERATED:
                return "exact", reason if asked == "exact" else "the model supports forward-mode AD"
            problem = f"it disagrees with the backward pass by {_percent(off)}"
            if asked == "exact":
                raise ModelError(
                    f"forward-mode derivatives of this model and its backward pass disagree by {_percent(off)} on the "
                    "longest examples: one of them does not see all that it does. Use product='finite-difference' (or "
                    "'auto'), or give the plain Python module, not compiled or exported"
                )
        reason = f"forward-mode AD fails in this model: {problem}"
    differences = FiniteDifferences(network, pilot)
    base = differences.base(pilot, graph=False)

    def tangent(vector: ParamVector) -> Tensor:
        return differences.tangent(base, pilot, vector)

    off = disagreement(network, pilot, tangent)
    if off > TOLERATED:
        raise ModelError(
            f"finite differences of this model's outputs and its backward pass disagree by {_percent(off)} on the "
            f"longest examples ({reason}): the model jumps, cuts gradients (detach), or runs code that does not see "
            "its parameters change, and scores would be wrong. Use product='exact' if forward mode works (load the "
            "model with eager attention and experts), or leave the part out with params="
        )
    return "finite-difference", reason


def _percent(part: float) -> str:
    return f"{100 * part:.3g}%"


def _why_forward_mode_fails(network: Network, batch: Batch) -> str | None:
    """None where one dual-number pass and its backward pass work, else the first line of what it said."""
    direction = network.blank()
    try:
        outputs, leaves, tangent = dual_forward(network, batch, direction)
        network.pull_back(outputs, leaves, tangent, lambda name, gradient: None)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__
    return None
