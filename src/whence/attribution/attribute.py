"""`attribute`: from a question to the training examples behind the answer.

    gradients of the queries → spectrum → plan → solve, all queries together → scores of every example → what to show

The phases are in `whence.attribution`: `phases`, `planning`, `rounds`, `answer`, `showing`, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence.attribution import phases
from whence.attribution.answer import Answer, timed
from whence.attribution.exhibits import Describe, exhibit_of
from whence.attribution.planning import make_plan
from whence.attribution.result import Attribution
from whence.attribution.rounds import Rounds
from whence.attribution.saving import load, write_result
from whence.attribution.settings import Sampling, Settings, SolverChoice
from whence.attribution.showing import ask, describer, ends_of_rankings, token_shares
from whence.errors import DataError, OptionError
from whence.exhibit import Exhibit
from whence.model.data import TermSet
from whence.model.gauss_newton import GaussNewton, Product
from whence.model.selection import ParameterFilter
from whence.runs import Run
from whence.runs.fingerprint import of_data, of_model, of_value
from whence.runs.run import environment
from whence.scoring import Method
from whence.solvers.choice import resolve_accuracy
from whence.sources.candidates import Shortlist
from whence.tasks import LanguageModeling, Task

__all__ = ["Candidates", "attribute"]


#: Positions, or a shortlist that says how it was chosen.
Candidates = Shortlist | Sequence[int] | Tensor


def attribute(
    model: nn.Module,
    train: Any,
    queries: Any,
    *,
    task: Task,
    damping: float | str = "auto",
    params: ParameterFilter | None = None,
    solver: SolverChoice = "auto",
    product: Product = "auto",
    accuracy: float | str = 0.995,
    chains: int = 4,
    refine: float | None = None,
    method: Method = "auto",
    candidates: Candidates | None = None,
    baseline: bool = True,
    shown: int = 20,
    describe: Describe | None = None,
    tokenizer: Any = None,
    class_names: Sequence[str] | None = None,
    title: str = "Which training examples are behind this?",
    seed: int = 0,
    micro_batch: int | None = None,
    run_dir: str | Path | None = None,
    checkpoint_seconds: float = 30.0,
    part_size: int | None = None,
    lanczos_terms: int = 4096,
    sampling: Sampling = "auto",
    until: str | None = None,
    budget: float = 8.0,
    on_run: Callable[[Path], None] | None = None,
) -> Attribution:
    """Which training examples made the model say this, and how sure are we?

    Args:
        model: any module in evaluation mode; it is not modified.
        train: its training data, a map-style data set of ``(x, y)`` or dicts with ``input_ids``. Read as it is
            needed, never held in memory.
        queries: examples whose loss is to be explained: a sequence like the training data, such as
            ``[task.query(prompt, completion)]``.
        task: what the model's outputs mean.
        damping: λ, or ``"auto"``: λmax/200, from the measured spectrum (`auto_damping`); any other part
            of λmax is written ``"lambda_max/50"``.
        params: which parameters: a predicate on names or glob patterns; all trainable ones by default.
        solver: ``"auto"``: the one that should reach the accuracy at the least cost (`whence.solvers.choice`);
            ``"cg"``: conjugate gradients over all of the data, with a certificate; ``"lissa"``: LiSSA under a plan made
            from the measured spectrum; ``"refinement"``: subset solves finished on fresh batches; or a
            `ConjugateGradient`, `Lissa` or `Refinement` of your own.
        product: how Gauss-Newton products are computed; see `GaussNewton`.
        accuracy: what to aim at: the expected correlation of the scores with the exact damped ones, or their relative
            error, as ``"10%"``, which is the same as 0.995.
        chains: LiSSA's independent solves: their mean is the answer, their spread the error bar.
        refine: cost of each chain, as a multiple of the paper's plan; by default what the accuracy needs.
        method: how to score; see `whence.scoring.Scorer`.
        candidates: score only these: positions, or a shortlist of `whence.sources.candidates`. The result says what was
            left out. The solve is about all of the data in any case.
        baseline: also compute plain gradient dot products, to compare with.
        shown: examples at each end of a ranking whose text or picture is kept for the page.
        describe: what to show of an example: ``(example, index) -> Exhibit``. By default the data's own
            ``exhibit(index)`` where there is one, else a guess from tokens, pictures and labels.
        tokenizer: turns tokens into words on the page.
        class_names: labels in words on the page.
        title: of the page.
        seed: of all random numbers.
        micro_batch: examples per pass; by default as many as fit.
        run_dir: a directory that makes the run resumable: the same call goes on where it was interrupted, and
            ends in the same numbers.
        checkpoint_seconds: how often the solver's state is written there.
        part_size: examples per part of the scores written there; by default about a minute's work.
        lanczos_terms: terms of the data that λmax is measured on, at most.
        sampling: how batches are drawn: ``"uniform"``; ``"curvature"``, by how uncertain the model is of an example
            (`importance`), which pays where it is certain of almost all of them; or ``"auto"``: by curvature
            where the measured noise of batches says that it pays.
        until: ``"top-10 stable"`` solves on until the ten most helpful examples of every query are separated from the
            rest, at a confidence of 0.95 or as in ``"top-10 stable at 0.99"``; the result says whether they are.
        budget: what that may cost, as a multiple of the first round of solving.
        on_run: called with the run directory once it is open, to put something there.

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
    settings = Settings(
        damping=damping,
        solver=solver,
        product=product,
        accuracy=resolve_accuracy(accuracy),
        chains=chains,
        refine=refine,
        method=method,
        baseline=baseline,
        shown=shown,
        seed=seed,
        micro_batch=micro_batch,
        lanczos_terms=lanczos_terms,
        sampling=sampling,
        until=until,
        budget=budget,
    )
    gnh = GaussNewton(model, task, train, params=params, product=product, micro_batch=micro_batch)
    asked = _questions(queries, gnh)
    positions, not_scored = _choose(candidates, len(gnh.terms))
    config = settings.config() | _identity(gnh, asked, positions, not_scored, title)

    def guess(example: Any, index: int) -> Exhibit:
        return exhibit_of(example, index, tokenizer=tokenizer, class_names=class_names)

    job = _Job(
        gnh=gnh,
        queries=asked,
        positions=positions,
        settings=settings,
        show_query=describer(queries, guess),
        show_example=describer(train, guess)
        if describe is None
        else lambda index: describe(train[index], index),
        class_names=class_names,
        checkpoint_seconds=checkpoint_seconds,
        part_size=part_size,
    )
    with Run(run_dir, config) as run:
        if run.path is not None and on_run is not None:
            on_run(run.path)
        if run.path is not None and (run.path / "result.json").exists():
            return load(run.path)
        return _carry_out(job, run, title=title, not_scored=not_scored, config=config)


