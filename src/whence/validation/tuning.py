"""`tune`: choose λ by retraining, where a user can afford a few halves of the data.

One solve at the smallest λ of a grid has the scores for all of them (`Attribution.over_damping`), and the linear
datamodeling score says for each how well they predict the losses of models that were trained on random halves. All λ
are judged on the same resamples of these halves, so that their differences are known better than any one of them.

What was chosen on some halves looks better on them than it is. By how much is told by halves of the halves: λ is chosen
on one and judged on the other, for many ways to part them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence.arguments import checked
from whence.attribution import Attribution, attribute
from whence.distributed import one_process
from whence.errors import DataError, OptionError
from whence.libraries import data_frame
from whence.model.inspection import check_mode
from whence.model.selection import ParameterFilter
from whence.options import MeasureOptions, chosen_options, takes
from whence.runs.files import given_path
from whence.tasks import Questions, Task
from whence.threads import one_at_a_time
from whence.validation.datamodeling import Bench, DatamodelingDifference, DatamodelingScore
from whence.validation.retraining import Outcomes, Trainer, half_subsets, retrain

__all__ = ["Tuning", "tune"]

#: Of the λ that "auto" takes.
_MULTIPLES = tuple(2.0**k for k in range(6, -6, -1))
_LEAST_HALVES = 6  # three to choose on and three to judge on
_CONFIDENCE, _BOOTSTRAP, _SPLITS = 0.95, 1000, 200


@dataclass(frozen=True)
class Tuning:
    """How well scores predict retraining for a grid of λ, and the λ for which they do it best.

    Attributes:
        dampings: λ, falling, in the metric of ``damping="auto"``.
        lds: linear datamodeling score of each, with its interval.
        damping: the λ whose LDS is the largest.
        auto: the λ that ``damping="auto"`` takes.
        gain: the LDS of the chosen λ less that of `auto`, with the interval of their difference.
        held_out: the same gain where λ is chosen on one half of the retrained models and judged on the other.
        sure: the part of resamples in which the chosen λ or one beside it on the grid is the best.
        effects: nats by which each query's loss would change without each example, with the chosen λ, ``[queries, n]``.
        outcomes: what retraining gave.
        solve: the attribution at the smallest λ, which the scores of all others are from.
    """

    dampings: tuple[float, ...]
    lds: tuple[DatamodelingScore, ...]
    damping: float
    auto: float
    gain: DatamodelingDifference
    held_out: float
    sure: float
    effects: Tensor
    outcomes: Outcomes
    solve: Attribution

    @classmethod
    def of(
        cls,
        solve: Attribution,
        outcomes: Outcomes,
        *,
        auto: float,
        dampings: Sequence[float],
        generator: torch.Generator,
    ) -> Tuning:
        """From an attribution at the smallest of these λ, `auto` among them, and what retraining gave.

        Raises:
            DataError: the queries' losses are the same whatever half is trained on.
        """
        bench = Bench(outcomes, _CONFIDENCE, _BOOTSTRAP, generator)
        rows = torch.cat([bench.rows, _splits(bench.subsets, generator)])
        found, parts = [], []
        for damping in dampings:
            per_query, resampled = bench.correlations(_effects(solve, damping), rows)
            found.append((per_query, resampled[:_BOOTSTRAP]))
            parts.append(resampled[_BOOTSTRAP:].nanmean(1).nan_to_num(-1.0))
        values = torch.stack([per_query.nanmean() for per_query, _ in found])
        if bool(values.isnan().any()):
            raise DataError(
                "the queries' losses are the same whatever half of the data is trained on; the trainer must train on "
                "the examples at the positions that it is given"
            )
        best, own = int(values.argmax()), list(dampings).index(auto)
        means = torch.stack([bench.means(resampled) for _, resampled in found])
        near = (means.nan_to_num(-1.0).argmax(0) - best).abs() <= 1
        return cls(
            dampings=tuple(dampings),
            lds=tuple(bench.score(*each) for each in found),
            damping=dampings[best],
            auto=auto,
            gain=bench.difference(found[best], found[own]),
            held_out=_held_out(torch.stack(parts), own),
            sure=float(near.double().mean()),
            effects=_effects(solve, dampings[best]),
            outcomes=outcomes,
            solve=solve,
        )

    @property
    def setting(self) -> str:
        """The chosen λ as `whence.attribute` takes it: ``attribute(…, damping=tuning.setting)``."""
        part = self.auto / self.damping
        return "auto" if self.damping == self.auto else f"auto/{part:.9g}"

    @property
    def optimism(self) -> float:
        """By how much `gain` may flatter, at most: `held_out` chooses on half as many models, so it chooses worse."""
        return self.gain.value - self.held_out

    @property
    def worthwhile(self) -> bool:
        """Whether to leave ``"auto"``: λ chosen on some halves is better than it on others."""
        return self.damping != self.auto and self.held_out > 0

    def words(self) -> str:
        """What was found, how sure it is, and what to do, in a few sentences."""
        best, other = self.gain.first, self.gain.second
        halves = best.num_subsets
        told = [
            f"Scores predict {halves} retrained halves best with λ = {self.damping:.3g}: LDS {best.value:.3f} "
            f"[{best.low:.3f}, {best.high:.3f}].",
            f"In {self.sure:.0%} of resamples this λ, or one beside it on the grid, is the best.",
        ]
        if self.damping == self.auto:
            told.append('It is the one that damping="auto" takes.')
        else:
            told += [
                f'damping="auto" takes λ = {self.auto:.3g} with {other.value:.3f}, so the choice gains '
                f"{self.gain.value:+.3f} [{self.gain.low:+.3f}, {self.gain.high:+.3f}] on these halves.",
                f"Chosen on one half of them and judged on the other, it gains {self.held_out:+.3f}: up to "
                f"{max(self.optimism, 0.0):.3f} of the gain is the luck of choosing on what one judges by.",
            ]
            told.append(
                f'Give damping="{self.setting}" to attribute.'
                if self.worthwhile
                else 'That is no reason to leave damping="auto"; more halves may tell.'
            )
        if self.damping in (self.dampings[0], self.dampings[-1]):
            told.append(
                "The best λ is at the end of the grid: the true best may be beyond it (`multiples=`)."
            )
        if not bool(self.solve.solve.converged.all()):
            told.append("The solve at the smallest λ did not converge: take small λ with caution.")
        return " ".join(told)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a row for each λ, largest first."""
        rows = zip(self.dampings, self.lds, strict=True)
        return data_frame(
            [{"damping": λ, "lds": each.value, "low": each.low, "high": each.high} for λ, each in rows]
        )

    def to_json(self) -> dict[str, Any]:
        """All numbers but the effects, for scripts."""
        return {
            "dampings": list(self.dampings),
            "lds": [{"value": each.value, "low": each.low, "high": each.high} for each in self.lds],
            "damping": self.damping,
            "setting": self.setting,
            "auto": self.auto,
            "gain": {"value": self.gain.value, "low": self.gain.low, "high": self.gain.high},
            "held_out": self.held_out,
            "sure": self.sure,
            "worthwhile": self.worthwhile,
            "halves": self.gain.first.num_subsets,
            "seeds": self.gain.first.num_seeds,
            "words": self.words(),
        }

    def __str__(self) -> str:
        lines = [f"{'λ':>10} {'of auto':>8} {'LDS':>7}  {_CONFIDENCE:.0%} interval"]
        for damping, each in zip(self.dampings, self.lds, strict=True):
            notes = {self.damping: "best", self.auto: "auto"}
            if self.damping == self.auto:
                notes = {self.auto: "auto, best"}
            lines.append(
                f"{damping:>10.4g} {damping / self.auto:>7.4g}× {each.value:>7.3f}  [{each.low:.3f}, {each.high:.3f}]  "
                f"{notes.get(damping, '')}".rstrip()
            )
        return "\n".join([*lines, "", self.words()])


