"""`clean`: which training examples look like mistakes?

    spectrum → low-rank approximation → its bounds → one pass over the data → a few exact solves → the ranking

Each phase takes from the run directory what is there and computes what is not, as those of `attribute` do::

    spectrum.json bounds.json calibration.json      what each phase found
    curvature.safetensors                           the approximation, until the pass is done
    self-influence/part-00000.parquet …             the pass, in parts
    cleaning.json                                   written last
    attribution/                                    a run of `attribute`, where queries were given
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence.attribution.attribute import attribute
from whence.attribution.cleaning import By, Cleaning, Harm, check_measure
from whence.attribution.exhibits import Describe, exhibit_of
from whence.attribution.saving import spectrum_from_json, spectrum_to_json
from whence.attribution.showing import describer
from whence.attribution.uncertainty import half_width
from whence.data import TermSet
from whence.errors import DataError, OptionError
from whence.exhibit import Exhibit
from whence.gauss_newton import GaussNewton, Product
from whence.operators import LinearOperator
from whence.plan import check_damping, resolve_damping
from whence.preconditioners import LowRank, nystrom
from whence.preconditioners.low_rank import check_rank
from whence.scoring.cost import count_work
from whence.selection import ParameterFilter
from whence.self_influence import (
    Bounds,
    Calibration,
    Readings,
    SelfInfluence,
    affordable_rank,
    calibrate,
    measure_bounds,
    read_examples,
)
from whence.spectrum import Spectrum, estimate_spectrum
from whence.store import Run
from whence.store.fingerprint import of_data, of_model, of_value
from whence.store.readings import ReadingParts
from whence.store.run import environment
from whence.tasks import Task

__all__ = ["clean"]

#: A part of the pass should take about this many flops: a minute or so on a few cores.
_FLOPS_PER_PART = 2e12
_LARGEST_PART = 50_000


@dataclass(frozen=True)
class _Settings:
    """What the numbers depend on; `clean` explains each."""

    damping: float | str
    rank: int | None
    product: Product
    probes: int
    seed: int
    micro_batch: int | None
    lanczos_terms: int
    part_size: int | None

    def __post_init__(self) -> None:
        check_damping(self.damping)
        if self.probes == 1 or self.probes < 0:
            raise OptionError(f"probes is {self.probes}; solve for at least 2 examples, or for none (0)")
        for name in ("lanczos_terms", "part_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} is {value}; it must be at least 1")

    def generator(self, phase: int) -> torch.Generator:
        """Random numbers of one phase; `attribute` measures the same spectrum."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + phase)


