"""`attribute`: from a question to the training examples behind the answer.

    queries → way → [factors] → spectrum → damping → plan → solve → score → result

Each step is a function from what is known to one named artifact, which the run directory keeps or gives back. A step
depends on nothing but what the steps before it left there: random numbers start from the seed in each, and finite
differences from the memory that was kept with the artifact before. Spectrum and plan: `whence.attribution.planning`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from whence.arguments import checked
from whence.attribution.asked import Asked, ask, check_unchanged
from whence.attribution.budget import choose_way
from whence.attribution.damping import Weighed, in_metric, weigh
from whence.attribution.exhibits import Describe, describer
from whence.attribution.groups import Grouping, measure_norms, named_groups
from whence.attribution.identity import question_identity, recognise
from whence.attribution.job import Candidates, Job, check_own_solver, query_terms, scored_positions
from whence.attribution.planning import SCALE, Planned, make_factors, make_plan, measure_spectrum, plan_quick
from whence.attribution.ranking import ends_of_rankings, top_is_separated
from whence.attribution.result import Attribution, Solve, load
from whence.attribution.rounding import measure_rounding
from whence.attribution.scored import Scored
from whence.attribution.scores import Scores, directions, score_parts, token_shares
from whence.attribution.several import Models, attribute_several
from whence.errors import OptionError
from whence.model.gauss_newton import GaussNewton
from whence.model.memory import give_back_freed_memory
from whence.model.selection import ParameterFilter
from whence.operators import Damped, failures_become_typed
from whence.options import Budget, Options, Until, chosen_options, takes
from whence.progress import Stopwatch
from whence.runs import Run, environment
from whence.runs.files import given_path
from whence.scoring import Scorer
from whence.solvers import Solver, Statistics
from whence.tasks import LanguageModeling, Questions, Task
from whence.threads import one_at_a_time
from whence.training import Training
from whence.vectors import ParamVector

__all__ = ["attribute"]

#: What rounds of solving may cost together, in first ones.
_ROUNDS = 8.0


@takes(Options)
@one_at_a_time
@failures_become_typed()
@checked("model", "task", "params", "candidates", "run_dir", "options")
def attribute(
    model: nn.Module | Models,
    train: Any,
    queries: Any,
    *,
    task: Task,
    params: ParameterFilter | None = None,
    contrast: Sequence[Any] | None = None,
    query_groups: Sequence[str | None] | None = None,
    measure: str | None = None,
    reduce: str | None = None,
    groups: str | Sequence[Hashable | None] | None = None,
    candidates: Candidates | None = None,
    describe: Describe | None = None,
    tokenizer: Any = None,
    class_names: Sequence[str] | None = None,
    training: Any = None,
    run_dir: str | Path | None = None,
    on_run: Callable[[Run], None] | None = None,
    options: Options | None = None,
    **given: Any,
) -> Attribution:
    """Which training examples made the model say this, and how sure are we?

    Args:
        model: any module in evaluation mode; it is not modified. Or several checkpoints, other seeds or points of one
            training: a list of modules or of functions that make them, or such by name. Scores are then the means of
            theirs, with the spread between them in every error (docs/checkpoints.md).
        train: its training data, a map-style data set of ``(x, y)`` or dicts with ``input_ids``. Read as it is
            needed, never held in memory.
        queries: examples whose loss is to be explained: a sequence like the training data, such as
            ``[task.query(prompt, completion)]``; or `whence.Questions`, which `contrast`, `query_groups`, `measure` and
            `reduce` make of them.
        task: what the model's outputs mean.
        params: which parameters: a predicate on names or glob patterns; all trainable ones by default.
        contrast: for every query another label, or the tokens of another completion: "why A rather than B?" in the
            place of "why A?".
        query_groups: for every query the name of its group: one question about the mean over each group.
        measure: "loss", or "margin" for the log-odds log(p / (1 - p)) of the label.
        reduce: "mean" over a query's terms (tokens), or "sum".
        groups: for every training example the name of a group that it belongs to (None for none), or a field of the
            data that says so: `Attribution.groups` has the effects of leaving out each.
        candidates: score only these: positions, or a shortlist of `whence.sources.candidates`. The result says what was
            left out. The solve is about all of the data in any case.
        describe: what to show of an example: ``(example, index) -> Exhibit``. By default the data's own
            ``exhibit(index)`` where there is one, else a guess from tokens, pictures and labels.
        tokenizer: turns tokens into words on the page.
        class_names: labels in words on the page.
        training: how the model was trained, which tells how much damping is right: the optimizer after training, its
            ``state_dict()``, a checkpoint of `transformers.Trainer`, or numbers; see `whence.training.Training.read`.
            Of several checkpoints a list, with one for each.
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
    check_own_solver(own, chosen)
    place = None if run_dir is None else given_path(run_dir, "run_dir")
    if isinstance(model, (list, tuple, Mapping)):
        if own is not None and own.made_for() is not None:
            raise OptionError(
                "the solver’s plan is of one model; leave it to each checkpoint to find its own"
            )
        each = partial(
            attribute,
            train=train,
            queries=queries,
            task=task,
            params=params,
            contrast=contrast,
            query_groups=query_groups,
            measure=measure,
            reduce=reduce,
            groups=groups,
            candidates=candidates,
            describe=describe,
            tokenizer=tokenizer,
            class_names=class_names,
            options=chosen,
            **({} if own is None else {"solver": own}),
        )
        show = describer(train, describe, tokenizer, class_names)
        return attribute_several(each, model, training, options=chosen, place=place, on_run=on_run, show=show)
    gnh = GaussNewton(
        cast(nn.Module, model),  # what is none is refused there
        task,
        train,
        params=params,
        product=chosen.product,  # type: ignore[arg-type]  # checked
        micro_batch=chosen.micro_batch,
    )
    positions, not_scored = scored_positions(candidates, len(gnh.terms))
    asked_for = {"contrast": contrast, "groups": query_groups, "measure": measure, "reduce": reduce}
    questions = Questions.of(queries, **{name: what for name, what in asked_for.items() if what is not None})
    parts, terms = query_terms(questions, gnh)
    grouping = None if groups is None else Grouping.by(named_groups(groups, train), len(gnh.terms))
    recipe = None if training is None else Training.read(training, gnh.network.model)
    job = Job(
        gnh=gnh,
        questions=questions,
        parts=parts,
        terms=terms,
        positions=positions,
        not_scored=not_scored,
        identity=question_identity(gnh, questions, positions, solver=own, training=recipe, grouping=grouping),
        options=chosen,
        own_solver=own,
        show_query=describer(questions.queries, None, tokenizer, class_names),
        show_example=describer(train, describe, tokenizer, class_names),
        class_names=class_names,
        tokenizer=tokenizer,
        training=recipe,
        grouping=grouping,
    )
    job.show_query(0)  # what cannot be shown at the end is told before the work
    job.show_example(int(gnh.terms.indices[positions[0]]))
    ranks = gnh.network.ranks
    ranks.agree("what was asked", (sorted(job.identity.items()), sorted(chosen.saved().items(), key=str)))
    with Run(place, chosen.saved(), identity=job.identity, shards=gnh.network.shards) as run:
        recognise(run, gnh)
        if on_run is not None:
            on_run(run)
        if run.path is not None and run.has("result"):
            finished = run.path
            return run.told(lambda: load(finished))
        clock = Stopwatch(after=give_back_freed_memory)
        with clock.phase("queries"):
            job = in_metric(run, job)
            asked = ask(run, job)
            way = choose_way(run, job)
        with clock.phase("factors"):
            factors = make_factors(run, job, way)
        with clock.phase("spectrum"):
            spectrum = measure_spectrum(run, job, factors)
            standing_in = None if factors is None else factors.with_scale(SCALE)
            weighed = weigh(run, job, asked.gradients, spectrum, halves=not way.factored, factors=standing_in)
        first: Scores | None = None
        if factors is not None:
            planned = plan_quick(job, way, factors, spectrum, weighed.damping)
            with clock.phase("solve"):
                solved = solve(run, job, planned, asked, 0, None)
            with clock.phase("scores"):
                first = score(run, job, planned, asked, 0, solved, None)
            run.journal("solve-0", planned.solver.state_type).clear()
            with clock.phase("page"):
                name = "quick" if way.solved else "result"
                answer = conclude(run, name, job, weighed, planned, asked, solved, first, "", clock)
            if not way.solved:
                return answer
        planned = make_plan(run, job, way, factors, spectrum, weighed.damping)
        number = 0
        solution: Solved | None = None
        scores, said = first, None
        while solution is None or scores is None or said is None:
            number += 1
            with clock.phase("solve"):
                solution = solve(run, job, planned, asked, number, solution)
            with clock.phase("scores"):
                scores = score(run, job, planned, asked, number, solution, scores)
            said = enough(job, planned, number, solution, scores)
        for earlier in range(1, number + 1):  # the ways there are not needed any more
            run.journal(f"solve-{earlier}", planned.solver.state_type).clear()
        with clock.phase("page"):
            return conclude(run, "result", job, weighed, planned, asked, solution, scores, said, clock)


