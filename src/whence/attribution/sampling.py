"""When to draw batches by curvature, and doing so: `whence.importance` inside a run."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from whence.gauss_newton import GaussNewton
from whence.importance import Importance, measure_importance
from whence.spectrum import Spectrum
from whence.store import Run
from whence.tasks import Task

__all__ = ["curvature_pays", "draw_by_curvature"]

#: A constant C above this means that few examples carry the Hessian.
_NOISY = 6.0


def curvature_pays(gnh: GaussNewton, spectrum: Spectrum, terms: float) -> bool:
    """Whether measuring every example's curvature can cost less than it saves.

    The constant C of the batches' noise is about 2 when examples contribute alike. Where it is far above, a forward
    pass over the data (a fifth of a product) must be small beside what is to be spent otherwise.

    Args:
        gnh: the operator.
        spectrum: measured with batches drawn uniformly.
        terms: that the solve would go through with those.
    """
    constants = [spectrum.sampling_constant, spectrum.top_sampling_constant]
    largest = max((estimate.value for estimate in constants if estimate is not None), default=0.0)
    known = type(gnh.task).curvature is not Task.curvature
    return known and largest > _NOISY and gnh.num_terms / 5 < terms / 4


def draw_by_curvature(run: Run, gnh: GaussNewton) -> tuple[str, ...]:
    """From here on the operator draws batches by curvature; says so."""

    def compute() -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"curvature": measure_importance(gnh).curvature}, {}

    importance = Importance(run.tensors("importance", compute)[0]["curvature"])
    gnh.terms.importance = importance.probabilities()
    top = max(1, len(gnh.terms) // 50)
    return (
        f"The model is certain of most of its training data: {top:,} of {len(gnh.terms):,} examples carry "
        f"{importance.share_of_top(top):.0%} of the output curvature. Batches were drawn by curvature.",
    )
