"""`attribute`: from a question to the training examples behind the answer.

    queries → spectrum → plan → solve → score → result

Each step is a function from what is known to one named artifact, which the run directory keeps or gives back. A step
depends on nothing but what the steps before it left there: random numbers start from the seed in each, and finite
differences from the memory that was kept with the artifact before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence.attribution.cost import count_passes, curvature_pays
from whence.attribution.exhibits import Describe, describer
from whence.attribution.ranking import rank_examples, top_is_separated
from whence.attribution.result import Attribution, Solve, load
from whence.attribution.scored import Scored
from whence.attribution.scores import Scores, directions, score_parts
from whence.errors import DataError, OptionError
from whence.exhibit import Exhibit
from whence.model.data import TermSet
from whence.model.gauss_newton import GaussNewton
from whence.model.importance import Importance, measure_importance
from whence.model.memory import half_of_memory
from whence.model.selection import ParameterFilter
from whence.operators import Damped
from whence.options import Options, Until, chosen_options, takes
from whence.preconditioners import LowRank, nystrom
from whence.progress import Stopwatch, track
from whence.runs import Run, environment
from whence.runs.fingerprint import of_data, of_model, of_value
from whence.scoring import Scorer
from whence.solvers import Solver, Statistics
from whence.solvers.auto import Alternative, Choice, choose, make_solver
from whence.solvers.plan import Plan
from whence.sources.candidates import Shortlist
from whence.spectrum import Spectrum, estimate_spectrum
from whence.tasks import LanguageModeling, Task
from whence.tasks.categorical import CategoricalTask
from whence.vectors import ParamVector

__all__ = ["Candidates", "attribute", "operator_identity"]

#: Positions, or a shortlist that says how it was chosen.
Candidates = Shortlist | Sequence[int] | Tensor


@takes(Options)
def attribute(
    model: nn.Module,
    train: Any,
    queries: Any,
    *,
    task: Task,
    params: ParameterFilter | None = None,
    candidates: Candidates | None = None,
    describe: Describe | None = None,
    tokenizer: Any = None,
    class_names: Sequence[str] | None = None,
    run_dir: str | Path | None = None,
    on_run: Callable[[Run], None] | None = None,
    options: Options | None = None,
    **given: Any,
) -> Attribution:
    """Which training examples made the model say this, and how sure are we?

    Args:
        model: any module in evaluation mode; it is not modified.
        train: its training data, a map-style data set of ``(x, y)`` or dicts with ``input_ids``. Read as it is
            needed, never held in memory.
        queries: examples whose loss is to be explained: a sequence like the training data, such as
            ``[task.query(prompt, completion)]``.
        task: what the model's outputs mean.
        params: which parameters: a predicate on names or glob patterns; all trainable ones by default.
        candidates: score only these: positions, or a shortlist of `whence.sources.candidates`. The result says what was
            left out. The solve is about all of the data in any case.
        describe: what to show of an example: ``(example, index) -> Exhibit``. By default the data's own
            ``exhibit(index)`` where there is one, else a guess from tokens, pictures and labels.
        tokenizer: turns tokens into words on the page.
        class_names: labels in words on the page.
        run_dir: a directory that makes the run resumable: the same call goes on where it was interrupted, and
            ends in the same numbers.
        on_run: called with the run once its directory is open, to keep something there.
        options: all options at once; those given by keyword go before. ``solver`` may also be a `Solver` of your own.
        **given: any of these options.

            {options}

    Example:
        >>> from whence import Classification
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(2, 3).eval()
        >>> train = [(torch.randn(2), i % 3) for i in range(30)]
        >>> result = attribute(model, train, train[:1], task=Classification())
        >>> result.scores.shape
        torch.Size([1, 30])
        >>> best = result.top(1)[0]
        >>> best.low < best.score < best.high
        True
    """
    own = given.pop("solver") if isinstance(given.get("solver"), Solver) else None
    chosen = chosen_options(Options, options, given)
    _check_own_solver(own, given)
    gnh = GaussNewton(
        model,
        task,
        train,
        params=params,
        product=chosen.product,  # type: ignore[arg-type]  # checked
        micro_batch=chosen.micro_batch,
    )
    positions, not_scored = _choose(candidates, len(gnh.terms))
    job = Job(
        gnh=gnh,
        queries=_questions(queries, gnh),
        positions=positions,
        not_scored=not_scored,
        options=chosen,
        own_solver=own,
        show_query=describer(queries, None, tokenizer, class_names),
        show_example=describer(train, describe, tokenizer, class_names),
        class_names=class_names,
    )
    with Run(run_dir, chosen.saved(), identity=job.identity()) as run:
        if on_run is not None:
            on_run(run)
        if run.path is not None and run.has("result"):
            return load(run.path)
        clock = Stopwatch()
        with clock.phase("queries"):
            asked = ask(run, job)
        with clock.phase("spectrum"):
            measured = measure(run, job)
            plan = make_plan(run, job, measured)
        solved: Solved | None = None
        scores: Scores | None = None
        for number in count(1):
            with clock.phase("solve"):
                solved = solve(run, job, plan, asked, number, solved)
            with clock.phase("scores"):
                scores = score(run, job, plan, asked, number, solved, scores)
            ended, said = enough(job, plan, solved, scores, number)
            if ended:
                break
        assert solved is not None
        assert scores is not None
        for earlier in range(1, number + 1):  # the ways there are not needed any more
            run.journal(f"solve-{earlier}", plan.solver.state_type).clear()
        with clock.phase("page"):
            return conclude(run, job, plan, asked, solved.telling(said), scores, clock)


# --- what is asked -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Everything that the steps work on, checked."""

    gnh: GaussNewton
    queries: TermSet
    positions: Tensor
    not_scored: str
    options: Options
    own_solver: Solver[Any] | None
    show_query: Callable[[int], Exhibit]
    show_example: Callable[[int], Exhibit]
    class_names: Sequence[str] | None

    def identity(self) -> dict[str, str]:
        """What the run is about, for recognising its directory."""
        return {
            **operator_identity(self.gnh),
            "queries": f"{len(self.queries)} {of_data(self.queries.data)}",
            "candidates": f"{len(self.positions)} {of_value(self.positions)}" if self.not_scored else "all",
            "own solver": "" if self.own_solver is None else repr(self.own_solver),
        }

    @property
    def device(self) -> torch.device:
        """Where vectors live."""
        return self.gnh.network.device


