"""`Attribution`: every score with its error bar, and what it takes to believe, rank, show and save them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.arguments import checked
from whence.attribution.checkpoint import Checkpoint, correlation, dominant_error
from whence.attribution.doubts import doubts
from whence.attribution.groups import Grouping, GroupRow, Groups
from whence.attribution.over_damping import OverDamping
from whence.attribution.page import render, write_page
from whence.attribution.plots import Plots
from whence.attribution.ranking import Ranking, Row, rank_examples
from whence.attribution.scored import Scored, expects
from whence.attribution.stability import Stability
from whence.errors import OptionError, RunDirectoryError
from whence.exhibit import Exhibit
from whence.libraries import data_frame
from whence.model.memory import half_of_memory
from whence.report.checks import Validation
from whence.report.notebook import framed
from whence.runs import Run, Scalar, opened
from whence.runs.files import REMEDY
from whence.scoring.similarity import cosines, similarity_of_chains
from whence.solvers import Statistics
from whence.solvers.plan import Plan
from whence.units import format_bytes

__all__ = ["Attribution", "Solve", "load"]


@dataclass(frozen=True, kw_only=True)
class Solve(Statistics):
    """How the solver fared, without its vectors.

    Attributes:
        plan: settings in force at the end, and the spectrum they came from; LiSSA's, as the alternative, for other
            solvers.
        choice: why this solver, in words, where it was chosen.
        by_curvature: whether batches were drawn by curvature (`whence.model.importance`), not uniformly.
        damping_words: how λ was found.
        in_metric: whether λ multiplies a metric (`whence.attribution.damping`), not the identity.
        limited: whether a budget ended the solve, as was asked for.
    """

    plan: Plan
    choice: str = ""
    by_curvature: bool = False
    damping_words: str = ""
    in_metric: bool = False
    limited: bool = False

    @property
    def ended_well(self) -> Tensor:
        """Whether each query was solved for as far as was asked, or as the budget went."""
        return self.converged | self.limited


@dataclass(frozen=True)
class Attribution:
    """Scores of training examples for queries: ``score(query, z) = ∇ℓ(query)ᵀ (H + λ)⁻¹ ∇ℓ(z)``.

    Positive: training on z *helped* the query. Removing z changes the query's loss by about
    ``score · (z's terms / all terms)`` nats: score / n where all examples are equally long. Error bars are the
    solver's: they bound the distance to the exact damped score, not that from influence to retraining. Of several
    checkpoints, scores are the means of theirs, and the bars hold two errors: the solver's and what other checkpoints
    would have changed (`whence.attribution.checkpoint`).

    Attributes:
        chain_scores: scores by every independent chain, ``[chains, queries, scored]``; of several checkpoints, by each.
        indices: which training examples were scored.
        terms: how many terms (tokens) each of them has.
        num_examples, num_terms: of the whole training data.
        dot_products: plain gradient dot products, ``[queries, scored]``, or None.
        query_losses: in nats; of several checkpoints their mean.
        query_products: ``∇ℓ(query)ᵀu`` between the queries by every chain, ``[chains, queries, queries]``.
        query_dots: gradient dot products between them, ``[queries, queries]``.
        solve: how the solver fared. Of several checkpoints, all of them together: converged where all did, the largest
            residual, products added up; the plan and the spectrum in it are the first one's.
        queries: what was asked, to show.
        exhibits: index -> what to show of a training example; kept for the ends of the rankings.
        token_scores: (query, index) -> each token's share of the score, for the same.
        not_scored: what was left out and why, in words; empty where everything was scored.
        score_method: how scores were computed, in words.
        title: of the page.
        settings: what was asked for: name -> value.
        versions: environment: name -> version.
        seconds: phase -> duration.
        validation: what `whence.validate` found, for the page; None where it was not run.
        norms: length of every scored example's gradient, where the errors need it; of several checkpoints their mean.
        stability: how far scores depend on which half of the data H is measured on; None where it was not measured,
            and of several checkpoints.
        checkpoints: the models whose scores were averaged, in the order of `chain_scores`; empty for one model.
        solver_errors: the solver's part of the standard errors of such means, ``[queries, scored]``; else None.
        grouping: the groups that the training examples belong to, where some were named.
        rounding: of each query, the correlation of scores with those of weights that are rounded otherwise; None where
            weights are not of fewer bits than float32, and of several checkpoints.
    """

    chain_scores: Tensor
    indices: Tensor
    terms: Tensor
    num_examples: int
    num_terms: int
    dot_products: Tensor | None
    query_losses: Tensor
    query_products: Tensor
    query_dots: Tensor
    solve: Solve
    queries: tuple[Exhibit, ...]
    exhibits: Mapping[int, Exhibit]
    token_scores: Mapping[tuple[int, int], tuple[float, ...]]
    not_scored: str
    score_method: str
    title: str
    settings: Mapping[str, Scalar]
    versions: Mapping[str, str]
    seconds: Mapping[str, float] = field(default_factory=dict)
    validation: Validation | None = field(default=None, metadata={"saved": False})
    norms: Tensor | None = None
    stability: Stability | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    solver_errors: Tensor | None = None
    grouping: Grouping | None = None
    rounding: Tensor | None = None

    def __repr__(self) -> str:
        queries, scored = self.chain_scores.shape[1:]
        of = (
            f"{len(self.checkpoints)} checkpoints"
            if self.checkpoints
            else f"λ = {self.solve.plan.damping:.4g}"
        )
        return (
            f"Attribution({queries} {'query' if queries == 1 else 'queries'}, {scored:,} of "
            f"{self.num_examples:,} examples scored, {of}, "
            f"{int(self.solve.converged.sum())} of {queries} converged{', intervals in doubt' if self.doubts else ''})"
        )

    # --- scores ------------------------------------------------------------------------------------------

    @property
    def scores(self) -> Tensor:
        """``[queries, train]``; NaN for examples that were not scored."""
        return self._spread(self.scored.mean)

    @cached_property
    def scored(self) -> Scored:
        """Scores with their errors, ``[queries, scored]``."""
        if self.checkpoints:
            return Scored(self.chain_scores, self.solver_errors)
        return Scored.of(self.chain_scores, self.solve, self.norms, self.solve.plan.spectrum)

    @property
    def stderr(self) -> Tensor:
        """Standard errors of the scores, ``[queries, train]``: see `whence.attribution.scored`.

        Of one model the solver's error. Of several checkpoints `solver_stderr` and `checkpoint_stderr` together: how
        far their mean may be from the mean of exact scores over all checkpoints that training could have led to.
        """
        return self._spread(self.scored.stderr)

    @property
    def solver_stderr(self) -> Tensor:
        """The solver's part of `stderr`: the distance to the exact damped scores of these very models."""
        return self._spread(self.scored.systematic) if self.checkpoints else self.stderr

    @property
    def checkpoint_stderr(self) -> Tensor | None:
        """The checkpoints' part of `stderr`: the standard error of their mean; None for one model."""
        return self._spread(self.scored.sampling) if self.checkpoints else None

    @property
    def degrees_of_freedom(self) -> float:
        """Of the standard errors: one less than the chains, or the checkpoints; infinite for a deterministic solver."""
        return self.scored.degrees_of_freedom

    @checked()
    def interval(self, confidence: float = 0.95) -> tuple[Tensor, Tensor]:
        """Ends of the confidence intervals of `scores`, ``[queries, train]`` each, with the errors of `stderr`."""
        width = self._spread(self.scored.half_width(confidence))
        return self.scores - width, self.scores + width

    def interval_of_another(self, confidence: float = 0.95) -> tuple[Tensor, Tensor]:
        """Ends of the intervals that the scores of one more checkpoint should fall into, ``[queries, train]`` each.

        Wider than `interval`, and not narrower with more checkpoints: single models differ from their mean.

        Raises:
            OptionError: these are the scores of one model.
        """
        if not self.checkpoints:
            raise OptionError(
                "the scores of one model do not tell what another one's would be; give attribute several checkpoints"
            )
        width = self._spread(self.scored.half_width_of_another(confidence))
        return self.scores - width, self.scores + width

    @cached_property
    def dominant_error(self) -> str:
        """Which of the two errors of a mean over checkpoints dominates, in words; empty for one model."""
        return dominant_error(self)

    @cached_property
    def doubts(self) -> tuple[str, ...]:
        """Why the intervals cannot be trusted, in words; empty where nothing speaks against them."""
        return doubts(self)

    @property
    def data_stderr(self) -> Tensor | None:
        """What H's own uncertainty is worth, ``[queries, train]``; None where `stability` was not measured.

        The standard deviation of a score when H is measured on a half of the data instead of all of them. Beside the
        solver's error, which `stderr` has, and larger than it as a rule.
        """
        if self.stability is None:
            return None
        damping, scores = self.solve.plan.damping, self.scored.mean
        return self._spread(self.stability.stderr(scores, self.indices, damping))

    @checked()
    def over_damping(self, dampings: Sequence[float] | None = None) -> OverDamping:
        """Scores and rankings for other λ, from the products of this solve.

        Args:
            dampings: λ; by default twelve, from 64 times the λ of this solve to a thirty-second of it.

        Raises:
            OptionError: the solver kept nothing to tell them from: LiSSA, or more numbers than are kept.
        """
        if self.checkpoints:
            raise OptionError(
                f"these are means over {len(self.checkpoints)} checkpoints, each with a λ of its own; attribute one of "
                "them alone to see other λ"
            )
        if self.solve.shifted is None:
            raise OptionError(
                "this solve kept nothing of other λ: conjugate gradients do (solver='cg'), while "
                "queries × examples are below four million"
            )
        own = self.solve.plan.damping
        grid = (
            [own * 2.0**k for k in range(6, -6, -1)] if dampings is None else sorted(dampings, reverse=True)
        )
        return OverDamping.of(self.solve.shifted, grid, own, self.indices)

    @property
    def accuracy(self) -> tuple[float, float, float] | None:
        """The expected mean correlation of scores with the exact damped ones, with the ends of a 90% interval.

        From the error that is expected of the solve; the interval is what such expectations were off by on the works
        that it was made for (``python -m benchmarks.stages``), and is not proven on others. None where none is known,
        as of LiSSA, whose chains show their `agreement`.
        """
        expected = self.solve.error_parts.expected
        if expected is None:
            return None
        error = float(expected.double().square().mean().sqrt())
        # what errors were, in units of those expected; the steps of a solve may have done better than was seen
        high = 0.6 if self.solve.certificate is None else 0.0
        value, bottom, top = (math.sqrt(max(0.0, 1 - (times * error) ** 2)) for times in (1.1, 1.5, high))
        return value, bottom, top

    @property
    def bounds(self) -> Tensor:
        """What no score's error can exceed, ``[queries, train]``: proven, and far wider than `interval`.

        ``|∇ℓ(z)ᵀ(u - u*)| ≤ ‖∇ℓ(z)‖ ‖u - u*‖_A / √λ``. Of solvers with a certificate only. Scores by directional
        derivatives (`score_method`) know ‖∇ℓ(z)‖ from eight random directions, to about a quarter; those with
        ``method="gradients"`` know it exactly.
        """
        if self.checkpoints:
            raise OptionError(
                f"these are means over {len(self.checkpoints)} checkpoints, and what was proven is of each one; "
                "use interval(), or attribute one of them alone"
            )
        if self.solve.certificate is None or self.norms is None:
            raise OptionError(
                f"{self.solve.solver} is a stochastic solver and proves nothing; use interval(), or solver='cg'"
            )
        return self._spread(self.solve.certificate.score_bound(self.norms))

    @property
    def effects(self) -> Tensor:
        """Nats by which each query's loss would change without each example, ``[queries, train]``."""
        return self._spread(self.chain_scores.mean(0) * self._effect_per_score())

    @property
    def gradient_dot_products(self) -> Tensor:
        """The baseline without a Hessian, ``∇ℓ(query)ᵀ∇ℓ(z)``, ``[queries, train]``."""
        if self.dot_products is None:
            raise OptionError("gradient dot products were not computed; run attribute with baseline=True")
        return self._spread(self.dot_products)

    @property
    def agreement(self) -> Tensor:
        """Mean correlation between the scores of two chains, or checkpoints, per query; NaN for one."""
        if len(self.chain_scores) < 2:
            return torch.full((self.chain_scores.shape[1],), math.nan, dtype=torch.float64)
        chains = self.chain_scores
        pairs = [correlation(chains[i], chains[j]) for i in range(len(chains)) for j in range(i)]
        return torch.stack(pairs).mean(0)

    def influence_similarity(self) -> tuple[Tensor, Tensor]:
        """Influence-similarity between the queries and its error (`whence.scoring.similarity`).

        From several chains a standard error; from a certificate a bound: the errors e of conjugate gradients are
        orthogonal to the space that all queries share, so ``gᵢᵀeⱼ = eᵢᵀ(H + λ)eⱼ ≤ bᵢbⱼ``.
        """
        value, error = similarity_of_chains(self.query_products)
        if self.solve.certificate is None:
            return value, error
        lengths = self.query_products[0].diagonal().clamp_min(1e-300).sqrt()
        relative = self.solve.certificate.upper / lengths
        own = 0.5 * relative.square()
        return value, relative.outer(relative) + value.abs() * (own.unsqueeze(0) + own.unsqueeze(1))

    def gradient_similarity(self) -> Tensor:
        """Cosines between the queries' gradients."""
        return cosines(self.query_dots)

    # --- rankings ----------------------------------------------------------------------------------------

    @checked()
    def top(
        self,
        k: int = 5,
        *,
        query: int | None = None,
        harmful: bool = False,
        by: str = "score",
        confidence: float = 0.95,
    ) -> Ranking[Row]:
        """The k most helpful examples (or most harmful) for every query, or for one.

        Each row says whether its rank is separated from the next, given the errors.

        Args:
            k: how many.
            query: which query; all by default.
            harmful: from the other end: examples whose removal would lower the query's loss.
            by: ``"score"``, or ``"unit"``: the score over the length of the example's own gradient. An example with a
                large gradient, such as one that the model gets wrong, has large scores for whatever is asked; this
                leaves that out, and finds the examples that are about the query.
            confidence: of the intervals and of the separation.
        """
        if k < 1:
            raise OptionError(f"k is {k}; ask for at least one example")
        queries = self.chain_scores.shape[1]
        if query is not None and not -queries <= query < queries:
            raise OptionError(f"query {query} does not exist: there are {queries}, numbered from 0")
        chosen = range(queries) if query is None else [query % queries]
        rows = []
        for q in chosen:
            scored = self._ranked_by(by).at(q)
            ranked = rank_examples(scored, k, harmful=harmful, confidence=confidence)
            for rank, (position, _, apart) in enumerate(ranked, start=1):
                width = float(self.scored.at(q, position).half_width(confidence))
                rows.append(
                    self._row(q, rank, position, width, apart, harmful=harmful, confidence=confidence)
                )
        return Ranking(rows, self.doubts, self.dominant_error)

    def _ranked_by(self, by: str) -> Scored:
        """What examples are ranked by."""
        if by not in ("score", "unit"):
            raise OptionError(f"by is {by!r}; rank by 'score' or by 'unit'")
        if by == "score":
            return self.scored
        if self.norms is None:
            raise OptionError(
                "the lengths of the examples' gradients are not known, which only some solvers need; attribute with "
                "norms=True (--norms)"
            )
        lengths = self.norms.to(self.chain_scores).clamp_min(torch.finfo(torch.float32).tiny)
        certified = self.scored.certified
        return Scored(self.chain_scores / lengths, None if certified is None else certified / lengths)

    def groups(self, names: Sequence[Hashable | None] | None = None) -> Groups:
        """Effects of leaving out whole groups of training examples, with errors of their own.

        Args:
            names: the group of every training example, None for none; by default the ``groups`` of the attribution.
        """
        if names is None and self.grouping is None:
            raise OptionError("no groups were named; give a name for each training example: groups(names)")
        grouping = self.grouping if names is None else Grouping.by(names, self.num_examples)
        assert grouping is not None
        return Groups.of(self, grouping)

    def top_groups(
        self, k: int = 5, *, query: int | None = None, harmful: bool = False, confidence: float = 0.95
    ) -> Ranking[GroupRow]:
        """The k most helpful groups of training examples (or most harmful) for every query, or for one."""
        return self.groups().top(k, query=query, harmful=harmful, confidence=confidence)

    @property
    def error_is_expected(self) -> bool:
        """Whether the scores' errors are what is expected of the solve on average; see `whence.attribution.scored`."""
        return expects(self.solve, len(self.chain_scores))

    @checked()
    def row(self, query: int, index: int, *, confidence: float = 0.95) -> Row:
        """Any scored example's place among the most helpful of a query."""
        found = (self.indices == index).nonzero().flatten()
        if len(found) == 0:
            raise OptionError(
                f"example {index} was not scored{': ' if self.not_scored else ''}{self.not_scored}"
            )
        position, scored = int(found[0]), self.scored.at(query)
        mean = scored.mean
        rank = int((mean > mean[position]).sum()) + 1
        below = mean.masked_fill(mean >= mean[position], -math.inf)
        following = int(below.argmax())
        apart = not bool(below[following] > -math.inf) or bool(
            scored.at(position).above(scored.at(following), confidence)
        )
        width = float(scored.at(position).half_width(confidence))
        return self._row(query, rank, position, width, apart, harmful=False, confidence=confidence)

    def _row(
        self,
        query: int,
        rank: int,
        position: int,
        width: float,
        apart: bool,
        *,
        harmful: bool,
        confidence: float,
    ) -> Row:
        score = float(self.chain_scores[:, query, position].mean())
        per_score = float(self._effect_per_score()[position])
        dot = dot_rank = None
        errors: dict[str, float] = {}
        if self.checkpoints:
            here = self.scored.at(query, position)
            reach = float(here.half_width_of_another(confidence))
            errors = {
                "solver_stderr": float(here.systematic),
                "checkpoint_stderr": float(here.sampling),
                "another_low": score - reach,
                "another_high": score + reach,
            }
        if self.dot_products is not None:
            dots = self.dot_products[query]
            better = dots < dots[position] if harmful else dots > dots[position]
            dot, dot_rank = float(dots[position]), int(better.sum()) + 1
        return Row(
            query=query,
            rank=rank,
            index=int(self.indices[position]),
            score=score,
            low=score - width,
            high=score + width,
            effect=score * per_score,
            effect_low=(score - width) * per_score,
            effect_high=(score + width) * per_score,
            separated=apart,
            dot_product=dot,
            dot_product_rank=dot_rank,
            unit=None if self.norms is None else score / max(float(self.norms[position]), 1e-300),
            **errors,
        )

    # --- elsewhere ---------------------------------------------------------------------------------------

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`, one row for each query and scored example, most helpful first.

        `doubts` are its ``attrs["doubts"]``. Of several checkpoints, with the parts of `stderr` and the ends of
        `interval_of_another`.
        """
        queries, scored = self.chain_scores.shape[1:]
        mean, stderr = self.scored.mean, self.scored.stderr
        width = self.scored.half_width(0.95)
        columns = {
            "query": torch.arange(queries).repeat_interleave(scored),
            "index": self.indices.repeat(queries),
            "score": mean.flatten(),
            "stderr": stderr.flatten(),
            "low": (mean - width).flatten(),
            "high": (mean + width).flatten(),
            "effect": (mean * self._effect_per_score()).flatten(),
        }
        if self.checkpoints:
            reach = self.scored.half_width_of_another(0.95)
            columns["solver_stderr"] = self.scored.systematic.flatten()
            columns["checkpoint_stderr"] = self.scored.sampling.flatten()
            columns["another_low"] = (mean - reach).flatten()
            columns["another_high"] = (mean + reach).flatten()
        if self.dot_products is not None:
            columns["dot_product"] = self.dot_products.flatten()
        if self.norms is not None:
            columns["unit"] = self._ranked_by("unit").mean.flatten()
        frame = data_frame({name: column.numpy() for name, column in columns.items()})
        if self.grouping is not None:
            numbers = self.grouping.of[self.indices].repeat(queries).tolist()
            frame["group"] = [None if number < 0 else self.grouping.names[number] for number in numbers]
        frame = frame.sort_values(["query", "score"], ascending=[True, False], ignore_index=True)
        frame.attrs["doubts"] = list(self.doubts)
        return frame

    @checked("path")
    def to_html(self, path: str | Path) -> Path:
        """Write the page: one self-contained file. Returns its path."""
        return write_page(render(self), path)

    def _repr_html_(self) -> str:
        """The page in a frame, for notebooks."""
        return framed(render(self), title=self.title, height=720)

    @property
    def plot(self) -> Plots:
        """Figures of this result, by matplotlib: ``ranking()``, ``tokens()``, ``convergence()`` and ``damping()``."""
        return Plots(self)

    @checked("directory")
    def save(self, directory: str | Path) -> Path:
        """Write the result into a directory of its own; `whence.load` reads it back."""
        with Run(directory, dict(self.settings), identity={}) as run:
            run.keep("result", Attribution, lambda: self)
            if self.validation is not None:
                validation = self.validation
                run.keep("validation", Validation, lambda: validation)
        return Path(directory)

    # --- helpers -----------------------------------------------------------------------------------------

    def _effect_per_score(self) -> Tensor:
        """``terms of z / all terms``, ``[scored]``."""
        return self.terms.double() / self.num_terms

    def _spread(self, scored: Tensor) -> Tensor:
        if len(self.indices) == self.num_examples:
            return scored[:, self.indices.argsort()]
        # their number may be from a stranger's file
        needed, room = scored.element_size() * len(scored) * self.num_examples, half_of_memory(scored.device)
        if room is not None and needed > room:
            raise OptionError(
                f"numbers for all {self.num_examples:,} examples take {format_bytes(needed)}, more than half of the "
                "memory; use to_pandas(), top() or `scored`, which have those that were scored"
            )
        result = torch.full((scored.shape[0], self.num_examples), math.nan, dtype=scored.dtype)
        result[:, self.indices] = scored
        return result


@checked("directory")
def load(directory: str | Path) -> Attribution:
    """Read a saved attribution, or a run directory; of one that is not finished its quick answer, where it has one.

    Raises:
        RunDirectoryError: where there is none, its run is not finished, or what is read of it was damaged. The files
            that a result is not read from, such as solutions, are compared when the run is gone on with.
    """
    kept = opened(directory)
    path = kept.path
    if "result" not in kept:
        if "quick" in kept:  # all that an unfinished run has to say so far
            return _of_its_examples(path, kept.value("quick", Attribution))
        if "cleaning" in kept:
            raise RunDirectoryError(
                f"{path} holds a run of whence clean, which has no scores to load; `whence report {path}` writes its "
                "page"
            )
        raise RunDirectoryError(
            f"the run in {path} is not finished; run the same command again to go on with it"
        )
    result = _of_its_examples(path, kept.value("result", Attribution))
    if "validation" not in kept:
        return result
    return replace(result, validation=kept.value("validation", Validation))


def _of_its_examples(path: Path, result: Attribution) -> Attribution:
    """The result, if its scores are of the examples that it says: each once, and all where none was left out."""
    order, scored = result.indices.sort().values, result.chain_scores.shape[-1]
    inside = scored > 0 and int(order[0]) >= 0 and int(order[-1]) < result.num_examples
    once = len(order) == scored and bool((order[1:] > order[:-1]).all())
    once = once and len(result.checkpoints) in (0, len(result.chain_scores))
    if not (inside and once and (result.not_scored or scored == result.num_examples)):
        raise RunDirectoryError(
            f"the scores in {path} are not those of its {result.num_examples:,} examples, each once. {REMEDY}"
        )
    return result
