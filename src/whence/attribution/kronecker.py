"""EK-FAC where it pays: made, tried on a part of the terms, and taken if conjugate gradients need fewer iterations.

No spectrum tells beforehand how well a Kronecker-factored matrix fits a model's curvature. What it costs to find out
can be counted, in forwards over all examples: making it, and two solves for a single right-hand side. Where a quarter
of the iterations that all queries need is twice that, it is made, and tried on a third of the terms: without it, until
the error is proven, and with it, until ``gᵀx`` is as large. ``gᵀu - gᵀx = ‖e‖²_A``, so the errors are the same then.
(On far fewer terms, what was made for all of them is not as good.) So it comes in for many queries, which share it.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor

from whence.attribution.settings import Settings
from whence.model.gauss_newton import GaussNewton
from whence.model.memory import half_of_memory
from whence.operators import Damped
from whence.preconditioners.ekfac import Ekfac, ekfac
from whence.runs import Run
from whence.scoring.cost import count_work
from whence.solvers import ConjugateGradient
from whence.solvers.choice import Alternative, tolerance_for

__all__ = ["Trial", "kronecker", "with_basis", "would_try"]

#: Forwards that making EK-FAC costs for each example, and work in flops that does not depend on the model.
_MAKING, _FIXED = 25.0, 2e11
#: Examples that it is made from, at most.
_EXAMPLES = 2048
#: The part of the terms that it is tried on, and the least number of them.
_TRIED, _FEWEST = 1 / 3, 4096
#: The part of the iterations that it can be hoped to save, and trials of which one succeeds; what it must save to be
#: taken.
_HOPED, _TRIALS, _WORTHWHILE = 0.25, 2.0, 0.1
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


def with_basis(gnh: GaussNewton, chosen: Alternative) -> Alternative:
    """The same with the memory that it takes at most where EK-FAC is used: all of the basis is kept, and EK-FAC."""
    kept = math.ceil(chosen.terms / gnh.num_terms)
    return replace(
        chosen, memory_copies=chosen.memory_copies + kept, shared_copies=chosen.shared_copies + _COPIES
    )


def would_try(gnh: GaussNewton, chosen: Alternative, *, queries: int) -> bool:
    """Whether EK-FAC would be made and tried in place of what was chosen: counted, nothing is run.

    Args:
        gnh: H.
        chosen: the cheapest of the other ways.
        queries: solved together.
    """
    if chosen.solver != "cg" or gnh.product != "exact" or not gnh.has_factors:
        return False
    limit = half_of_memory(gnh.network.device)
    needed = with_basis(gnh, chosen)
    if limit is not None and needed.within(queries, 4.0 * gnh.num_parameters, limit).impossible:
        return False
    passes = chosen.terms / gnh.num_terms
    work = count_work(gnh.network, gnh.terms.fetch(gnh.terms.longest(2)), gnh.micro_batch)
    examples = len(gnh.terms)
    forward = work.flops + work.launching / gnh.micro_batch  # of an example
    saved = _HOPED * passes * examples * (4 * queries * work.flops + 5 * forward)
    making = _MAKING * min(examples, _EXAMPLES) * forward + _FIXED
    trying = 2 * 5 * passes * examples * _trial_terms(gnh) / gnh.num_terms * forward
    return saved > _TRIALS * (making + trying)


def kronecker(
    run: Run, gnh: GaussNewton, settings: Settings, chosen: Alternative, *, queries: int, damping: float
) -> Trial:
    """Make it and try it, where that may pay. It stays in the run directory where it is used."""
    device, expected = gnh.network.device, chosen.terms / gnh.num_terms

    def make() -> tuple[dict[str, Tensor], dict[str, Any]]:
        examples = min(len(gnh.terms), _EXAMPLES)
        P = ekfac(gnh, damping, generator=settings.generator(5), examples=examples, curvature="sampled")
        return P.tensors(), P.notes()

    @cache  # without a directory, nothing would remember it
    def made() -> Ekfac:
        return Ekfac.from_tensors(*run.tensors("ekfac", make, device))

    def look() -> dict[str, Any]:  # written down, since it depends on the machine's memory
        if not would_try(gnh, chosen, queries=queries):
            return {}
        if importlib.util.find_spec("curvlinops") is None:
            words = " An EK-FAC preconditioner might save a part of that; it needs curvlinops: "
            return {"words": words + 'pip install "whence[curvlinops]".'}
        try:
            P = made()
        except Exception as error:
            # Whatever a model does to a library that it can do without: the solve goes on, and the page tells why.
            return {"words": f" EK-FAC cannot be made for this model: {error}."}
        without, with_it = _try(gnh, settings, damping, P)
        return {"terms": _trial_terms(gnh), "without": without, "with_it": with_it}

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


def _try(gnh: GaussNewton, settings: Settings, damping: float, P: Ekfac) -> tuple[int, int]:
    """Iterations without and with P to the same error, for a gradient of labels that the model drew."""
    random = settings.generator(6)
    rhs = gnh.sample_factor(max(1, round(gnh.terms.terms_per_example)), random)
    terms = _trial_terms(gnh)
    some = gnh if terms == gnh.num_terms else gnh.subset(terms, random, distinct=True)
    system = Damped(some, damping)
    plain = ConjugateGradient(tolerance=tolerance_for(settings.accuracy), verify=False)
    reached = plain.solve(system, rhs, generator=random)
    assert reached.paths is not None
    if reached.num_products == 0:  # no label that the model would draw has a gradient
        return 1, 1
    without, goal = reached.num_products, float(reached.paths[0, -1, 0])
    other = ConjugateGradient(tolerance=1e-9, preconditioner=P, max_iterations=without, verify=False)
    found = other.solve(system, rhs, generator=random, on_iteration=lambda state: state.path[-1][0] >= goal)
    return without, found.num_products


def _trial_terms(gnh: GaussNewton) -> int:
    return min(gnh.num_terms, max(_FEWEST, math.ceil(_TRIED * gnh.num_terms)))