def operator_identity(gnh: GaussNewton) -> dict[str, str]:
    """Which model, task, data and parameters a run is about."""
    names = list(gnh.network.parameters)
    return {
        "model": f"{type(gnh.network.model).__name__} {of_model(gnh.network.model)}",
        "task": type(gnh.task).__name__,
        "train": f"{len(gnh.terms)} examples {of_data(gnh.terms.data)}",
        "params": f"{len(names)} tensors, {gnh.num_parameters} parameters {of_value(names)}",
    }


def _check_own_solver(solver: Solver[Any] | None, given: dict[str, Any]) -> None:
    plan = None if solver is None else solver.made_for()
    if plan is None:
        return
    if given.get("damping", "auto") not in ("auto", plan.damping):
        raise OptionError(
            f"damping is {given['damping']}, the solver's plan was made for {plan.damping}; give one of them"
        )
    if plan.chains < 2:
        raise OptionError(
            f"chains is {plan.chains}; error bars need at least 2 independent chains (4 by default)"
        )


def _questions(queries: Any, gnh: GaussNewton) -> TermSet:
    if isinstance(queries, (dict, tuple, Tensor, nn.Module)):
        raise DataError(
            f"queries are a {type(queries).__name__}; give a list of examples, even if there is only one: [query]"
        )
    try:
        terms = TermSet(queries, gnh.task, gnh.network.device)
    except DataError as error:
        raise DataError(f"the queries cannot be used: {error}") from error
    terms.width = gnh.terms.width
    limit = _context(gnh.network.model) if isinstance(gnh.task, LanguageModeling) else None
    if limit is not None:
        for number in range(len(terms)):
            length = terms.fetch(torch.tensor([number])).targets.shape[1]
            if length > limit:
                raise DataError(
                    f"query {number} has {length} tokens, the model's context holds {limit}; shorten its prompt"
                )
    return terms


