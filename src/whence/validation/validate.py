"""`validate`: as many reasons to believe a run's scores, or to doubt them, as a budget buys.

    the solver's own account → the noise of batches → fine-tuning on single examples → other dampings

Each check predicts what it will cost, does as much as fits, and is skipped with the reason where nothing does. Costs
are predicted from the seconds that a product takes for each term. What is found is written down check by check and,
within fine-tuning, a few examples at a time, so that an interrupted call goes on where it was.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whence.arguments import checked
from whence.attribution import Attribution
from whence.attribution.damping import metric_again
from whence.attribution.identity import operator_identity, recognise
from whence.distributed import one_process
from whence.errors import OptionError, RunDirectoryError, SolverError, WhenceError, WhenceWarning
from whence.model.data import TermSet
from whence.model.gauss_newton import GaussNewton
from whence.model.importance import measure_importance
from whence.model.memory import half_of_memory
from whence.model.selection import ParameterFilter
from whence.report.checks import NAMES, Check, Comparison, Validation
from whence.runs import Run, read
from whence.runs.fingerprint import of_data, of_value
from whence.solvers.plan import Plan
from whence.spectrum import estimate_spectrum
from whence.tasks import Questions, Task
from whence.threads import one_at_a_time
from whence.units import format_bytes, format_duration
from whence.validation.pbrf import ProximalResponse, pbrf
from whence.validation.verdicts import (
    DAMPINGS,
    batch_check,
    damping_check,
    fine_tuning_check,
    scored_at,
    skipped,
    solver_check,
    terms_in,
)

__all__ = ["check_options", "validate"]

#: What a check may take of the budget that is left when its turn comes.
_SHARES = {"batch": 0.25, "fine-tuning": 0.9}
#: A gradient of the proximal objective in float64, in products: no tangent, but twice the digits.
_GRADIENT = 1.5
_CHAINS = 2  # of a fine-tuning by random batches: the fewest that have a spread
_TOLERANCE = 1e-4
_REALISATIONS = (16, 256)  # pairs of batches, at least and at most
_LANCZOS = 20
_RANKED, _QUERIES = 48, 3  # whose order under other dampings is compared, at most


@one_at_a_time
@checked("model", "task", "params", "directory")
def validate(
    model: nn.Module,
    train: Any,
    queries: Any,
    result: Attribution,
    *,
    task: Task,
    params: ParameterFilter | None = None,
    budget_seconds: float = 600.0,
    points: int = 4,
    directory: str | Path | None = None,
    seed: int = 0,
) -> Validation:
    """Why should one believe these scores? Runs what is affordable, and says in words what it found.

    The page of a run directory shows what was found. Without a directory, show it with
    ``dataclasses.replace(result, validation=found).to_html(path)``.

    Args:
        model: the one that was attributed; another is recognised and refused. So are other data and parameters.
        train: its training data.
        queries: what was explained, as it was given to `whence.attribute`; `Questions` where more than losses was
            asked for.
        result: what `whence.attribute` returned, or `whence.load` of its run directory.
        task: what the model's outputs mean.
        params: which parameters, as they were given to `whence.attribute`.
        budget_seconds: what the checks may take together. They predict their cost, and may take somewhat longer.
        points: training examples to fine-tune on, of each kind: most helpful, most harmful, random.
        directory: where what is found is kept, such as the run directory: the next call goes on with it.
        seed: of all random numbers.

    Example:
        >>> import whence
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(2, 3).eval()
        >>> train = [(torch.randn(2), i % 3) for i in range(30)]
        >>> task = whence.Classification()
        >>> result = whence.attribute(model, train, train[:1], task=task)
        >>> validation = whence.validate(model, train, train[:1], result, task=task, points=1)
        >>> validation["fine-tuning"].verdict
        'trust'
    """
    one_process("validate")
    check_options(budget_seconds, points)
    if not 0 <= seed < 2**40:
        raise OptionError(f"seed is {seed}; give a whole number from 0 to 2^40")
    if result.checkpoints:
        raise OptionError(
            f"these scores are means over {len(result.checkpoints)} checkpoints, and the checks are about one model; "
            "validate the run of one of them, whose directory is inside this one’s"
        )
    settings = result.settings
    gnh = GaussNewton(
        model,
        task,
        train,
        params=params,
        product=settings.get("product", "auto"),  # type: ignore[arg-type]  # as `attribute` checked it
        micro_batch=settings.get("micro_batch"),  # type: ignore[arg-type]
    )
    questions = Questions.of(queries)
    TermSet(questions.queries, task, gnh.network.device)  # refuses what is no list of examples
    _recognise(gnh, questions, result)
    with Run(None, {}, identity={}) if directory is None else Run.again(directory) as run:
        recognise(run, gnh)
        gnh = gnh.in_metric(metric_again(gnh, result, directory))
        if result.solve.by_curvature:
            gnh.terms.draw_by(measure_importance(gnh).probabilities())
        job = _Job(gnh, questions, params, result, run, budget=budget_seconds, points=points, seed=seed)
        job.keep(solver_check(result))
        for name, check in CHECKS.items():
            if job.settled(name):
                continue
            begun = time.monotonic()
            try:
                found = check(job)
            except (WhenceError, torch.OutOfMemoryError) as error:
                found = skipped(name, f"it failed. {error}")
            job.keep(replace(found, seconds=time.monotonic() - begun, budget_seconds=budget_seconds))
        return job.found


def check_options(budget_seconds: float, points: int) -> None:
    """Refuse what cannot work before a model is loaded."""
    if not 0 < budget_seconds < math.inf:
        raise OptionError(f"the budget is {budget_seconds} seconds; give a positive number, such as 600")
    if points < 1:
        raise OptionError(f"points is {points}; fine-tune on at least one example of each kind")


def _recognise(gnh: GaussNewton, queries: Questions, result: Attribution) -> None:
    """Refuse another model, other data, queries or parameters than the scores are about."""
    found = {**operator_identity(gnh), "queries": f"{len(queries)} {of_data(queries.data)}"}
    for name, given in found.items():
        known = result.settings.get(name, given)
        if known != given:
            raise RunDirectoryError(
                f"the {name} given now ({given}) are not what the scores are about ({known}). Give what the run "
                "was made with, or run again with what there is now"
            )


class _Job:
    """What the checks work on, what they found, what they cost, and what is left to spend."""

    def __init__(
        self,
        gnh: GaussNewton,
        queries: Questions,
        params: ParameterFilter | None,
        result: Attribution,
        run: Run,
        *,
        budget: float,
        points: int,
        seed: int,
    ) -> None:
        self._begun = time.monotonic()
        self.gnh, self.queries, self.params, self.result, self.run = gnh, queries, params, result, run
        self.budget, self.seed = budget, seed
        self.plan: Plan = result.solve.plan
        about = Validation(of_value([result.chain_scores, result.indices]), ())
        known = read(run.path, "validation", Validation) if run.path and run.has("validation") else about
        #: What is known of these scores, in the run directory after every addition.
        self.found = known if known.about == about.about else about
        per_example = gnh.terms.terms_per_example
        #: Terms in a batch of the plan: examples are drawn whole.
        self.drawn = max(1, round(self.plan.batch_size / per_example)) * per_example
        #: Examples to fine-tune on, (index, kind).
        self.chosen = _choose(result, len(queries), points, self.generator("points"))
        #: Seconds that a product takes for each term.
        self.pace = self.plan.spectrum.seconds_per_term or self._measure_pace()

    def keep(self, *checks: Check, comparisons: Sequence[Comparison] | None = None) -> None:
        """Add checks to what was found, or put these comparisons in place of those there."""
        known = {check.name: check for check in (*self.found.checks, *checks)}
        self.found = replace(
            self.found,
            checks=tuple(known[name] for name in NAMES if name in known),
            comparisons=self.found.comparisons if comparisons is None else tuple(comparisons),
        )
        self.run.put("validation", Validation, self.found)

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.budget - (time.monotonic() - self._begun)

    def generator(self, name: str, part: int = 0) -> torch.Generator:
        """Random numbers of one check (or a part of it), whatever was run before."""
        number = ["points", "pace", *NAMES].index(name)
        return torch.Generator().manual_seed(self.seed * 1_000_003 + number + 16 * part)

    def _measure_pace(self) -> float:
        generator = self.generator("pace")
        vector = self.gnh.zeros().rademacher_like(generator)
        batch = self.gnh.sample(min(round(self.drawn), self.gnh.num_terms), generator)
        begun = time.perf_counter()
        batch.matvec(vector)
        return (time.perf_counter() - begun) / batch.num_terms

    def settled(self, name: str) -> bool:
        """Whether nothing is to be gained by running a check (again): more time may tell what less could not."""
        check = next((check for check in self.found.checks if check.name == name), None)
        if check is None or not check.ran:
            return False
        if name == "fine-tuning":
            return {index for index, _ in self.chosen} <= {c.index for c in self.found.comparisons}
        return check.verdict != "cannot tell" or self.budget <= check.budget_seconds

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


def _choose(
    result: Attribution, queries: int, points: int, generator: torch.Generator
) -> list[tuple[int, str]]:
    """Scored examples, (index, kind): one of each kind in turn, for the first queries in turn."""
    means, indices = result.chain_scores.mean(0), result.indices
    shuffled = indices[torch.randperm(len(indices), generator=generator)].tolist()
    points = min(points, len(indices))
    reach = min(3 * points, len(indices))  # among so many, one is not taken yet
    taken: dict[int, str] = {}
    for number in range(points):
        for kind, sign in (("most helpful", 1.0), ("most harmful", -1.0)):
            best = (sign * means[number % queries]).topk(reach)
            ends = indices[best.indices[best.values > 0]].tolist()
            taken |= dict.fromkeys([index for index in ends if index not in taken][:1], kind)
        taken |= dict.fromkeys([index for index in shuffled if index not in taken][:1], "random")
    return list(taken.items())


def _iterations(condition_number: float, tolerance: float) -> int:
    """Of conjugate gradients, where the spectrum does not help them: half of √κ for every factor of e."""
    return 4 + math.ceil(0.5 * math.sqrt(1 + condition_number) * math.log(2 / tolerance))


# --- was the batch large enough? -----------------------------------------------------------------------------


def _measure_batches(job: _Job) -> Check:
    """Measure the constant C anew, on batches as large as the solver's."""
    gnh, share = job.gnh, _SHARES["batch"] * job.left
    if job.result.solve.certificate is not None or job.result.solve.solver == "ekfac":
        return skipped(
            "batch", "the solver went through all of its data in every product, and drew no batches."
        )
    if len(gnh.terms) < 2:
        return skipped("batch", "there is a single training example, and nothing to draw.")
    batch = min(math.ceil(job.drawn), gnh.num_terms)
    pair = 8 * batch * job.pace  # four gradients, and two products of each of two vectors
    per_term = _LANCZOS * job.pace
    fewest, enough = _REALISATIONS
    most, least = min(gnh.num_terms, 4096), min(gnh.num_terms, 2 * batch)
    subset = max(least, min(most, int(min(share / 3, share - fewest * pair) / per_term)))
    pairs = min(int((share - subset * per_term) / pair), enough)
    if pairs < fewest:
        what = f"the fewest measurements that say anything ({fewest})"
        return job.unaffordable("batch", what, least * per_term + fewest * pair)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", WhenceWarning
        )  # estimates that contradict each other: the check says so
        spectrum = estimate_spectrum(
            gnh,
            generator=job.generator("batch"),
            probes=4 * pairs,
            probe_batch=batch,
            terms=subset,
            max_products=_LANCZOS,
        )
    return batch_check(job.result, job.plan, job.drawn, spectrum, pairs)


