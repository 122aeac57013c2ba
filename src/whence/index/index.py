"""`Index`: what every later question needs, as `whence.index` made it; `Index.ask` answers from it.

    queries → estimates → candidates → solve → score → result

A question takes its own gradient, a table look-up for every byte of the index, and the examples at the ends of the
ranking scored as the quick answer of `whence.attribute` scores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence.attribution.asked import ask
from whence.attribution.budget import Way
from whence.attribution.damping import Metric, Weighed
from whence.attribution.exhibits import Describe, describer
from whence.attribution.identity import Portrait, model_identity, refuse_another
from whence.attribution.job import Job, query_terms
from whence.attribution.pipeline import conclude, score, solve
from whence.attribution.planning import SCALE, Planned
from whence.errors import OptionError, RunDirectoryError
from whence.index.answer import Answer
from whence.index.parts import Part, check_same, read_parts
from whence.index.signs import estimates
from whence.index.whitened import Whitened
from whence.model.gauss_newton import GaussNewton
from whence.model.selection import ParameterFilter
from whence.operators import failures_become_typed
from whence.options import AskOptions, IndexOptions, Options, chosen_options, takes
from whence.preconditioners.ekfac import Ekfac
from whence.progress import Stopwatch
from whence.runs import Run, differences, opened
from whence.runs.files import given_path
from whence.runs.manifest import Manifest
from whence.solvers.factored import Factored, Fit
from whence.solvers.plan import Plan
from whence.spectrum import Spectrum
from whence.tasks import Questions, Task
from whence.threads import one_at_a_time

__all__ = ["WAY", "Calibration", "Index", "estimated", "first_two", "job_of", "operator_of", "options_of"]

WAY = Way(True, False, 0, "Answered from an index.")


@dataclass(frozen=True)
class Calibration:
    """The root mean square of ``(estimate - score) / (c ‖q‖)``; 1 is expected."""

    error: float


def operator_of(
    model: nn.Module, task: Task, train: Any, params: ParameterFilter | None, options: IndexOptions
) -> GaussNewton:
    """H over the data, for one process."""
    gnh = GaussNewton(
        model,
        task,
        train,
        params=params,
        product=options.product,  # type: ignore[arg-type]  # checked
        micro_batch=options.micro_batch,
    )
    if gnh.network.ranks.size > 1:
        raise OptionError(
            f"an index is made and asked by one process, and there are {gnh.network.ranks.size}; start it without "
            "torchrun"
        )
    return gnh


def first_two(gnh: GaussNewton) -> Tensor:
    """Whatever is added to the data, these stay."""
    return torch.arange(min(2, len(gnh.terms)))


def job_of(gnh: GaussNewton, queries: Any, options: Options, **more: Any) -> Job:
    """What the steps of an attribution need, of an index."""
    questions = Questions.of(queries)
    parts, terms = query_terms(questions, gnh)

    def nothing(position: int) -> Any:
        raise AssertionError(position)

    known: dict[str, Any] = {
        "positions": torch.arange(len(gnh.terms)), "not_scored": "", "identity": {}, "own_solver": None,
        "show_query": nothing, "show_example": nothing, "class_names": None,
    }  # fmt: skip
    return Job(gnh=gnh, questions=questions, parts=parts, terms=terms, options=options, **(known | more))


def options_of(options: IndexOptions, **more: Any) -> Options:
    """The same, as of an attribution."""
    shared = {each.name for each in fields(Options)}
    own = {name: value for name, value in vars(options).items() if name in shared}
    return Options(**{**own, "accuracy": "quick", **more})


def estimated(parts: Sequence[Part], rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Inner products with all examples, and these' sizes."""
    return (
        torch.cat([estimates(part.signs, rotated) for part in parts], dim=1),
        torch.cat([part.signs.sizes for part in parts]),
    )


