"""`clean`: which training examples look like mistakes?

    spectrum → curvature (a low-rank approximation) → bounds → readings (one pass over the data) → scale → result

The same machinery as `whence.attribution.pipeline`: each step is a function from what is known to one artifact that the
run directory keeps or gives back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence.arguments import checked
from whence.attribution.exhibits import Describe, class_name, describer
from whence.attribution.identity import operator_identity, recognise
from whence.attribution.job import query_terms
from whence.attribution.pipeline import attribute
from whence.attribution.scored import half_width
from whence.attribution.scores import check_examples, keep_parts, part_of_minute
from whence.cleaning.result import Cleaning, Harm
from whence.distributed import one_process
from whence.errors import RunDirectoryError
from whence.exhibit import Exhibit
from whence.model.gauss_newton import GaussNewton
from whence.model.selection import ParameterFilter
from whence.operators import LinearOperator, failures_become_typed
from whence.options import CleanOptions, chosen_options, takes
from whence.preconditioners import LowRank, nystrom
from whence.preconditioners.low_rank import check_rank
from whence.progress import Stopwatch
from whence.runs import Run, environment, read
from whence.runs.files import REMEDY, given_path
from whence.scoring.bounds import AT_ONCE, RANK, Bounds, affordable_rank, measure_bounds
from whence.scoring.cost import count_work
from whence.scoring.self_influence import Calibration, Readings, SelfInfluence, calibrate, read_examples
from whence.solvers.plan import resolve_damping
from whence.spectrum import Spectrum, estimate_spectrum
from whence.tasks import Task
from whence.threads import one_at_a_time

__all__ = ["clean"]


@takes(CleanOptions)
@one_at_a_time
@failures_become_typed()
@checked("model", "task", "params", "run_dir", "options")
def clean(
    model: nn.Module,
    train: Any,
    *,
    task: Task,
    queries: Any = None,
    params: ParameterFilter | None = None,
    describe: Describe | None = None,
    tokenizer: Any = None,
    class_names: Sequence[str] | None = None,
    run_dir: str | Path | None = None,
    options: CleanOptions | None = None,
    **given: Any,
) -> Cleaning:
    """Rank the training examples by how much each looks like a mistake: a wrong label, or an odd one out.

    Args:
        model: any module in evaluation mode; it is not modified.
        train: its training data, a map-style data set of ``(x, y)`` or dicts with ``input_ids``.
        task: what the model's outputs mean.
        queries: examples that the model should get right, such as a validation set. Then the examples are also ranked
            by the harm they do to these together, as `attribute` finds it: each query is solved for, so a few dozen are
            better than thousands.
        params: which parameters: a predicate on names or glob patterns; all trainable ones by default.
        describe: what to show of an example: ``(example, index) -> Exhibit``; as for `attribute`.
        tokenizer: turns tokens into words on the page.
        class_names: labels in words.
        run_dir: a directory that makes the run resumable.
        options: all options at once; those given by keyword go before.
        **given: any of these options.

            {options}

    Example:
        >>> from whence import Classification
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(2, 3).eval()
        >>> train = [(torch.randn(2), i % 3) for i in range(30)]
        >>> result = clean(model, train, task=Classification())
        >>> first = result.top(1)[0]
        >>> first.low <= first.self_influence <= first.high
        True
    """
    one_process("clean")
    chosen = chosen_options(CleanOptions, options, given)
    place = None if run_dir is None else given_path(run_dir, "run_dir")
    gnh = GaussNewton(
        model,
        task,
        train,
        params=params,
        product=chosen.product,  # type: ignore[arg-type]  # checked
        micro_batch=chosen.micro_batch,
    )
    if chosen.rank is not None:
        check_rank(gnh, 1.0, chosen.rank)
    if queries is not None:
        query_terms(queries, gnh)  # refused before anything is measured
    show = describer(train, describe, tokenizer, class_names)
    show(0)  # what cannot be shown at the end is told before the work
    identity, clock, earlier = operator_identity(gnh), Stopwatch(), dict[str, float]()
    with Run(place, {"command": "clean", **chosen.saved()}, identity=identity) as run:
        recognise(run, gnh)
        if run.path is not None and run.has("cleaning"):  # its numbers are read, and took what they took then
            earlier = dict(read(run.path, "cleaning", Cleaning).seconds)
        with clock.phase("spectrum"):
            spectrum = measure(run, gnh, chosen)
        found = measure_self_influence(run, gnh, chosen, spectrum, clock)
        harm = None
        if queries is not None:
            with clock.phase("harm to the queries"):
                harm = measure_harm(run, gnh, train, queries, found.damping, params, chosen)
        with clock.phase("page"):
            result = Cleaning(
                found=found,
                by=chosen.by,
                ids=_ids(train),
                labels=_words(found.labels, class_names),
                predictions=_words(found.predictions, class_names),
                exhibits={},
                shown=chosen.shown,
                lambda_max=spectrum.lambda_max,
                harm=harm,
                term="token" if task.terms_per_example is None else "example",
                title=chosen.title,
                settings={
                    **chosen.saved(),
                    **identity,
                    "queries": 0 if queries is None else len(queries),
                    "by": chosen.by,
                },
                versions=environment(),
                seconds={**clock.seconds, **earlier},
            )
            result = _with_exhibits(result, show)
        # There may be one of the same numbers, ranked by something else.
        return run.put("cleaning", Cleaning, result)


# --- numbers -------------------------------------------------------------------------------------------------


def measure(run: Run, gnh: GaussNewton, options: CleanOptions) -> Spectrum:
    """The spectrum, which damping follows from."""
    measured = partial(
        estimate_spectrum,
        gnh,
        generator=options.generator(1),
        terms=options.spectrum_terms,
        measure_constant=False,
    )
    return run.keep("spectrum", Spectrum, measured, operator=gnh)


def measure_self_influence(
    run: Run, gnh: GaussNewton, options: CleanOptions, spectrum: Spectrum, clock: Stopwatch
) -> SelfInfluence:
    """Self-influence of all examples."""
    if run.path is not None and run.has("self-influence"):
        run.drop("curvature")  # where the run was killed just before it did
        return read(run.path, "self-influence", SelfInfluence)
    size = run.keep("size", Size, lambda: Size.affordable(gnh, options))
    if (
        size.rank > (options.rank or RANK) or size.at_once > AT_ONCE
    ):  # before memory is taken on a file's word
        raise RunDirectoryError(f"{run.path} asks for {size}, more than was ever asked for. {REMEDY}")
    operator: LinearOperator = gnh  # H over all terms, or over the same subset in every step
    if options.spectrum_terms < gnh.num_terms:
        operator = gnh.subset(options.spectrum_terms, options.generator(10))
    with clock.phase("curvature"):
        P = run.keep(
            "curvature",
            LowRank,
            lambda: nystrom(
                operator,
                resolve_damping(options.damping, spectrum, rounding=gnh.rounding),
                rank=size.rank,
                generator=options.generator(11),
                at_once=size.at_once,
            ),
            operator=gnh,
            device=gnh.network.device,
        )
        bounds = run.keep(
            "bounds",
            Bounds,
            lambda: measure_bounds(P, operator, generator=options.generator(12)),
            operator=gnh,
        )
    with clock.phase("examples"):
        parts = keep_parts(
            run,
            "readings",
            torch.arange(len(gnh.terms)),
            size.part,
            lambda part, tick: read_examples(gnh, P, part, tick=tick).columns(),
            saying="self-influence of training examples",
        )
        readings = Readings.join([Readings.from_columns(part) for part in parts])
        check_examples(run, "readings", readings.indices, torch.arange(len(gnh.terms)))
    with clock.phase("scale"):
        random, solves = options.generator(13), options.exact_solves
        scale = run.keep(
            "scale",
            Scale,
            lambda: Scale(
                calibrate(gnh, P, operator, readings, generator=random, solves=solves) if solves else None
            ),
            operator=gnh,
        )
    found = SelfInfluence.from_readings(
        readings, bounds, scale.calibration, num_terms=gnh.num_terms, damping=P.damping, rank=P.rank
    )
    found = run.keep("self-influence", SelfInfluence, lambda: found)
    run.drop("curvature")  # as large as the model times the rank, and not needed any more
    return found


@dataclass(frozen=True)
class Size:
    """What depends on the machine's memory and speed; written down, so that a run is gone on with as it was begun.

    Attributes:
        rank: of the approximation.
        at_once: columns that its products take together.
        part: examples in a part of the pass.
    """

    rank: int
    at_once: int
    part: int

    def __post_init__(self) -> None:
        if min(self.rank, self.at_once, self.part) < 1:
            raise ValueError(f"{self} holds numbers below 1")

    @staticmethod
    def affordable(gnh: GaussNewton, options: CleanOptions) -> Size:
        """As asked for, or as much as there is room for."""
        rank, at_once = affordable_rank(gnh) if options.rank is None else (options.rank, AT_ONCE)
        part = options.part_size
        if part is None:
            part = part_of_minute(count_work(gnh).gradients(rank))
        return Size(rank, at_once, part)


@dataclass(frozen=True)
class Scale:
    """What exact solves say of the approximation, where there were any."""

    calibration: Calibration | None


# --- harm ----------------------------------------------------------------------------------------------------


def measure_harm(
    run: Run,
    gnh: GaussNewton,
    train: Any,
    queries: Any,
    damping: float,
    params: ParameterFilter | None,
    options: CleanOptions,
) -> Harm:
    """Scores added up over the queries, as `attribute` finds them in a run of its own inside this one."""
    result = attribute(
        gnh.network.model,
        train,
        queries,
        task=gnh.task,
        params=params,
        damping=damping,
        product=options.product,
        baseline=False,
        shown=1,
        seed=options.seed,
        micro_batch=options.micro_batch,
        spectrum_terms=options.spectrum_terms,
        run_dir=run.inside("attribution"),
    )
    scores = result.scores.sum(0)
    # Chains are independent of each other, queries of one chain are not: their sum is taken before its spread. Errors
    # that are bounds, of a solver without chains, add up at worst.
    spread = result.stderr.sum(0)
    if len(result.chain_scores) > 1:
        added = result.chain_scores.sum(1)
        spread = torch.empty_like(scores)
        spread[result.indices] = added.std(0) / len(added) ** 0.5
    width = half_width(spread, result.degrees_of_freedom, 0.95)
    converged = bool(result.solve.converged.all())
    return Harm(scores, scores - width, scores + width, len(queries), converged, result.doubts)


# --- what stands beside the numbers --------------------------------------------------------------------------


def _ids(train: Any) -> tuple[str, ...]:
    """The examples' own names where the data know them, else their positions."""
    own = getattr(train, "id", None)
    return tuple(str(own(index)) if callable(own) else str(index) for index in range(len(train)))


def _words(classes: Tensor, names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Classes in words; None where there are none."""
    if bool((classes < 0).any()):
        return None
    return tuple(class_name(k, names) for k in classes.tolist())


def _with_exhibits(result: Cleaning, show: Callable[[int], Exhibit]) -> Cleaning:
    """What to show of the first of every ranking; an exhibit's own id is the example's name."""
    wanted = {suspect.index for suspect in result.top(result.shown)}
    if result.harm is not None:
        wanted |= {suspect.index for suspect in result.most_harmful(result.shown)}
    exhibits = {index: show(index) for index in sorted(wanted)}
    ids = list(result.ids)
    for index, exhibit in exhibits.items():
        ids[index] = exhibit.id or ids[index]
    return replace(result, exhibits=exhibits, ids=tuple(ids))