def clean(
    model: nn.Module,
    train: Any,
    *,
    task: Task,
    by: By = "self-influence",
    queries: Any = None,
    damping: float | str = "auto",
    rank: int | None = None,
    params: ParameterFilter | None = None,
    product: Product = "auto",
    probes: int = 8,
    shown: int = 100,
    describe: Describe | None = None,
    tokenizer: Any = None,
    class_names: Sequence[str] | None = None,
    title: str = "Which training examples look like mistakes?",
    seed: int = 0,
    micro_batch: int | None = None,
    run_dir: str | Path | None = None,
    part_size: int | None = None,
    lanczos_terms: int = 4096,
) -> Cleaning:
    """Rank the training examples by how much each looks like a mistake: a wrong label, or an odd one out.

    Args:
        model: any module in evaluation mode; it is not modified.
        train: its training data, a map-style data set of ``(x, y)`` or dicts with ``input_ids``.
        task: what the model's outputs mean.
        by: what ranks: ``"self-influence"``, ``"loss"`` or ``"gradient-norm"``. All three are computed and shown.
        queries: examples that the model should get right, such as a validation set. Then the examples are also ranked
            by the harm they do to these together, as `attribute` finds it: each query is solved for, so a few dozen are
            better than thousands.
        damping: λ, ``"auto"`` (λmax/200) or ``"lambda_max/50"``.
        rank: of the approximation; by default 32, or what half of the memory holds.
        params: which parameters: a predicate on names or glob patterns; all trainable ones by default.
        product: how Gauss-Newton products are computed; see `GaussNewton`.
        probes: examples that are solved for exactly, to set the scale; 0: none.
        shown: how many examples of each ranking the page shows.
        describe: what to show of an example: ``(example, index) -> Exhibit``; as for `attribute`.
        tokenizer: turns tokens into words on the page.
        class_names: labels in words.
        title: of the page.
        seed: of all random numbers.
        micro_batch: examples per pass; by default as many as fit.
        run_dir: a directory that makes the run resumable.
        part_size: examples per part written there; by default about a minute's work.
        lanczos_terms: terms of the data that the curvature is measured on, at most.

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
    check_measure(by)
    if shown < 1:
        raise OptionError(f"shown is {shown}; show at least one example")
    settings = _Settings(damping, rank, product, probes, seed, micro_batch, lanczos_terms, part_size)
    gnh = GaussNewton(model, task, train, params=params, product=product, micro_batch=micro_batch)
    if rank is not None:
        check_rank(gnh, 1.0, rank)
    if queries is not None:
        _check_queries(queries, gnh)
    seconds: dict[str, float] = {}
    config = _config(gnh, settings)
    with Run(run_dir, config) as run:
        found, spectrum = _measure(run, gnh, settings, seconds)
        harm = None
        if queries is not None:
            with _timed(seconds, "harm to the queries"):
                harm = _harm(run, gnh, train, queries, found.damping, params, settings)

    def guess(example: Any, index: int) -> Exhibit:
        return exhibit_of(example, index, tokenizer=tokenizer, class_names=class_names)

    with _timed(seconds, "page"):
        result = Cleaning(
            found=found,
            by=by,
            ids=_ids(train),
            labels=_words(found.labels, class_names),
            predictions=_words(found.predictions, class_names),
            exhibits={},
            shown=shown,
            lambda_max=spectrum.lambda_max,
            harm=harm,
            term="token" if task.terms_per_example is None else "example",
            title=title,
            settings={**config, "queries": 0 if queries is None else len(queries), "by": by},
            versions=environment(),
            seconds=seconds,
        )
        own = describer(train, guess) if describe is None else lambda index: describe(train[index], index)
        return _with_exhibits(result, own)


# --- phases ------------------------------------------------------------------------------------------------


def _measure(
    run: Run, gnh: GaussNewton, settings: _Settings, seconds: dict[str, float]
) -> tuple[SelfInfluence, Spectrum]:
    """Self-influence of all examples; what is on disk is read."""
    with _timed(seconds, "spectrum"):
        spectrum = _spectrum(run, gnh, settings)
    damping = resolve_damping(settings.damping, spectrum)
    plan = run.json("rank", lambda: _rank_and_parts(gnh, settings))  # depends on the machine's memory
    parts = list(torch.arange(len(gnh.terms)).split(plan["part_size"]))
    files = None if run.path is None else ReadingParts(run.path / "self-influence")
    large = None if run.path is None else run.path / "curvature.safetensors"
    if run.path is not None and (run.path / "cleaning.json").exists():
        notes = run.json("cleaning", dict)
        assert files is not None
        found = files.read_all(len(parts))
    else:
        with _timed(seconds, "curvature"):
            operator = _operator(gnh, settings)
            P, state = _curvature(run, gnh, operator, damping, plan, settings)

            def bound() -> dict[str, Any]:
                gnh.restore_state(state)
                return asdict(measure_bounds(P, operator, generator=settings.generator(12)))

            measured = run.json("bounds", bound)
        with _timed(seconds, "examples"):
            found = read_examples(gnh, P, parts, store=files)
        with _timed(seconds, "scale"):

            def scale() -> dict[str, Any] | None:
                gnh.restore_state(state)
                return _scale(gnh, P, operator, found, settings)

            scaled = run.json("calibration", scale)
        last = {"rank": P.rank, "bounds": measured, "calibration": scaled, "seconds": dict(seconds)}
        notes = run.json("cleaning", lambda: last)
    seconds.update(notes["seconds"])
    if large is not None:  # as large as the model times the rank, and not needed any more
        large.unlink(missing_ok=True)
    kept = notes["calibration"]
    return (
        SelfInfluence.from_readings(
            found,
            Bounds(**notes["bounds"]),
            None if kept is None else Calibration(**kept),
            num_terms=gnh.num_terms,
            damping=damping,
            rank=notes["rank"],
        ),
        spectrum,
    )


def _spectrum(run: Run, gnh: GaussNewton, settings: _Settings) -> Spectrum:
    def measure() -> dict[str, Any]:
        found = estimate_spectrum(
            gnh,
            generator=settings.generator(1),
            lanczos_terms=settings.lanczos_terms,
            measure_constant=False,
        )
        return {**spectrum_to_json(found), "operator": gnh.state()}

    measured = run.json("spectrum", measure)
    gnh.restore_state(measured["operator"])
    return spectrum_from_json(measured)


def _rank_and_parts(gnh: GaussNewton, settings: _Settings) -> dict[str, int]:
    rank, at_once = affordable_rank(gnh) if settings.rank is None else (settings.rank, 8)
    size = settings.part_size
    if size is None:
        work = count_work(gnh.network, gnh.terms.fetch(gnh.terms.longest(2)), gnh.micro_batch)
        size = min(max(int(_FLOPS_PER_PART / max(work.gradients(rank), 1.0)), 1), _LARGEST_PART)
    return {"rank": rank, "at_once": at_once, "part_size": size}


def _operator(gnh: GaussNewton, settings: _Settings) -> LinearOperator:
    """H over all terms, or over the same subset in every phase."""
    if settings.lanczos_terms >= gnh.num_terms:
        return gnh
    return gnh.subset(settings.lanczos_terms, settings.generator(10))


def _curvature(
    run: Run,
    gnh: GaussNewton,
    operator: LinearOperator,
    damping: float,
    plan: Mapping[str, int],
    settings: _Settings,
) -> tuple[LowRank, dict[str, float | None]]:
    """P, and what its products left the operator with: every later phase starts from that."""

    def compute() -> tuple[dict[str, Tensor], dict[str, Any]]:
        made = nystrom(
            operator,
            damping,
            rank=plan["rank"],
            generator=settings.generator(11),
            at_once=plan["at_once"],
        )
        return made.tensors(), {**made.notes(), "operator": gnh.state()}

    tensors, notes = run.tensors("curvature", compute, gnh.network.device)
    return LowRank.from_tensors(tensors, notes), notes["operator"]


def _scale(
    gnh: GaussNewton, P: LowRank, operator: LinearOperator, found: Readings, settings: _Settings
) -> dict[str, Any] | None:
    if settings.probes == 0:
        return None
    made = calibrate(gnh, P, operator, found, generator=settings.generator(13), probes=settings.probes)
    return None if made is None else asdict(made)


def _harm(
    run: Run,
    gnh: GaussNewton,
    train: Any,
    queries: Any,
    damping: float,
    params: ParameterFilter | None,
    settings: _Settings,
) -> Harm:
    """Scores added up over the queries, as `attribute` finds them."""
    result = attribute(
        gnh.network.model,
        train,
        queries,
        task=gnh.task,
        damping=damping,
        params=params,
        product=settings.product,
        baseline=False,
        shown=1,
        seed=settings.seed,
        micro_batch=settings.micro_batch,
        lanczos_terms=settings.lanczos_terms,
        run_dir=None if run.path is None else run.path / "attribution",
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
    return Harm(scores, scores - width, scores + width, len(queries), bool(result.solve.converged.all()))


def _check_queries(queries: Any, gnh: GaussNewton) -> None:
    """Refuse queries that `attribute` could not use, before anything is measured."""
    if isinstance(queries, (dict, tuple, Tensor, nn.Module)):
        raise DataError(
            f"queries are a {type(queries).__name__}; give a list of examples, even if there is only one"
        )
    try:
        asked = TermSet(queries, gnh.task, gnh.network.device)
        asked.width = gnh.terms.width
        asked.look_through(len(asked))
    except DataError as error:
        raise DataError(f"the queries cannot be used: {error}") from error


# --- what stands beside the numbers --------------------------------------------------------------------------


def _config(gnh: GaussNewton, settings: _Settings) -> dict[str, Any]:
    """What a run is about, for recognising its directory. Queries have a run of their own inside it."""
    names = list(gnh.network.parameters)
    return {
        "command": "clean",
        **asdict(settings),
        "model": f"{type(gnh.network.model).__name__} {of_model(gnh.network.model)}",
        "task": type(gnh.task).__name__,
        "train": f"{len(gnh.terms)} examples {of_data(gnh.terms.data)}",
        "params": f"{len(names)} tensors, {gnh.num_parameters} parameters {of_value(names)}",
    }


def _ids(train: Any) -> tuple[str, ...]:
    """The examples' own names where the data know them, else their positions."""
    own = getattr(train, "id", None)
    return tuple(str(own(index)) if callable(own) else str(index) for index in range(len(train)))


def _words(classes: Tensor, names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Classes in words; None where there are none."""
    if bool((classes < 0).any()):
        return None
    known = () if names is None else names
    return tuple(str(known[k]) if k < len(known) else str(k) for k in classes.tolist())


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


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - begun