# --- does fine-tuning agree? ---------------------------------------------------------------------------------


def _fine_tune(job: _Job) -> Check:
    """Fine-tune on the chosen examples, a few at a time, and write down every time what came of it.

    Over all of the data where that fits; else by random batches under the run's own plan, which is noisier and about
    the same objective. A subset of the data would be cheaper still, but its scores are others than the run's.
    """
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
    full = _GRADIENT * gradients * gnh.num_terms * job.pace
    small = _GRADIENT * (_CHAINS * plan.num_steps + 32) * job.drawn * job.pace
    fits = full * len(job.chosen) <= job.left - end
    full_batch = fits or full <= small or any(c.full_batch for c in job.found.comparisons)
    done = [comparison for comparison in job.found.comparisons if comparison.full_batch == full_batch]
    known = {comparison.index for comparison in done}
    todo = [chosen for chosen in job.chosen if chosen[0] not in known]
    cost = full if full_batch else small
    while todo and job.left - len(todo[:3]) * cost >= end:
        begun, turn, todo = time.monotonic(), todo[:3], todo[3:]
        done += _compare(job, turn, 3 * gradients if full_batch else None)
        job.keep(comparisons=done)
        cost = (time.monotonic() - begun) / len(turn)  # measured is better than predicted
    if not done:
        way = f"over all {terms_in(job.result, gnh.num_terms)}" if full_batch else "by random batches"
        return job.unaffordable("fine-tuning", f"fine-tuning on three examples, {way},", 3 * cost)
    return fine_tuning_check(job.result, done, planned=len(job.chosen))


