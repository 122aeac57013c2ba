"""The checks that `whence.validation.validate` runs, each sized to what is left of the budget.

Costs are predicted from the seconds that a product takes for each term (`Spectrum.seconds_per_term`). That was measured
on small batches, which are slower, term for term, than passes over much data: their pace is measured here, where a
product over a thousand terms costs next to nothing.

*Fine-tuning* goes through all of the data where that fits; else through random batches under the run's own plan, which
is noisier and about the same objective. A subset of the data would be cheaper still, but its scores are others than the
run's: agreement there would say nothing about them.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from whence.attribution import Attribution
from whence.errors import SolverError, WhenceWarning
from whence.model.gauss_newton import GaussNewton
from whence.model.memory import half_of_memory
from whence.model.selection import ParameterFilter
from whence.report.checks import NAMES, Check, Comparison
from whence.solvers.plan import Plan
from whence.units import format_bytes, format_duration
from whence.validation.condition import check_condition
from whence.validation.damping import BASIS_BUDGET, damping_sweep
from whence.validation.response import ProximalResponse, pbrf
from whence.validation.verdicts import (
    batch_check,
    damping_check,
    fine_tuning_check,
    places_of,
    skipped,
    terms_in,
)

__all__ = ["CHECKS", "Job"]

#: What a check may take of the budget that is left when its turn comes.
_SHARES = {"batch": 0.25, "fine-tuning": 0.75, "damping": 0.9}
#: A gradient of the proximal objective in float64, in products: no tangent, but twice the digits.
_GRADIENT = 1.5
_CHAINS = 2  # of a fine-tuning by random batches: the fewest that have a spread
_TOLERANCE = 1e-4
_REALISATIONS = (16, 256)  # of C.1, at least and at most
_LANCZOS = 20
_DAMPINGS = (4.0, 2.0, 1.0, 0.5, 0.25)  # times the run's own
_PRODUCTS, _PROBES, _RANKED, _QUERIES = 64, 2, 48, 3
_PILOT_TERMS = 1024


class Job:
    """What the checks work on, what it costs, and what is left to spend.

    Args:
        gnh: the operator of the run.
        queries: of the run.
        params: of the run.
        result: the scores to check.
        budget: seconds, from now on.
        points: examples of each kind to fine-tune on.
        seed: of all random numbers.
    """

    def __init__(
        self,
        gnh: GaussNewton,
        queries: Any,
        params: ParameterFilter | None,
        result: Attribution,
        *,
        budget: float,
        points: int,
        seed: int,
    ) -> None:
        self._begun = time.monotonic()
        self.gnh, self.queries, self.params, self.result = gnh, queries, params, result
        self.budget, self.seed = budget, seed
        self.plan: Plan = result.solve.plan
        per_example = gnh.terms.terms_per_example
        #: Terms in a batch of the plan: examples are drawn whole.
        self.drawn = max(1, round(self.plan.batch_size / per_example)) * per_example
        #: Examples to fine-tune on, (index, kind).
        self.chosen = _choose(result, points, self.generator("points"))
        #: Seconds per term of products over small batches, and over large ones.
        self.pace = self.plan.spectrum.seconds_per_term or self._measure_pace(round(self.drawn))
        self.large_pace = self.pace
        if _PILOT_TERMS * self.pace <= 0.02 * budget:
            self.large_pace = min(self.pace, self._measure_pace(_PILOT_TERMS))

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.budget - (time.monotonic() - self._begun)

    def generator(self, name: str, part: int = 0) -> torch.Generator:
        """Random numbers of one check (or a part of it), whatever was run before."""
        number = ["points", "pace", *NAMES].index(name)
        return torch.Generator().manual_seed(self.seed * 1_000_003 + number + 16 * part)

    def _measure_pace(self, terms: int) -> float:
        generator, terms = self.generator("pace"), min(terms, self.gnh.num_terms)
        vector = self.gnh.zeros().rademacher_like(generator)
        batch = self.gnh.sample(terms, generator)
        begun = time.perf_counter()
        batch.matvec(vector)
        return (time.perf_counter() - begun) / batch.num_terms

    def unaffordable(self, name: str, what: str, seconds: float) -> Check:
        """A check for which there is not enough time."""
        share = _SHARES[name] * max(self.left, 0.0)
        before = math.prod(1 - _SHARES[other] for other in list(_SHARES)[: list(_SHARES).index(name)])
        budget = math.ceil(seconds / (before * _SHARES[name]))
        return skipped(
            name,
            f"{what} would take about {format_duration(seconds)}, and {format_duration(share)} of the budget of "
            f"{format_duration(self.budget)} are there for it. A budget of {format_duration(budget)} would do.",
        )


def _choose(result: Attribution, points: int, generator: torch.Generator) -> list[tuple[int, str]]:
    """Examples to fine-tune on, one of each kind in turn and queries in turn: (index, kind)."""
    taken: dict[int, str] = {}
    means, indices = result.chain_scores.mean(0), result.indices
    shuffled = indices[torch.randperm(len(indices), generator=generator)].tolist()
    points = min(points, len(indices))
    reach = min(3 * points, len(indices))  # among so many, one is not taken yet
    for number in range(points):
        scores = means[number % len(means)]
        for kind, sign in (("most helpful", 1.0), ("most harmful", -1.0)):
            best = (sign * scores).topk(reach)
            ends = indices[best.indices[best.values > 0]].tolist()
            taken |= dict.fromkeys([index for index in ends if index not in taken][:1], kind)
        taken |= dict.fromkeys([index for index in shuffled if index not in taken][:1], "random")
    return list(taken.items())


# --- was the batch large enough? -----------------------------------------------------------------------------


def _check_batch(job: Job, _: list[Comparison], __: Callable[[], None]) -> Check:
    gnh, share = job.gnh, _SHARES["batch"] * job.left
    if job.result.solve.certificate is not None:
        return skipped(
            "batch", "the solver went through all of its data in every product, and drew no batches."
        )
    if len(gnh.terms) < 2:
        return skipped("batch", "there is a single training example, and nothing to draw.")
    per_example = gnh.terms.terms_per_example
    examples = round(job.drawn / per_example)
    draws = (examples // 2, examples) if examples > 1 else (1, 2)
    sizes = [min(math.ceil(count * per_example), gnh.num_terms) for count in draws]
    pair = 2 * _block(2) * sum(sizes) * job.pace  # two batches times two vectors, at both sizes
    per_term = _LANCZOS * job.large_pace
    most, least = min(gnh.num_terms, 4096), min(gnh.num_terms, 2 * sizes[-1])
    subset = max(least, min(most, int(share / 3 / per_term)))
    realisations = int((share - subset * per_term) / pair)
    if realisations < _REALISATIONS[0]:
        what = f"the fewest measurements that say anything ({_REALISATIONS[0]})"
        return job.unaffordable("batch", what, least * per_term + _REALISATIONS[0] * pair)
    found = check_condition(
        gnh,
        sizes,
        generator=job.generator("batch"),
        realisations=min(realisations, _REALISATIONS[1]),
        lanczos_terms=subset,
        max_products=_LANCZOS,
    )
    return batch_check(job.result, job.plan, job.drawn, found)


# --- does fine-tuning agree? ---------------------------------------------------------------------------------


def _fine_tune(job: Job, done: list[Comparison], write: Callable[[], None]) -> Check:
    """Fine-tune on the chosen examples, a few at a time; ``done`` is added to and written down every time."""
    gnh, plan = job.gnh, job.plan
    needed = 8 * (sum(p.numel() for p in gnh.network.model.parameters()) + 10 * gnh.num_parameters)
    memory = half_of_memory(gnh.network.device)
    if memory is not None and needed > memory:
        return skipped(
            "fine-tuning",
            f"it needs about {format_bytes(needed)} for vectors in double precision, and half of the memory is "
            f"{format_bytes(memory)}.",
        )
    end = job.left * (1 - _SHARES["fine-tuning"])
    gradients = _iterations(plan.condition_number, 0.3 * _TOLERANCE)
    full = _GRADIENT * gradients * gnh.num_terms * job.large_pace
    small = _GRADIENT * (_CHAINS * plan.num_steps + 32) * job.drawn * job.pace
    fits = full * len(job.chosen) <= job.left - end
    full_batch = fits or full <= small or any(c.full_batch for c in done)
    done[:] = [comparison for comparison in done if comparison.full_batch == full_batch]
    known = {comparison.index for comparison in done}
    todo = [chosen for chosen in job.chosen if chosen[0] not in known]
    cost = full if full_batch else small
    while todo and job.left - len(todo[:3]) * cost >= end:
        begun, turn, todo = time.monotonic(), todo[:3], todo[3:]
        done += _compare(job, turn, 3 * gradients if full_batch else None)
        write()
        cost = (time.monotonic() - begun) / len(turn)  # measured is better than predicted
    if not done:
        way = f"over all {terms_in(job.result, gnh.num_terms)}" if full_batch else "by random batches"
        return job.unaffordable("fine-tuning", f"fine-tuning on three examples, {way},", 3 * cost)
    return fine_tuning_check(job.result, done, planned=len(job.chosen))


def _compare(job: Job, turn: Sequence[tuple[int, str]], max_gradients: int | None) -> list[Comparison]:
    """Fine-tune on each of a few examples; over all of the data where ``max_gradients`` is given."""
    indices = [index for index, _ in turn]
    try:
        response = _respond(job, indices, max_gradients)
    except SolverError:  # it diverged on one of them: which?
        if len(turn) > 1:
            return [comparison for one in turn for comparison in _compare(job, [one], max_gradients)]
        response = None
    scored = job.result.scored.at(slice(None), places_of(job.result, indices))
    scores, errors = scored.mean.double(), scored.half_width(0.95).double()
    found, reach = torch.zeros_like(scores), torch.zeros_like(scores)
    if response is not None:
        found = response.scores.cpu()
        reach = 2 * response.stderr.cpu() + (response.scores - response.linear).abs().cpu()
    return [
        Comparison(
            index=index,
            kind=kind,
            converged=response is not None and bool(response.converged[k]),
            full_batch=max_gradients is not None,
            influence=tuple(scores[:, k].tolist()),
            influence_error=tuple(errors[:, k].tolist()),
            fine_tuned=tuple(found[:, k].nan_to_num(0.0).tolist()),
            fine_tuned_error=tuple(reach[:, k].nan_to_num(0.0).tolist()),
        )
        for k, (index, kind) in enumerate(turn)
    ]


def _respond(job: Job, indices: list[int], max_gradients: int | None) -> ProximalResponse:
    gnh, full_batch = job.gnh, max_gradients is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WhenceWarning)  # what does not converge is counted, and said
        return pbrf(
            gnh.network.model,
            gnh.terms.data,
            [gnh.terms.data[index] for index in indices],
            job.queries,
            task=gnh.task,
            damping=job.plan.damping,
            params=job.params,
            plan=None if full_batch else job.plan.replace(chains=_CHAINS),
            generator=job.generator("fine-tuning", 1 + indices[0]),
            tolerance=_TOLERANCE if full_batch else None,
            max_gradients=max_gradients or 1000,
            micro_batch=job.result.settings.get("micro_batch"),
            importance=gnh.terms.importance,
        )


# --- would another damping rank differently? -----------------------------------------------------------------


def _sweep_dampings(job: Job, _: list[Comparison], __: Callable[[], None]) -> Check:
    gnh, result, plan = job.gnh, job.result, job.plan
    if len(result.indices) < 3:
        return skipped("damping", "a ranking to compare needs at least three scored examples.")
    vector = gnh.zeros().nbytes
    products = min(_PRODUCTS, _iterations(2 * plan.condition_number, 1e-3), BASIS_BUDGET // vector)
    ranked = _to_rank(result, min(_RANKED, BASIS_BUDGET // (2 * vector)), job.generator("points"))
    if products < min(_PRODUCTS // 4, gnh.num_parameters) or len(ranked) < 3:
        return skipped("damping", f"vectors of {format_bytes(vector)} are too large to keep enough of them.")
    asked = min(_QUERIES, len(job.queries))
    per_term = products * (_block(_PROBES) + _block(asked)) * job.large_pace
    # A draw of m terms differs from the whole by Tr(H)/m. Where that is above λ, λ would matter less than it does.
    least = min(gnh.num_terms, math.ceil(plan.spectrum.trace.value / plan.damping))
    terms = min(gnh.num_terms, max(least, 4096), int(_SHARES["damping"] * job.left / per_term))
    if terms < least:
        return job.unaffordable("damping", f"solving again on {terms_in(result, least)}", least * per_term)
    sweep = damping_sweep(
        gnh,
        gnh.gradients([job.queries[q] for q in range(asked)]),
        gnh.gradients([gnh.terms.data[index] for index in ranked]),
        generator=job.generator("damping"),
        dampings=[factor * plan.damping for factor in _DAMPINGS],
        chosen=plan.damping,
        spectrum=plan.spectrum,
        max_products=products,
        probes=_PROBES,
        max_terms=terms,
    )
    return damping_check(result, sweep)


def _to_rank(result: Attribution, most: int, generator: torch.Generator) -> list[int]:
    """The ends of the first queries' rankings, and random examples up to ``most``."""
    ends: dict[int, None] = {}
    for query in range(min(_QUERIES, result.chain_scores.shape[1])):
        for harmful in (False, True):
            ends |= dict.fromkeys(row.index for row in result.top(4, query=query, harmful=harmful))
    shuffled = result.indices[torch.randperm(len(result.indices), generator=generator)].tolist()
    return list(dict.fromkeys([*ends, *shuffled]))[:most]


def _iterations(condition_number: float, tolerance: float) -> int:
    """Of conjugate gradients, where the spectrum does not help them: half of √κ for every factor of e."""
    return 4 + math.ceil(0.5 * math.sqrt(1 + condition_number) * math.log(2 / tolerance))


def _block(columns: int) -> float:
    """Cost of a product with a block, in products with one vector: the pass at θ is shared."""
    return (1 + 4 * columns) / 5


#: Check -> how to run it, given what was compared before and how to write down what is added. In their order.
CHECKS: Mapping[str, Callable[[Job, list[Comparison], Callable[[], None]], Check]] = {
    "batch": _check_batch,
    "fine-tuning": _fine_tune,
    "damping": _sweep_dampings,
}
