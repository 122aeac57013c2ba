"""Several checkpoints: each is attributed by a run of its own, one after the other, and their scores are averaged.

The run directory of several holds a run directory for each, called after the fingerprint of its weights. So it does not
matter in which order they are given, and when one more is given later, it alone is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence.attribution.checkpoint import Checkpoint
from whence.attribution.doubts import told
from whence.attribution.ranking import ends_of_rankings, top_is_separated
from whence.attribution.result import Attribution, Solve, load
from whence.attribution.scored import Scored, half_width
from whence.distributed import one_process
from whence.errors import DataError, ModelError, OptionError, RunDirectoryError
from whence.exhibit import Exhibit
from whence.options import Options, Until
from whence.runs import Run, differences, environment
from whence.runs.fingerprint import of_model
from whence.solvers.base import ErrorParts

__all__ = ["Models", "attribute_several", "joined"]

#: A model, or a function that makes one.
Maker = nn.Module | Callable[[], nn.Module]
#: Several of them, by their names or in turn.
Models = Mapping[str, Maker] | Sequence[Maker]
#: What all checkpoints must be asked about.
_SHARED = ("task", "train", "queries", "asked", "candidates", "groups")


def attribute_several(
    one: Callable[..., Attribution],
    models: Models,
    training: Any,
    *,
    options: Options,
    place: Path | None,
    on_run: Callable[[Run], None] | None,
    show: Callable[[int], Exhibit],
) -> Attribution:
    """The mean of the models' attributions; of a single one its own.

    Args:
        one: ``one(model, training=…, run_dir=…, on_run=…)`` attributes a model.
        models: see `Models`. What a function makes is held only while it is attributed.
        training: as `whence.attribute` takes it: for all of them, or a list with one for each.
        options: those of the run.
        place: of the run.
        on_run: called with the run of all of them.
        show: what to show of a training example.
    """
    one_process("attribute of several checkpoints")
    members = _members(models, training)
    done: dict[str, tuple[str, Attribution]] = {}
    with Run(place, options.saved(), identity={"checkpoints": "several"}) as run:
        if on_run is not None:
            on_run(run)

        def same_question(inner: Run) -> None:
            about = {name: inner.identity[name] for name in _SHARED}
            found = list(differences(run.keep("about", dict[str, str], lambda: about), about))
            if found:
                raise RunDirectoryError(
                    f"{run.path} holds checkpoints that were asked about something else ({'; '.join(found)}). Give "
                    "another directory, or the same data, queries and task to add a checkpoint"
                )

        for name, maker, recipe in members:
            model = _made(name, maker)
            key = of_model(model)
            if key in done:
                raise OptionError(
                    f"checkpoints {done[key][0]} and {name} are the same: their weights do not differ. Give each once, "
                    "since their spread is taken for that of training"
                )
            inside = run.inside(f"checkpoint-{key}")
            done[key] = name, one(model, training=recipe, run_dir=inside, on_run=same_question)
            del model
            if run.path is not None and len(done) < len(members) and not run.has("result"):
                run.put("quick", Attribution, _mean(done, show))
        result = _mean(done, show)
        if run.path is not None and run.has("result") and _about(load(run.path)) == _about(result):
            return load(run.path)  # also where nothing can be written
        result = run.put("result", Attribution, result)
        run.drop("quick")
        return result


def joined(
    results: Mapping[str, Attribution], *, show: Callable[[int], Exhibit] | None = None
) -> Attribution:
    """The mean of several models' attributions, which may come from different machines.

    Args:
        results: by the checkpoints' names, all about the same data and queries, with everything scored that any has.
        show: what to show of a training example that none of them shows.

    Raises:
        OptionError: there is one only, or some are means themselves.
        DataError: they are about different things.
    """
    names, parts = list(results), list(results.values())
    if len(parts) < 2 or any(part.checkpoints for part in parts):
        raise OptionError("give the attributions of two or more single models")
    first = parts[0]
    _check_alike(results)
    scores = torch.stack([part.scored.mean for part in parts])
    # of each the interval's width, which chains widen by Student's t; taken to point the same way in all
    normal = float(half_width(torch.ones((), dtype=torch.float64), math.inf, 0.95))
    errors = torch.stack([part.scored.half_width(0.95) for part in parts]).mean(0) / normal
    dots = [part.dot_products for part in parts if part.dot_products is not None]
    dot_products = torch.stack(dots).mean(0) if len(dots) == len(parts) else None
    norms = [part.norms for part in parts if part.norms is not None]
    settings = {
        name: value
        for name, value in first.settings.items()
        if all(part.settings.get(name) == value for part in parts)
    }
    ends = ends_of_rankings(scores, dot_products, int(settings.get("shown") or 20))
    shown = {int(first.indices[position]) for end in ends for position in end}
    known = {index: exhibit for part in parts for index, exhibit in part.exhibits.items()}
    return Attribution(
        chain_scores=scores,
        indices=first.indices,
        terms=first.terms,
        num_examples=first.num_examples,
        num_terms=first.num_terms,
        dot_products=dot_products,
        query_losses=torch.stack([part.query_losses for part in parts]).mean(0),
        query_products=torch.stack([part.query_products.mean(0) for part in parts]),
        query_dots=torch.stack([part.query_dots for part in parts]).mean(0),
        solve=_solve(results, _separation(Scored(scores, errors), settings.get("until"))),
        queries=tuple(_asked(exhibits) for exhibits in zip(*(part.queries for part in parts), strict=True)),
        exhibits={
            index: known[index] if index in known or show is None else show(index)
            for index in sorted(shown)
            if index in known or show is not None
        },
        token_scores=_token_scores(parts, ends, first.indices),
        not_scored=first.not_scored,
        score_method="; ".join(told({name: [part.score_method] for name, part in results.items()})),
        title=first.title,
        settings=settings,
        versions=environment(),
        seconds=_summed([part.seconds for part in parts]),
        norms=torch.stack(norms).mean(0) if len(norms) == len(parts) else None,
        grouping=None if first.grouping is None else replace(first.grouping, norms=None),
        checkpoints=tuple(
            Checkpoint(
                name=name,
                model=str(part.settings.get("model", "")),
                solver=part.solve.solver,
                damping=part.solve.plan.damping,
                damping_words=part.solve.damping_words,
                converged=part.solve.ended_well,
                residual=part.solve.residual,
                losses=part.query_losses,
                doubts=part.doubts,
            )
            for name, part in zip(names, parts, strict=True)
        ),
        solver_errors=errors,
    )


# --- which models --------------------------------------------------------------------------------------------


def _members(models: Models, training: Any) -> list[tuple[str, Maker, Any]]:
    """Name, model and recipe of each."""
    if not models:
        raise OptionError("there are no checkpoints in the list; give at least one model")
    if isinstance(models, Mapping):
        names, makers = [str(name) for name in models], list(models.values())
    else:
        names, makers = [str(place) for place in range(1, len(models) + 1)], list(models)
    for name, maker in zip(names, makers, strict=True):
        if not callable(maker) or isinstance(maker, type):
            raise ModelError(
                f"checkpoint {name} is a {type(maker).__name__}; give modules, or functions without arguments that "
                "make them"
            )
    if isinstance(training, (list, tuple)):
        if len(training) != len(makers):
            raise OptionError(
                f"training has {len(training)} entries for {len(makers)} checkpoints; give one for each, in their "
                "order, or one for all"
            )
        recipes = list(training)
    else:
        recipes = [training] * len(makers)
        if isinstance(training, torch.optim.Optimizer) and len(makers) > 1:
            raise OptionError(
                "training is an optimizer, whose state is of one model; give a list with one for each checkpoint"
            )
    return list(zip(names, makers, recipes, strict=True))


def _made(name: str, maker: Maker) -> nn.Module:
    model = maker if isinstance(maker, nn.Module) else maker()
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the function of checkpoint {name} returned a {type(model).__name__}; it must return a torch.nn.Module"
        )
    return model


def _mean(done: Mapping[str, tuple[str, Attribution]], show: Callable[[int], Exhibit]) -> Attribution:
    """Of those that are done, in the order of their fingerprints, which is the same however they were given."""
    found = {name: result for _, (name, result) in sorted(done.items())}
    return next(iter(found.values())) if len(found) == 1 else joined(found, show=show)


def _about(result: Attribution) -> list[str]:
    """The fingerprints of its models."""
    return [each.model for each in result.checkpoints] or [str(result.settings["model"])]


def _check_alike(results: Mapping[str, Attribution]) -> None:
    (before, first), *others = results.items()
    for name, other in others:
        found = [what for what in _SHARED if first.settings.get(what, "") != other.settings.get(what, "")]
        same = first.num_terms == other.num_terms and len(first.queries) == len(other.queries)
        same = same and torch.equal(first.indices, other.indices) and torch.equal(first.terms, other.terms)
        if found or not same:
            raise DataError(
                f"checkpoints {before} and {name} were asked about different things "
                f"({', '.join(found) or 'examples'}): scores are averaged where data, queries and task are the same"
            )


# --- what is known of all of them ------------------------------------------------------------------------------


def _solve(results: Mapping[str, Attribution], said: str) -> Solve:
    """How the solves fared, together."""
    solves = {name: result.solve for name, result in results.items()}
    every = list(solves.values())
    events = told({name: solve.events for name, solve in solves.items()})
    ended_well = torch.stack([solve.ended_well for solve in every]).all(0)
    parts = [solve.error_parts for solve in every]
    expected = [part.expected for part in parts if part.expected is not None]

    def largest(of: Sequence[Tensor]) -> Tensor:
        return torch.stack([each.double() for each in of]).amax(0)

    return Solve(
        solver=" and ".join(sorted({solve.solver for solve in every})),
        residual=largest([solve.residual for solve in every]),
        residual_stderr=largest([solve.residual_stderr for solve in every]),
        converged=torch.stack([solve.converged for solve in every]).all(0),
        num_products=sum(solve.num_products for solve in every),
        num_term_products=sum(solve.num_term_products for solve in every),
        events=(*events, *filter(None, [said])),
        paths=torch.zeros(0, 0, len(ended_well)),
        error_parts=ErrorParts(
            bias=largest([part.bias for part in parts]),
            sampling=largest([part.sampling for part in parts]),
            certificate=largest([part.certificate for part in parts]),
            expected=largest(expected) if len(expected) == len(every) else None,
        ),
        plan=every[0].plan,
        choice=" ".join(told({name: list(filter(None, [solve.choice])) for name, solve in solves.items()})),
        by_curvature=any(solve.by_curvature for solve in every),
        damping_words=" ".join(told({name: [solve.damping_words] for name, solve in solves.items()})),
        in_metric=any(solve.in_metric for solve in every),
        limited=bool(ended_well.all()) and any(solve.limited for solve in every),
    )


def _separation(scored: Scored, asked: Any) -> str:
    """What became of ``until`` for the mean, in words."""
    if asked is None:
        return ""
    until, count = Until.parse(str(asked)), len(scored.chains)
    separated = top_is_separated(scored, until.k, until.confidence)
    return (
        f"By the mean over {count} checkpoints, with both of its errors, the {until.k} most helpful examples are "
        f"separated from the rest at a confidence of {until.confidence:g} for {int(separated.sum())} of "
        f"{len(separated)} queries. More solving narrows the solver’s error alone, more checkpoints their spread."
    )


def _asked(exhibits: Sequence[Exhibit]) -> Exhibit:
    """A query, with all that the checkpoints say of it."""
    said = list(dict.fromkeys(exhibit.prediction for exhibit in exhibits if exhibit.prediction))
    return replace(exhibits[0], prediction="; ".join(said) if said else None)


def _token_scores(
    parts: Sequence[Attribution], ends: Sequence[Sequence[int]], indices: Tensor
) -> dict[tuple[int, int], tuple[float, ...]]:
    """Tokens' shares: the mean over the checkpoints that have the example at an end of their own ranking."""
    found = {}
    for q, end in enumerate(ends):
        for index in indices[list(end)].tolist():
            rows = [part.token_scores[q, index] for part in parts if (q, index) in part.token_scores]
            if rows and len({len(row) for row in rows}) == 1:
                found[q, index] = tuple(math.fsum(column) / len(rows) for column in zip(*rows, strict=True))
    return found


def _summed(of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = list(dict.fromkeys(name for each in of for name in each))
    return {name: math.fsum(each.get(name, 0.0) for each in of) for name in names}