@dataclass(frozen=True)
class _Job:
    """Everything that the phases work on, checked."""

    gnh: GaussNewton
    queries: TermSet
    positions: Tensor
    settings: Settings
    show_query: Callable[[int], Exhibit]
    show_example: Callable[[int], Exhibit]
    class_names: Sequence[str] | None
    checkpoint_seconds: float
    part_size: int | None


def _carry_out(job: _Job, run: Run, *, title: str, not_scored: str, config: dict[str, Any]) -> Attribution:
    """The phases, one after the other."""
    gnh, settings, seconds = job.gnh, job.settings, dict[str, float]()
    with timed(seconds, "queries"):
        losses, asked = ask(gnh, job.queries, job.show_query, job.class_names)
        rhs = phases.query_gradients(run, gnh, job.queries)
    with timed(seconds, "spectrum"):
        planned = make_plan(run, gnh, settings, len(job.queries))
    rounds = Rounds(run, gnh, planned, rhs, settings, job.checkpoint_seconds)
    answer = Answer(run, rounds, gnh, job.positions, rhs, settings, job.part_size)
    answer.work_out(seconds)
    solve, scores, solved = answer.solve, answer.scores, answer.solved
    with timed(seconds, "page"):
        ends = ends_of_rankings(scores, settings.shown)
        tokens = {}
        if isinstance(gnh.task, LanguageModeling):
            wanted = [sorted(int(job.positions[position]) for position in end) for end in ends]
            tokens = token_shares(gnh, solved, wanted)
        shown = sorted({int(scores.indices[position]) for end in ends for position in end})
        exhibits = {index: job.show_example(index) for index in shown}
    result = Attribution(
        chain_scores=scores.chains,
        indices=scores.indices,
        terms=scores.terms,
        num_examples=len(gnh.terms),
        num_terms=gnh.num_terms,
        dot_products=scores.dots,
        query_losses=losses,
        query_products=answer.between_queries(),
        query_dots=rhs.gram(rhs).cpu(),
        solve=solve,
        queries=asked,
        exhibits=exhibits,
        token_scores=tokens,
        not_scored=not_scored,
        score_method=answer.score_method,
        title=title,
        settings=config,
        versions=environment(),
        seconds=seconds,
        norms=scores.norms,
    )
    if run.path is not None:
        write_result(result, run.path, parts=answer.parts, scores=answer.directory)
    return result


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


def _identity(
    gnh: GaussNewton, queries: TermSet, positions: Tensor, not_scored: str, title: str
) -> dict[str, Any]:
    """What a run is about, for recognising its directory."""
    names = list(gnh.network.parameters)
    return {
        "model": f"{type(gnh.network.model).__name__} {of_model(gnh.network.model)}",
        "task": type(gnh.task).__name__,
        "train": f"{len(gnh.terms)} examples {of_data(gnh.terms.data)}",
        "queries": f"{len(queries)} {of_data(queries.data)}",
        "params": f"{len(names)} tensors, {gnh.num_parameters} parameters {of_value(names)}",
        "candidates": f"{len(positions)} {of_value(positions)}" if not_scored else "all",
        "title": title,
    }