# --- solve ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Solved:
    """What solving found, all rounds together.

    Attributes:
        chains: independent estimates of the solution, a block of all queries each.
        stats: how the solver fared.
        first_terms: that the first round went through.
    """

    chains: tuple[ParamVector, ...]
    stats: Statistics
    first_terms: int


def solve(run: Run, job: Job, planned: Planned, asked: Asked, number: int, before: Solved | None) -> Solved:
    """One more round of solving: independent chains, joined with those before, or the same solve gone on with."""
    solver, device, name = planned.solver, job.device, f"solution-{number}"
    computed: Solved | None = None
    if not run.has(name):
        seconds, state = job.options.checkpoint_seconds, None
        if number > 1 and not solver.independent:
            state = run.journal(f"solve-{number - 1}", solver.state_type, device=device).restore()
        solution = solver.further(number - 1).solve(
            Damped(job.gnh, planned.plan.damping),
            asked.gradients,
            generator=job.options.generator(2 if number == 1 else 99 + number),
            journal=run.journal(f"solve-{number}", solver.state_type, seconds=seconds, device=device),
            state=state,
        )
        first = solution.num_term_products if before is None else before.first_terms
        computed = Solved(solution.chains, solution.stats, first)
    # None only where the run has it
    found = run.keep(name, Solved, lambda: cast(Solved, computed), operator=job.gnh, device=device)
    if before is None or not solver.independent:
        return found
    stats = found.stats.joined(before.stats, number - 1)
    return Solved(before.chains + found.chains, stats, found.first_terms)


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
    kept = 0 if before is None or not planned.solver.independent else len(before.chains)
    fresh = solved.chains[kept:]
    scorer = Scorer(
        job.gnh,
        directions(fresh, asked.plain(job) if job.options.baseline and before is None else None),
        method=job.options.method,  # type: ignore[arg-type]  # checked
        norms=(job.options.norms or solved.stats.certificate is not None)
        and (before is None or before.norms is None),
        exact=job.options.norms,
    )
    found = score_parts(run, f"scores-{number}", scorer, job, chains=len(fresh))
    if before is None:
        return found
    chains = torch.cat([before.chains[:kept], found.chains])
    return replace(before, chains=chains, norms=before.norms if found.norms is None else found.norms)


