"""`index`: what every later question needs, made once.

    metric → factors → spectrum → damping → fit → parts → calibration

It is what the quick answer of `whence.attribute` is made of, and for every training example the signs of its rotated
whitened gradient (`whence.index.signs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence.attribution.damping import in_metric, weigh
from whence.attribution.exhibits import Describe
from whence.attribution.identity import Portrait, model_identity, refuse_another
from whence.attribution.planning import SCALE, make_factors, measure_spectrum
from whence.attribution.scores import PartSize, part_of_minute
from whence.index.index import WAY, Calibration, Index, estimated, first_two, job_of, operator_of, options_of
from whence.index.parts import Part, make_parts, read_parts
from whence.index.whitened import Whitened
from whence.model.gauss_newton import GaussNewton
from whence.model.selection import ParameterFilter
from whence.operators import Damped, failures_become_typed
from whence.options import IndexOptions, chosen_options, takes
from whence.runs import Run, opened
from whence.runs.files import given_path
from whence.scoring import Scorer
from whence.scoring.cost import count_work
from whence.solvers.factored import Factored, Fit
from whence.tasks import Task
from whence.threads import one_at_a_time
from whence.training import Training

__all__ = ["index"]

#: Training examples that are asked about to find the answers' size and the estimates' error, and those that the error
#: is measured on.
_PILOTS, _CALIBRATED = 8, 256
#: Terms that the size is found from.
_FIT_TERMS = 16384


@takes(IndexOptions)
@one_at_a_time
@failures_become_typed()
def index(
    model: nn.Module,
    train: Any,
    *,
    task: Task,
    directory: str | Path,
    params: ParameterFilter | None = None,
    describe: Describe | None = None,
    tokenizer: Any = None,
    class_names: Sequence[str] | None = None,
    training: Any = None,
    on_run: Callable[[Run], None] | None = None,
    options: IndexOptions | None = None,
    **given: Any,
) -> Index:
    """Make what every later question needs, once; or go on with it, or add examples that have come to the data.

    Factors, spectrum and λ are of the data as they were at the beginning. Examples that are added later have scores by
    these, so an index of which a good part was added should be made anew.

    Args:
        model: as of `whence.attribute`; so are train, task, params and training.
        train: data that may have grown behind what is in the index.
        task: what the model's outputs mean.
        directory: where it is kept.
        params: which parameters.
        describe: what to show of an example.
        tokenizer: turns tokens into words.
        class_names: labels in words.
        training: how the model was trained.
        on_run: called with the run once the directory is open, to keep something there.
        options: all options at once; those given by keyword go before.
        **given: any of these options.

            {options}

    Example:
        >>> import tempfile
        >>> from whence import Classification
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(2, 3).eval()
        >>> train = [(torch.randn(2), i % 3) for i in range(30)]
        >>> made = index(model, train, task=Classification(), directory=tempfile.mkdtemp(), bytes=64)
        >>> made.ask(train[:1], rescored=10).estimates.shape
        torch.Size([1, 30])
    """
    chosen = chosen_options(IndexOptions, options, given)
    place = given_path(directory, "directory")
    gnh = operator_of(model, task, train, params, chosen)
    recipe = None if training is None else Training.read(training, model)
    identity = {**model_identity(gnh), "training": "" if recipe is None else recipe.identity}
    with Run(place, chosen.saved(), identity=identity) as run:
        if on_run is not None:
            on_run(run)
        now = Portrait.of(gnh, first_two(gnh))
        refuse_another(run.path, run.keep("model", Portrait, lambda: now), now)
        _make(run, gnh, chosen, recipe, identity)
    return Index.open(
        place, model, train, task=task, params=params, describe=describe, tokenizer=tokenizer,
        class_names=class_names,
    )  # fmt: skip


def _make(
    run: Run, gnh: GaussNewton, options: IndexOptions, training: Training | None, identity: dict[str, str]
) -> None:
    """All artifacts of an index."""
    terms = gnh.terms
    pilots = terms.spread(_PILOTS)
    asked = [terms.data[position] for position in pilots.tolist()]
    job = in_metric(run, job_of(gnh, asked, options_of(options), training=training, identity=identity))
    gnh = job.gnh
    factors = make_factors(run, job, WAY)
    assert factors is not None
    factors = factors.with_scale(SCALE)
    spectrum = measure_spectrum(run, job, factors)
    weighed = weigh(run, job, gnh.zeros(1), spectrum, halves=False, factors=factors)
    factors = factors.with_damping(weighed.damping)

    def fit() -> Fit:
        random = options.generator(9)
        some = gnh.subset(min(_FIT_TERMS, gnh.num_terms), random, distinct=True)
        solver = Factored(preconditioner=factors)
        return solver.fitted(Damped(some, weighed.damping), gnh.gradients(asked), generator=random)

    run.keep("fit", Fit, fit, operator=gnh)
    whitened = Whitened(gnh, factors, 8 * options.bytes, options.generator(10))
    cost = count_work(gnh, terms.fetch(terms.longest(2))).layers(1, norms=True)
    size = run.keep(
        "size", PartSize, lambda: PartSize(options.part_size or part_of_minute(cost, gnh.micro_batch))
    )
    make_parts(run, whitened, size.examples)

    def calibrated() -> Calibration:
        assert run.path is not None
        return _calibrate(whitened, pilots, read_parts(opened(run.path)))

    run.keep("calibration", Calibration, calibrated)


def _calibrate(whitened: Whitened, pilots: Tensor, parts: Sequence[Part]) -> Calibration:
    """Estimates beside scores, of pilots with other examples."""
    gnh = whitened.gnh
    some = gnh.terms.spread(_CALIBRATED)
    some = some[~torch.isin(some, pilots)]
    if len(some) == 0:
        return Calibration(1.0)
    gradients = gnh.gradients([gnh.terms.data[position] for position in pilots.tolist()])
    exact = Scorer(gnh, whitened.factors.solve(gradients)).score(some)
    rotated = whitened.of_gradients(gradients)
    found, sizes = estimated(parts, rotated)
    lengths = rotated.double().norm(dim=1, keepdim=True).cpu()
    expected = lengths * sizes[some].double()
    usual = expected > 1e-6 * expected.max()  # of an example without a gradient both are zero
    errors = ((found[:, some] - exact) / expected)[usual]
    return Calibration(max(float(errors.square().mean().sqrt()) if len(errors) else 1.0, 1e-6))