def _compare(job: _Job, turn: Sequence[tuple[int, str]], max_gradients: int | None) -> list[Comparison]:
    """Fine-tune on each of a few examples; over all of the data where ``max_gradients`` is given."""
    gnh, indices, full_batch = job.gnh, [index for index, _ in turn], max_gradients is not None
    response: ProximalResponse | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WhenceWarning)  # what does not converge is counted, and said
            response = pbrf(
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
                micro_batch=job.gnh.micro_batch,
                importance=gnh.terms.importance,
                metric=gnh.network.metric,
            )
    except SolverError:  # it diverged on one of them: which?
        if len(turn) > 1:
            return [comparison for one in turn for comparison in _compare(job, [one], max_gradients)]
    scored = scored_at(job.result, indices)
    scores, errors = scored.mean.double(), scored.half_width(0.95).double()
    found, reach = torch.zeros_like(scores), torch.zeros_like(scores)
    if response is not None:
        found = response.scores.cpu().nan_to_num(0.0)
        bent = (response.scores - response.linear).abs()
        reach = (2 * response.stderr + bent).cpu().nan_to_num(0.0)
    return [
        Comparison(
            index=index,
            kind=kind,
            converged=response is not None and bool(response.converged[k]),
            full_batch=full_batch,
            influence=tuple(scores[:, k].tolist()),
            influence_error=tuple(errors[:, k].tolist()),
            fine_tuned=tuple(found[:, k].tolist()),
            fine_tuned_error=tuple(reach[:, k].tolist()),
        )
        for k, (index, kind) in enumerate(turn)
    ]


# --- would another damping rank differently? -----------------------------------------------------------------


def _compare_dampings(job: _Job) -> Check:
    result, asked = job.result, min(_QUERIES, len(job.queries))
    if len(result.indices) < 3:
        return skipped("damping", "a ranking to compare needs at least three scored examples.")
    if result.solve.shifted is None:
        return skipped(
            "damping",
            "the solve kept nothing of other dampings. Conjugate gradients do, unless there are very many scores.",
        )
    over = result.over_damping([factor * job.plan.damping for factor in DAMPINGS.values()])
    ranked = [index for index, _ in _choose(result, asked, _RANKED // 3, job.generator("points"))]
    return damping_check(result, over, ranked, queries=asked)


#: How to run each check, in their order.
CHECKS: Mapping[str, Callable[[_Job], Check]] = {
    "batch": _measure_batches,
    "fine-tuning": _fine_tune,
    "damping": _compare_dampings,
}