def enough(job: Job, planned: Planned, rounds: int, solved: Solved, scores: Scores) -> str | None:
    """None where another round is needed; else what came of ``until``, in words."""
    if job.options.until is None:
        return ""
    until, stats = Until.parse(job.options.until), solved.stats
    scored = Scored.of(scores.chains, stats, scores.norms, planned.plan.spectrum)
    separated = top_is_separated(scored, until.k, until.confidence)
    queries, done = len(separated), int(separated.sum())
    after = f"after {rounds} round{'' if rounds == 1 else 's'} of solving"
    if done == queries:
        whose = "the query" if queries == 1 else f"all {queries} queries"
        return (
            f"The {until.k} most helpful examples of {whose} are separated from the rest at a confidence of "
            f"{until.confidence:g}, {after}."
        )
    spent, first = stats.num_term_products, solved.first_terms
    following = first if planned.solver.independent else spent / max(1, stats.num_products)
    if stats.exhausted:
        ended = "No further iteration can make the solution better in this precision"
    elif spent + following > (Budget.parse(job.options.budget).multiple or _ROUNDS) * first:
        ended = "The budget ended"
    else:
        return None
    return (
        f"{ended} {after}: the {until.k} most helpful examples are separated from the rest at a "
        f"confidence of {until.confidence:g} for {done} of {queries} queries, not for the others."
    )