@takes(MeasureOptions)
@one_at_a_time
@checked("model", "task", "params", "trainer", "halves", "seeds", "multiples", "directory", "options")
def tune(
    model: nn.Module,
    train_set: Any,
    queries: Any,
    trainer: Trainer,
    *,
    task: Task,
    params: ParameterFilter | None = None,
    training: Any = None,
    halves: int = 20,
    seeds: int = 1,
    multiples: Sequence[float] | None = None,
    processes: int = 1,
    directory: str | Path | None = None,
    name: str = "",
    options: MeasureOptions | None = None,
    **given: Any,
) -> Tuning:
    """Choose λ by what it is for: to predict the losses of models that were trained on random halves of the data.

    Args:
        model: as `whence.attribute` takes it; what ``trainer`` makes of all the data.
        train_set: its training data.
        queries: examples that scores are judged on, or `Questions`; many tell more of λ than few.
        trainer: ``trainer(subset, seed) -> model`` trains on the examples at these positions of ``train_set``.
        task: what outputs mean.
        params: which parameters, as for `whence.attribute`.
        training: how the model was trained, as for `whence.attribute`: decides the metric, and where the grid lies.
        halves: how many random halves of the data are trained on; at least 6.
        seeds: models trained on each half, whose losses are averaged. Where training depends much on its seed, more of
            them make a λ tell from its neighbours.
        multiples: the grid: λ in units of the one that ``damping="auto"`` takes; 1/32 … 64 by default. 1 is added.
        processes: models trained side by side, see `whence.validation.retrain`.
        directory: keeps what is done, so that the same call goes on after an interruption.
        name: of the trainer's settings: another name is another job, see `whence.validation.retrain`.
        options: all options at once; those given by keyword go before.
        **given: any of these options.

            {options}

    Raises:
        OptionError: halves or multiples are too few or no numbers, or queries × examples are above four million.
        DataError: the queries' losses are the same whatever half is trained on.

    Example:
        >>> from whence import Classification
        >>> data = [(torch.tensor([float(i % 7), 1.0]), int(i % 7 > 3)) for i in range(40)]
        >>> def trainer(subset, seed):
        ...     model = nn.Linear(2, 2)
        ...     x, y = torch.stack([data[i][0] for i in subset]), torch.tensor([data[i][1] for i in subset])
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     for _ in range(20):
        ...         optimizer.zero_grad()
        ...         nn.functional.cross_entropy(model(x), y).backward()
        ...         optimizer.step()
        ...     return model.eval()
        >>> found = tune(trainer(range(40), 0), data, data[:5], trainer, task=Classification(), halves=6)
        >>> len(found.lds), found.gain.value >= 0
        (12, True)
    """
    one_process("tune")
    check_mode(model)
    chosen = chosen_options(MeasureOptions, options, given)
    grid = _grid(multiples)
    if type(halves) is not int or not _LEAST_HALVES <= halves < 2**20:
        raise OptionError(
            f"halves is {halves!r}; λ is chosen on one part of them and judged on the rest, which needs at least "
            f"{_LEAST_HALVES}, better 20"
        )
    if type(seeds) is not int or not 1 <= seeds < 2**20:
        raise OptionError(f"seeds is {seeds!r}; say how many models to train on each half, at least 1")
    if not callable(trainer):
        raise OptionError(f"trainer is a {type(trainer).__name__}; give a function trainer(subset, seed)")
    place = None if directory is None else given_path(directory, "directory")
    solve = attribute(
        model,
        train_set,
        queries,
        task=task,
        params=params,
        training=training,
        run_dir=None if place is None else place / "solve",
        damping="auto" if grid[-1] == 1 else f"auto/{1 / grid[-1]:.12g}",
        solver="cg",
        baseline=False,
        shown=1,
        **{each.name: getattr(chosen, each.name) for each in fields(MeasureOptions)},
    )
    solve.over_damping(
        [solve.solve.plan.damping]
    )  # refuses what is too large for it before anything is trained
    asked = Questions.of(queries)
    subsets = half_subsets(solve.num_examples, halves, generator=chosen.generator(7))
    outcomes = retrain(
        trainer,
        subsets,
        range(seeds),
        replace(asked, queries=[asked.queries[position] for position in range(len(asked.queries))]),
        task=task,
        processes=processes,
        directory=None if place is None else place / "retraining",
        name=name,
    )
    auto = solve.solve.plan.damping / grid[-1]
    dampings = [auto * multiple for multiple in grid]
    return Tuning.of(solve, outcomes, auto=auto, dampings=dampings, generator=chosen.generator(8))


