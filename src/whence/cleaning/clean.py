"""`clean`: which training examples look like mistakes?

    spectrum → low-rank approximation → its bounds → one pass over the data → a few exact solves → the ranking

A run directory holds what each phase found (`whence.cleaning.measuring`) and what the page shows beside it
(`whence.cleaning.clean_saving`)::

    spectrum.json bounds.json calibration.json      what each phase found
    curvature.safetensors                           the approximation, until the pass is done
    self-influence/part-00000.parquet …             the pass, in parts
    cleaning.json                                   says that all numbers are there
    attribution/                                    a run of `attribute`, where queries were given
    examples.parquet shown.parquet page.json        the page; written last
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence.attribution.attribute import attribute
from whence.attribution.exhibits import Describe, exhibit_of
from whence.attribution.showing import describer
from whence.attribution.uncertainty import half_width
from whence.cleaning.clean_saving import save_cleaning
from whence.cleaning.cleaning import By, Cleaning, Harm, check_measure
from whence.cleaning.measuring import Settings, measure, timed
from whence.errors import DataError, OptionError
from whence.exhibit import Exhibit
from whence.model.data import TermSet
from whence.model.gauss_newton import GaussNewton, Product
from whence.model.selection import ParameterFilter
from whence.preconditioners.low_rank import check_rank
from whence.runs import Run
from whence.runs.fingerprint import of_data, of_model, of_value
from whence.runs.run import environment
from whence.tasks import Task

__all__ = ["clean"]


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
    settings = Settings(damping, rank, product, probes, seed, micro_batch, lanczos_terms, part_size)
    gnh = GaussNewton(model, task, train, params=params, product=product, micro_batch=micro_batch)
    if rank is not None:
        check_rank(gnh, 1.0, rank)
    if queries is not None:
        _check_queries(queries, gnh)
    seconds: dict[str, float] = {}
    config = _config(gnh, settings)

    def guess(example: Any, index: int) -> Exhibit:
        return exhibit_of(example, index, tokenizer=tokenizer, class_names=class_names)

    own = describer(train, guess) if describe is None else lambda index: describe(train[index], index)
    with Run(run_dir, config) as run:
        found, spectrum = measure(run, gnh, settings, seconds)
        harm = None
        if queries is not None:
            with timed(seconds, "harm to the queries"):
                harm = _harm(run, gnh, train, queries, found.damping, params, settings)
        with timed(seconds, "page"):
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
            result = _with_exhibits(result, own)
        if run.path is not None:
            save_cleaning(result, run.path)
    return result


# --- harm --------------------------------------------------------------------------------------------------


def _harm(
    run: Run,
    gnh: GaussNewton,
    train: Any,
    queries: Any,
    damping: float,
    params: ParameterFilter | None,
    settings: Settings,
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


def _config(gnh: GaussNewton, settings: Settings) -> dict[str, Any]:
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
