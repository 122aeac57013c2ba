"""When to draw batches by curvature, and doing so: `whence.model.importance` inside a run."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from whence.model.gauss_newton import GaussNewton
from whence.model.importance import Importance, measure_importance
from whence.runs import Run
from whence.spectrum import Spectrum
from whence.tasks import Task

__all__ = ["curvature_pays", "draw_by_curvature"]

#: A constant C above this means that few examples carry the Hessian.
_NOISY = 6.0
#: What measuring a spectrum costs, in products as large as Lanczos'.
_SPECTRUM_PRODUCTS = 24


def curvature_pays(
    gnh: GaussNewton, spectrum: Spectrum, *, terms: float, lissa_terms: float, spectrum_terms: int
) -> bool:
    """Whether drawing by curvature should save more than finding it out costs.

    The constant C of the batches' noise is about 2 when examples contribute alike; where it is surely far above, few of
    them carry the Hessian. LiSSA's cost is proportional to C, so ``2/C`` of it is what could be left; and before that a
    forward pass over the data (a fifth of a product), and the spectrum once more.

    Args:
        gnh: the operator.
        spectrum: measured with batches drawn uniformly.
        terms: that the best solver would go through with those.
        lissa_terms: that LiSSA would.
        spectrum_terms: that one of Lanczos' products goes over.
    """
    measured = [spectrum.sampling_constant, spectrum.top_sampling_constant]
    constants = [estimate for estimate in measured if estimate is not None]
    surely = max((estimate.value - estimate.stderr for estimate in constants), default=0.0)
    if type(gnh.task).curvature is Task.curvature or surely <= _NOISY:
        return False
    left = lissa_terms * 2 / max(estimate.value for estimate in constants)
    again = gnh.num_terms / 5 + _SPECTRUM_PRODUCTS * min(spectrum_terms, gnh.num_terms)
    return left + again < terms


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