def _grid(multiples: Sequence[float] | None) -> list[float]:
    """Multiples of the automatic λ, falling, each once and 1 among them."""
    grid = sorted({1.0, *(_MULTIPLES if multiples is None else map(float, multiples))}, reverse=True)
    if len(grid) < 2 or not all(0 < multiple < float("inf") for multiple in grid):
        raise OptionError(f"multiples are {multiples}; give positive numbers beside 1, such as [0.25, 1, 4]")
    return grid


def _effects(solve: Attribution, damping: float) -> Tensor:
    """As `Attribution.effects`, for another λ: ``[queries, n]``."""
    over = solve.over_damping([damping])
    effects = torch.zeros_like(over.scores[0])
    effects[:, over.indices] = over.scores[0] * solve.terms.double() / solve.num_terms
    return effects


def _splits(count: int, generator: torch.Generator) -> Tensor:
    """Halves of the subsets, then what each leaves out, as rows of a `Bench`: ``[2 splits, subsets]``."""
    order = torch.stack([torch.randperm(count, generator=generator) for _ in range(_SPLITS)])
    first = (order < count // 2).double()
    return torch.cat([first, 1 - first])


def _held_out(lds: Tensor, own: int) -> float:
    """The mean gain over the λ at ``own`` of the best λ on one part, as the other has it; ``lds [λ, 2 splits]``."""
    other = lds.roll(_SPLITS, 1)
    return float((other.gather(0, lds.argmax(0, keepdim=True)) - other[own]).mean())