@dataclass(frozen=True, eq=False)
class Index:
    """An index that was made by `whence.index`.

    Attributes:
        directory: where it is kept.
        gnh: the operator, in the metric of its damping.
        whitened: rotates gradients.
        parts: of the training examples.
        weighed: λ, and how it was found.
        spectrum: as far as it is known.
        fit: size and error of the answers.
        calibration: of the estimates.
        options: that it was made with.
    """

    directory: Path
    gnh: GaussNewton
    whitened: Whitened
    parts: Sequence[Part]
    weighed: Weighed
    spectrum: Spectrum
    fit: Fit
    calibration: Calibration
    options: IndexOptions
    identity: dict[str, str]
    describe: Describe | None = None
    tokenizer: Any = None
    class_names: Sequence[str] | None = None

    def __repr__(self) -> str:
        return (
            f"Index({len(self.gnh.terms):,} examples of {self.bytes_per_example:,} bytes, λ = "
            f"{self.weighed.damping:.4g}, in {str(self.directory)!r})"
        )

    @property
    def bytes_per_example(self) -> int:
        """Signs, a size and a fingerprint."""
        return self.options.bytes + 4 + 8

    @staticmethod
    @one_at_a_time
    @failures_become_typed()
    def open(
        directory: str | Path,
        model: nn.Module,
        train: Any,
        *,
        task: Task,
        params: ParameterFilter | None = None,
        describe: Describe | None = None,
        tokenizer: Any = None,
        class_names: Sequence[str] | None = None,
    ) -> Index:
        """Read an index.

        Raises:
            RunDirectoryError: there is none, it is unfinished, was damaged, or is of another model or other data.
        """
        kept = opened(given_path(directory, "directory"))
        if "size" not in kept:
            raise RunDirectoryError(
                f"{kept.path} holds no index, or an unfinished one; make it with whence index"
            )
        calibration = kept.value("calibration", Calibration)
        options = _made_with(kept)
        gnh = operator_of(model, task, train, params, options)
        identity = {**model_identity(gnh), "training": kept.content.identity.get("training", "")}
        found = list(differences(kept.content.identity, identity))
        if found:
            raise RunDirectoryError(
                f"{kept.path} holds an index of something else ({'; '.join(found)}). Give the model, task and "
                "parameters that it was made of, or make another index"
            )
        refuse_another(kept.path, kept.value("model", Portrait), Portrait.of(gnh, first_two(gnh)))
        parts = read_parts(kept)
        if not parts or parts[-1].end != len(gnh.terms):
            there = parts[-1].end if parts else 0
            raise RunDirectoryError(
                f"the index in {kept.path} is of {there:,} examples, the training data have {len(gnh.terms):,}. Run "
                "whence index again with all of them to add what has come, or give the data that it was made of"
            )
        metric = kept.value("metric", Metric, device=gnh.network.device).diagonal
        if metric is not None:
            gnh = gnh.in_metric(metric)
        gnh.restore_state(kept.operator("fit"))
        weighed = kept.value("damping", Weighed)
        factors = kept.value("factors", Ekfac, device=gnh.network.device)
        factors = factors.with_damping(weighed.damping).with_scale(SCALE)
        whitened = Whitened(gnh, factors, 8 * options.bytes, options.generator(10))
        return Index(
            kept.path, gnh, whitened, parts, weighed, kept.value("spectrum", Spectrum), kept.value("fit", Fit),
            calibration, options, dict(kept.content.identity), describe, tokenizer, class_names,
        )  # fmt: skip

    @takes(AskOptions)
    @one_at_a_time
    @failures_become_typed()
    def ask(self, queries: Any, *, options: AskOptions | None = None, **given: Any) -> Answer:
        """Which training examples are behind these answers, from the index.

        Args:
            queries: as of `whence.attribute`, or `whence.Questions`.
            options: all options at once; those given by keyword go before.
            **given: any of these options.

                {options}
        """
        chosen = chosen_options(AskOptions, options, given)
        gnh, clock, nowhere = self.gnh, Stopwatch(), Run(None, {}, identity={})
        questions, train = Questions.of(queries), gnh.terms.data
        job = job_of(
            gnh,
            questions,
            options_of(
                self.options, damping=self.weighed.damping, baseline=chosen.baseline, shown=chosen.shown,
                title=chosen.title,
            ),
            identity=self.identity,
            show_query=describer(questions.queries, None, self.tokenizer, self.class_names),
            show_example=describer(train, self.describe, self.tokenizer, self.class_names),
            class_names=self.class_names,
            tokenizer=self.tokenizer,
        )  # fmt: skip
        with clock.phase("queries"):
            asked = ask(nowhere, job)
        with clock.phase("estimates"):
            rotated = self.whitened.of_gradients(asked.gradients)
            found, sizes = estimated(self.parts, rotated)
            lengths = rotated.double().norm(dim=1, keepdim=True).cpu()
            stderr = self.fit.scale * self.calibration.error * lengths * sizes.double()
            found = self.fit.scale * found.double()
            positions = _ends(found, chosen.rescored)
            self._check_data(positions)
        job = _with_positions(job, positions)
        plan = Plan.tuned(
            self.spectrum, self.weighed.damping, num_terms=gnh.num_terms, chains=job.options.chains
        )
        planned = Planned(Factored(preconditioner=self.whitened.factors, fit=self.fit), plan, WAY.words, ())
        with clock.phase("solve"):
            solved = solve(nowhere, job, planned, asked, 0, None)
        with clock.phase("scores"):
            scores = score(nowhere, job, planned, asked, 0, solved, None)
        with clock.phase("page"):
            result = conclude(nowhere, "result", job, self.weighed, planned, asked, solved, scores, "", clock)
        return Answer(result, found, stderr)

    def _check_data(self, positions: Tensor) -> None:
        for part in self.parts:
            own = positions[(positions >= part.first) & (positions < part.end)]
            check_same(part, self.gnh.terms, own.tolist(), str(self.directory))


def _ends(found: Tensor, count: int) -> Tensor:
    """Positions of so many examples at the ends of each query's ranking, two thirds of them helpful."""
    n = found.shape[1]
    if count >= n:
        return torch.arange(n)
    helpful = max(1, -(-2 * count // 3))
    ends = [found.topk(helpful, dim=1).indices, found.topk(count - helpful, dim=1, largest=False).indices]
    both: Tensor = torch.cat(ends, dim=1).unique()
    return both


def _with_positions(job: Job, positions: Tensor) -> Job:
    n = len(job.gnh.terms)
    said = ""
    if len(positions) < n:
        said = (
            f"{len(positions):,} of {n:,} examples, at the ends of the index's rankings, were scored again; the others "
            "have estimates alone"
        )
    return replace(job, positions=positions, not_scored=said)


def _made_with(kept: Manifest) -> IndexOptions:
    """That an index was made with."""
    try:
        return IndexOptions(**kept.content.config)  # type: ignore[arg-type]  # checked there
    except (OptionError, TypeError) as error:
        raise RunDirectoryError(f"{kept.path} holds no index: {error}") from error