# --- result --------------------------------------------------------------------------------------------------


def conclude(
    run: Run,
    name: str,
    job: Job,
    weighed: Weighed,
    planned: Planned,
    asked: Asked,
    solved: Solved,
    scores: Scores,
    said: str,
    clock: Stopwatch,
) -> Attribution:
    """The result, with what its page shows of the examples at the ends of the rankings."""
    check_unchanged(job, asked)
    gnh, stats = job.gnh, solved.stats
    ends = ends_of_rankings(scores.chains, scores.dots, job.options.shown)
    tokens = {}
    if isinstance(gnh.task, LanguageModeling):
        wanted = [sorted(int(job.positions[position]) for position in end) for end in ends]
        tokens = token_shares(gnh, solved.chains, wanted)
    shown = {int(scores.indices[position]) for end in ends for position in end}
    if scores.norms is not None:
        units = ends_of_rankings(scores.chains / scores.norms.clamp_min(1e-300), None, job.options.shown)
        shown |= {int(scores.indices[position]) for end in units for position in end}
    exhibits = {index: job.show_example(index) for index in sorted(shown)}
    events = (*planned.drawn, *stats.events, *([said] if said else []))
    grouping = job.grouping
    if grouping is not None and stats.certificate is not None:
        named = grouping
        grouping = run.keep("groups", Grouping, lambda: measure_norms(gnh, named, job.positions))
    known = {**vars(stats), "plan": stats.plan or planned.plan, "events": events}
    result = Attribution(
        chain_scores=scores.chains,
        indices=scores.indices,
        terms=scores.terms,
        num_examples=len(gnh.terms),
        num_terms=gnh.num_terms,
        dot_products=scores.dots,
        query_losses=asked.losses,
        query_products=torch.stack([chain.gram(asked.gradients).T for chain in solved.chains]).cpu(),
        query_dots=asked.gradients.gram(asked.plain(job)).cpu(),
        solve=Solve(
            **known,
            choice=planned.choice,
            by_curvature=bool(planned.drawn),
            damping_words=weighed.words,
            in_metric=gnh.network.metric is not None,
            limited=planned.limited,
        ),
        queries=asked.exhibits,
        exhibits=exhibits,
        token_scores=tokens,
        not_scored=job.not_scored,
        score_method=scores.method,
        title=job.options.title,
        settings={**job.options.saved(), **job.identity},
        versions=environment(),
        seconds=clock.seconds,
        norms=scores.norms,
        stability=weighed.stability,
        rounding=measure_rounding(gnh, solved.chains[0], job.positions, scores.chains[0]),
        grouping=grouping,
    )
    return run.keep(name, Attribution, lambda: result)
