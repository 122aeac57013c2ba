"""EK-FAC where it pays: made, tried on a few terms, and taken if conjugate gradients need fewer iterations with it.

No spectrum tells beforehand how well a Kronecker-factored matrix fits a model's curvature. What it costs to find out
can be counted, in forwards over all examples: making it, and two small solves. Where a quarter of the iterations that
all queries need is more than that, it is made, and a random right-hand side is solved for on as many terms as the
spectrum was measured on, with it and without. So it comes in for many queries, which share it.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor

from whence.allocator import half_of_memory
from whence.attribution.settings import Settings
from whence.ekfac import Ekfac, ekfac
from whence.errors import ModelError, OptionError
from whence.gauss_newton import GaussNewton
from whence.operators import Damped
from whence.scoring.cost import count_work
from whence.solvers import ConjugateGradient
from whence.solvers.choice import Alternative, tolerance_for
from whence.store import Run

__all__ = ["Trial", "kronecker", "would_try"]

#: Forwards that making EK-FAC costs for each example, and work in flops that does not depend on the model.
_MAKING, _FIXED = 25.0, 2e11
#: Examples that it is made from, at most.
_EXAMPLES = 2048
#: The part of the iterations that it can be hoped to save; what it must save to be taken.
_HOPED, _WORTHWHILE = 0.25, 0.1
#: Vectors of the parameters' size that it takes itself.
_COPIES = 4


@dataclass(frozen=True)
class Trial:
    """What came of EK-FAC.

    Attributes:
        preconditioner: to be used, or None.
        words: what was found; empty where it was not worth looking.
        terms: that it was tried on; 0 where it was not.
        without, with_it: iterations that were needed there.
    """

    preconditioner: Ekfac | None = None
    words: str = ""
    terms: int = 0
    without: int = 0
    with_it: int = 0


def would_try(gnh: GaussNewton, chosen: Alternative, *, queries: int, trial_terms: int) -> bool:
    """Whether EK-FAC would be made and tried in place of what was chosen: counted, nothing is run.

    Args:
        gnh: H.
        chosen: the cheapest of the other ways.
        queries: solved together.
        trial_terms: that it would be tried on.
    """
    if chosen.solver != "cg" or gnh.product != "exact" or not gnh.has_factors:
        return False
    passes = chosen.terms / gnh.num_terms
    vector = 4.0 * gnh.num_parameters
    limit = half_of_memory(gnh.network.device)
    if limit is not None and ((chosen.memory_copies + passes) * queries + _COPIES) * vector > limit:
        return False
    work = count_work(gnh.network, gnh.terms.fetch(gnh.terms.longest(2)), gnh.micro_batch)
    examples = len(gnh.terms)
    forward = work.flops + work.launching / gnh.micro_batch  # of an example
    saved = _HOPED * passes * examples * (4 * queries * work.flops + 5 * forward)
    making = _MAKING * min(examples, _EXAMPLES) * forward + _FIXED
    trying = 2 * 5 * passes * examples * min(1.0, trial_terms / gnh.num_terms) * forward
    return saved > making + trying


def kronecker(
    run: Run, gnh: GaussNewton, settings: Settings, chosen: Alternative, *, queries: int, damping: float
) -> Trial:
    """Make it and try it, where that may pay. It stays in the run directory where it is used."""
    if not would_try(gnh, chosen, queries=queries, trial_terms=settings.lanczos_terms):
        return Trial()
    if importlib.util.find_spec("curvlinops") is None:
        return Trial(
            words=" An EK-FAC preconditioner might save a part of that; it needs curvlinops: "
            'pip install "whence[curvlinops]".'
        )
    device, expected = gnh.network.device, chosen.terms / gnh.num_terms

    def make() -> tuple[dict[str, Tensor], dict[str, Any]]:
        examples = min(len(gnh.terms), _EXAMPLES)
        P = ekfac(gnh, damping, generator=settings.generator(5), examples=examples, curvature="sampled")
        return P.tensors(), P.notes()

    @cache  # without a directory, nothing would remember it
    def made() -> Ekfac:
        return Ekfac.from_tensors(*run.tensors("ekfac", make, device))

    def look() -> dict[str, Any]:
        try:
            P = made()
        except (ModelError, OptionError) as error:
            return {"words": f" EK-FAC cannot be made for this model: {error}."}
        terms = min(settings.lanczos_terms, gnh.num_terms)
        without, with_it = (_iterations(gnh, settings, damping, terms, tried) for tried in (None, P))
        return {"terms": terms, "without": without, "with_it": with_it}

    found = Trial(**run.json("ekfac-trial", look))
    if found.terms == 0:
        return found
    told = (
        f" With EK-FAC as a preconditioner, {found.with_it} iterations do on {found.terms:,} of the terms where "
        f"{found.without} are needed without: it is "
    )
    if found.with_it > (1 - _WORTHWHILE) * found.without:
        if run.path is not None:  # as large as the model, and not needed any more
            (run.path / "ekfac.safetensors").unlink(missing_ok=True)
        return replace(found, words=told + "not used.")
    left = math.ceil(expected * found.with_it / found.without)
    return replace(found, preconditioner=made(), words=told + f"used, and about {left} are expected.")


def _iterations(gnh: GaussNewton, settings: Settings, damping: float, terms: int, P: Ekfac | None) -> int:
    """Of conjugate gradients for a gradient of labels that the model drew, until its scores are proven."""
    random = settings.generator(6)
    rhs = gnh.sample_factor(max(1, round(gnh.terms.terms_per_example)), random)
    some = gnh if terms == gnh.num_terms else gnh.subset(terms, random, distinct=True)
    solver = ConjugateGradient(
        tolerance=tolerance_for(settings.accuracy), preconditioner=P, keep_basis=True, verify=False
    )
    return max(1, solver.solve(Damped(some, damping), rhs, generator=random).num_products)