def _context(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _choose(candidates: Candidates | None, examples: int) -> tuple[Tensor, str]:
    """Positions to score, and what is left out, in words."""
    if candidates is None:
        return torch.arange(examples), ""
    given = candidates.positions if isinstance(candidates, Shortlist) else candidates
    positions = torch.as_tensor(given, dtype=torch.long).flatten().unique()
    if len(positions) == 0:
        raise OptionError("the list of candidates is empty; give at least one, or None for all examples")
    if int(positions[0]) < 0 or int(positions[-1]) >= examples:
        wrong = int(positions[0]) if int(positions[0]) < 0 else int(positions[-1])
        raise OptionError(
            f"candidate {wrong} does not exist: the training data are numbered 0..{examples - 1}"
        )
    if len(positions) == examples:
        return positions, ""
    if isinstance(candidates, Shortlist):
        return positions, candidates.describe()
    left = f"{len(positions):,} of {examples:,} examples were scored, as asked for; the others have no score"
    return positions, left


# --- queries -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """The queries, ready to be solved for.

    Attributes:
        gradients: right-hand sides, a column each.
        losses: in nats.
        exhibits: what to show of them, with the model's own answer.
    """

    gradients: ParamVector
    losses: Tensor
    exhibits: tuple[Exhibit, ...]


def ask(run: Run, job: Job) -> Asked:
    """Gradients and losses of the queries.

    Raises:
        DataError: a query whose loss is NaN or infinite, or that has no term.
    """

    def compute() -> Asked:
        found = [_ask(job, position) for position in range(len(job.queries))]
        losses = torch.tensor([loss for loss, _ in found], dtype=torch.float64)
        return Asked(job.gnh.gradients(job.queries.data), losses, tuple(exhibit for _, exhibit in found))

    return run.keep("queries", Asked, compute, operator=job.gnh, device=job.device)


def _ask(job: Job, position: int) -> tuple[float, Exhibit]:
    """The loss of a query, and what to show of it."""
    gnh, batch = job.gnh, job.queries.fetch(torch.tensor([position]))
    with torch.no_grad():
        outputs = gnh.network.outputs(batch)
    gnh.task.check(outputs, batch)
    loss = float(gnh.task.query_losses(outputs, batch).sum())
    if not torch.isfinite(torch.tensor(loss)):
        raise DataError(f"the loss of query {position} is {loss}; check its inputs and label")
    exhibit = job.show_query(position)
    if exhibit.prediction is None and isinstance(gnh.task, CategoricalTask) and batch.targets.ndim == 1:
        probabilities = outputs[0].float().softmax(-1)
        best = int(probabilities.argmax())
        known = job.class_names is not None and best < len(job.class_names)
        name = job.class_names[best] if known and job.class_names is not None else str(best)
        exhibit = replace(exhibit, prediction=f"{name} ({float(probabilities[best]):.0%})")
    return loss, exhibit


# --- spectrum ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What is known of the curvature.

    Attributes:
        spectrum: with batches drawn as they will be.
        importance: what they are drawn by; None: all examples alike.
    """

    spectrum: Spectrum
    importance: Importance | None = None


def measure(run: Run, job: Job) -> Measured:
    """The spectrum; from here on batches are drawn by curvature, where that was asked for or pays."""
    plan = None if job.own_solver is None else job.own_solver.made_for()
    asked = job.options.sampling
    importance = _draw_by_curvature(run, job) if asked == "curvature" else None
    if plan is not None:
        return Measured(plan.spectrum, importance)
    spectrum = _measure(run, job, "spectrum")
    stochastic = job.own_solver is None and job.options.solver != "cg"
    if asked == "auto" and stochastic:
        choice = _choice(job, spectrum)
        pays = curvature_pays(
            job.gnh,
            spectrum,
            terms=_wanted(choice, job).terms,
            lissa_terms=choice.of("lissa").terms,
            spectrum_terms=job.options.spectrum_terms,
        )
        if run.keep("drawing", Drawing, lambda: Drawing(pays)).by_curvature:
            importance = _draw_by_curvature(run, job)
            spectrum = _measure(run, job, "spectrum-by-curvature")
    return Measured(spectrum, importance)


@dataclass(frozen=True)
class Drawing:
    """Whether batches are drawn by curvature; written down, since it depends on the machine's memory."""

    by_curvature: bool


def _measure(run: Run, job: Job, name: str) -> Spectrum:
    return run.keep(
        name,
        Spectrum,
        lambda: estimate_spectrum(
            job.gnh, generator=job.options.generator(1), terms=job.options.spectrum_terms
        ),
        operator=job.gnh,
    )


def _draw_by_curvature(run: Run, job: Job) -> Importance:
    importance = run.keep("importance", Importance, lambda: measure_importance(job.gnh))
    job.gnh.terms.draw_by(importance.probabilities())
    return importance


# --- plan ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """How the queries will be solved for.

    Attributes:
        solver: ready to solve.
        plan: LiSSA's, in force or as the alternative; brings spectrum and damping.
        choice: why this solver, in words.
        drawn: how batches are drawn, in words, where that is not uniformly.
    """

    solver: Solver[Any]
    plan: Plan
    choice: str
    drawn: tuple[str, ...]


@dataclass(frozen=True)
class Chosen:
    """The part of a plan that is kept: which solver, why, and LiSSA's numbers."""

    alternative: Alternative
    words: str
    plan: Plan


def make_plan(run: Run, job: Job, measured: Measured) -> Planned:
    """The solver: the user's own, or the one that the rule of `whence.solvers.auto` takes."""
    own = job.own_solver
    if own is not None and (made_for := own.made_for()) is not None:
        return Planned(own, made_for, "", _drawn(measured, own))
    chosen = run.keep("plan", Chosen, lambda: _plan(job, measured.spectrum))
    if own is not None:
        return Planned(own, chosen.plan, "", _drawn(measured, own))
    solver = make_solver(
        chosen.alternative,
        chosen.plan,
        accuracy=float(job.options.accuracy),
        preconditioner=_preconditioner(run, job, chosen),
        # Inexact products must be told from converged ones; exact ones need no further product.
        verify=job.gnh.product != "exact",
    )
    return Planned(solver, chosen.plan, chosen.words, _drawn(measured, solver))


def _plan(job: Job, spectrum: Spectrum) -> Chosen:
    options, choice = job.options, _choice(job, spectrum)
    wanted = _wanted(choice, job)
    plan = Plan.tuned(
        spectrum,
        options.damping,
        num_terms=job.gnh.num_terms,
        chains=options.chains,
        refine=choice.of("lissa").refine if options.refine is None else options.refine,
    )
    return Chosen(wanted, choice.words() if options.solver == "auto" else "", plan)


def _choice(job: Job, spectrum: Spectrum) -> Choice:
    gnh, queries = job.gnh, len(job.queries)
    return choose(
        spectrum,
        job.options.damping,
        num_terms=gnh.num_terms,
        queries=queries,
        accuracy=float(job.options.accuracy),
        chains=job.options.chains,
        passes=count_passes(gnh, queries),
        memory_bytes=half_of_memory(gnh.network.device),
    )


def _wanted(choice: Choice, job: Job) -> Alternative:
    return choice.best if job.options.solver == "auto" else choice.of(job.options.solver)


def _preconditioner(run: Run, job: Job, chosen: Chosen) -> LowRank | None:
    """Where one was chosen: made once, and kept with the run."""
    wanted = chosen.alternative
    if not wanted.rank:
        return None

    def compute() -> LowRank:
        random = job.options.generator(4)
        made = nystrom(
            job.gnh, chosen.plan.damping, rank=wanted.rank, terms=wanted.rank_terms, generator=random
        )
        return made.shrunk()  # or errors could hardly be proven: it was made from a part of the terms

    return run.keep("preconditioner", LowRank, compute, operator=job.gnh, device=job.device)


def _drawn(measured: Measured, solver: Solver[Any]) -> tuple[str, ...]:
    importance = measured.importance
    if importance is None or not solver.independent:  # one that draws nothing
        return ()
    examples = len(importance.curvature)
    top = max(1, examples // 50)
    return (
        f"The model is certain of most of its training data: {top:,} of {examples:,} examples carry "
        f"{importance.share_of_top(top):.0%} of the output curvature. Batches were drawn by curvature.",
    )


# --- solve ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Solved:
    """What a round of solving found.

    Attributes:
        chains: independent estimates of the solution, a block of all queries each.
        stats: how the solver fared.
        first_terms: that the first round went through.
    """

    chains: tuple[ParamVector, ...]
    stats: Statistics
    first_terms: int

    def joined(self, earlier: Solved, rounds: int) -> Solved:
        """This round of independent chains with those before."""
        chains, stats = earlier.chains + self.chains, self.stats.joined(earlier.stats, rounds)
        return Solved(chains, stats, self.first_terms)

    def telling(self, said: str) -> Solved:
        """The same with one more event."""
        return replace(self, stats=replace(self.stats, events=(*self.stats.events, said))) if said else self


def solve(run: Run, job: Job, planned: Planned, asked: Asked, number: int, before: Solved | None) -> Solved:
    """One more round of solving: independent chains, joined with those before, or the same solve gone on with."""
    solver, device = planned.solver, job.device

    def compute() -> Solved:
        seconds = job.options.checkpoint_seconds
        journal = run.journal(f"solve-{number}", solver.state_type, seconds=seconds, device=device)
        state = None
        if number > 1 and not solver.independent:
            state = run.journal(f"solve-{number - 1}", solver.state_type, device=device).restore()
        solution = solver.further(number - 1).solve(
            Damped(job.gnh, planned.plan.damping),
            asked.gradients,
            generator=job.options.generator(2 if number == 1 else 99 + number),
            journal=journal,
            state=state,
        )
        first = solution.num_term_products if before is None else before.first_terms
        return Solved(solution.chains, solution.stats, first)

    found = run.keep(f"solution-{number}", Solved, compute, operator=job.gnh, device=device)
    return found.joined(before, number - 1) if before is not None and solver.independent else found


# --- score ---------------------------------------------------------------------------------------------------


def score(
    run: Run,
    job: Job,
    planned: Planned,
    asked: Asked,
    number: int,
    solved: Solved,
    before: Scores | None,
) -> Scores:
    """Scores along what the round found, together with those of independent rounds before."""
    adds = before is not None and planned.solver.independent
    fresh = solved.chains[len(before.chains) :] if before is not None and adds else solved.chains
    baseline = asked.gradients if job.options.baseline and before is None else None
    certified = solved.stats.certificate is not None
    scorer = Scorer(
        job.gnh,
        directions(fresh, baseline),
        method=job.options.method,  # type: ignore[arg-type]  # checked
        norms=certified and before is None,
    )
    size = job.options.part_size
    found = score_parts(run, f"scores-{number}", scorer, job.positions, size, len(fresh), len(job.queries))
    return found if before is None else found.after(before, adds=adds)


def enough(job: Job, planned: Planned, solved: Solved, scores: Scores, rounds: int) -> tuple[bool, str]:
    """Whether this is the last round, and what came of what was asked for, in words."""
    if job.options.until is None:
        return True, ""
    until, stats = Until.parse(job.options.until), solved.stats
    scored = Scored.of(scores.chains, stats.certificate, scores.norms, planned.plan.spectrum)
    separated = top_is_separated(scored, until.k, until.confidence)
    spent, first = stats.num_term_products, solved.first_terms
    following = first if planned.solver.independent else spent / max(1, stats.num_products)
    ended = ""
    if stats.exhausted:
        ended = "no further iteration can make the solution better in this precision"
    elif spent + following > job.options.budget * first:
        ended = "the budget ended"
    if not bool(separated.all()) and not ended:
        return False, ""
    queries, done = len(separated), int(separated.sum())
    after = f"after {rounds} round{'' if rounds == 1 else 's'} of solving"
    if done == queries:
        whose = "the query" if queries == 1 else f"all {queries} queries"
        return True, (
            f"The {until.k} most helpful examples of {whose} are separated from the rest at a confidence of "
            f"{until.confidence:g}, {after}."
        )
    return True, (
        f"{ended.capitalize()} {after}: the {until.k} most helpful examples are separated from the rest at a "
        f"confidence of {until.confidence:g} for {done} of {queries} queries, not for the others."
    )


# --- result --------------------------------------------------------------------------------------------------


def conclude(
    run: Run, job: Job, planned: Planned, asked: Asked, solved: Solved, scores: Scores, clock: Stopwatch
) -> Attribution:
    """The result, with what its page shows of the examples at the ends of the rankings."""
    gnh, stats = job.gnh, solved.stats
    ends = _ends_of_rankings(scores, job.options.shown)
    tokens = _token_shares(job, solved.chains, ends) if isinstance(gnh.task, LanguageModeling) else {}
    shown = sorted({int(scores.indices[position]) for end in ends for position in end})
    exhibits = {index: job.show_example(index) for index in shown}
    known = {**vars(stats), "plan": stats.plan or planned.plan, "events": (*planned.drawn, *stats.events)}
    result = Attribution(
        chain_scores=scores.chains,
        indices=scores.indices,
        terms=scores.terms,
        num_examples=len(gnh.terms),
        num_terms=gnh.num_terms,
        dot_products=scores.dots,
        query_losses=asked.losses,
        query_products=torch.stack([chain.gram(asked.gradients).T for chain in solved.chains]).cpu(),
        query_dots=asked.gradients.gram(asked.gradients).cpu(),
        solve=Solve(**known, choice=planned.choice, by_curvature=bool(planned.drawn)),
        queries=asked.exhibits,
        exhibits=exhibits,
        token_scores=tokens,
        not_scored=job.not_scored,
        score_method=scores.method,
        title=job.options.title,
        settings={**job.options.saved(), **job.identity()},
        versions=environment(),
        seconds=clock.seconds,
        norms=scores.norms,
    )
    return run.keep("result", Attribution, lambda: result)


def _ends_of_rankings(scores: Scores, shown: int, baseline: int = 5) -> list[list[int]]:
    """For each query, the positions (among the scored) of the examples that its page shows."""
    chosen = []
    for q in range(scores.chains.shape[1]):
        own = Scored(scores.chains[:, q])
        ends = {
            position
            for harmful in (False, True)
            for position, _, _ in rank_examples(own, shown, harmful=harmful, confidence=0.95)
        }
        if scores.dots is not None:
            ends |= set(scores.dots[q].argsort(descending=True, stable=True)[:baseline].tolist())
        chosen.append(sorted(ends))
    return chosen


def _token_shares(
    job: Job, chains: Sequence[ParamVector], ends: list[list[int]]
) -> dict[tuple[int, int], tuple[float, ...]]:
    """Each token's share of the shown scores: (query, position) -> one number per token.

    The prediction of token j + 1 is made at token j, so the first token has none.
    """
    shares: dict[tuple[int, int], tuple[float, ...]] = {}
    for q, end in enumerate(track(ends, "scores of tokens")):
        wanted = sorted(int(job.positions[position]) for position in end)
        mean = ParamVector.mean([chain.column(q) for chain in chains])
        scorer = Scorer(job.gnh, mean, method="directional")
        for position, row in zip(wanted, scorer.term_shares(torch.tensor(wanted)), strict=True):
            shares[q, position] = (0.0, *row[0, :-1].tolist())
    return shares
