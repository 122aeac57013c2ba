"""Retraining: the truth that influence estimates, one training run for every subset of the data and every seed.

    L[S, s, q] = ℓ(q; train(S, s))

What is computed depends on the job alone: not on how many processes share it, nor on their order, nor on how often
it was interrupted. So every run has one thread, and random numbers that begin at its seed.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import pickle
import random
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from whence.errors import DataError, ModelError, OptionError, RunDirectoryError, WhenceError
from whence.model.data import TermSet
from whence.progress import ticker
from whence.runs import Run, holds, read, read_value, write_value
from whence.runs.files import given_path
from whence.runs.fingerprint import of_data, of_value
from whence.tasks import Questions, Task
from whence.threads import one_at_a_time
from whence.validation.statistics import standard_error

__all__ = ["Outcomes", "Trainer", "as_masks", "half_subsets", "mask_of", "query_losses", "retrain"]

Place = tuple[int, int]  # of a training run: which subset, which seed


@dataclass(frozen=True)
class Outcomes:
    """Losses of queries under models trained on subsets of the data.

    Attributes:
        losses: in nats, ``[subsets, seeds, queries]`` in float64.
        subsets: which examples each subset holds, ``[subsets, n]`` of bool.
        seeds: of the training runs; every subset was trained on with each of them.
    """

    losses: Tensor
    subsets: Tensor
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.subsets.ndim != 2 or self.subsets.dtype != torch.bool:
            raise OptionError(
                f"subsets are {self.subsets.dtype} of shape {tuple(self.subsets.shape)}; give a mask, bool of shape "
                "[subsets, n]"
            )
        if self.losses.ndim != 3 or self.losses.shape[:2] != (len(self.subsets), len(self.seeds)):
            raise OptionError(
                f"losses have shape {tuple(self.losses.shape)} for {len(self.subsets)} subsets and "
                f"{len(self.seeds)} seeds; it must be [subsets, seeds, queries]"
            )
        for subset, seed, query in (~torch.isfinite(self.losses)).nonzero().tolist():
            raise OptionError(
                f"the loss of query {query} is {float(self.losses[subset, seed, query])} for subset {subset} and seed "
                f"{self.seeds[seed]}; leave that query out, or repair the training"
            )

    @property
    def mean(self) -> Tensor:
        """Over seeds, ``[subsets, queries]``."""
        return self.losses.mean(1)

    @property
    def stderr(self) -> Tensor:
        """Standard errors of `mean`, ``[subsets, queries]``; NaN where there is only one seed."""
        return standard_error(self.losses, 1)

    def save(self, path: str | Path) -> Path:
        """Write one file (safetensors); `load` reads it back."""
        place = given_path(path, "path")
        write_value(place, self)
        return place

    @classmethod
    def load(cls, path: str | Path) -> Outcomes:
        """Read what `save` wrote, or the directory of a finished `retrain`."""
        place = given_path(path, "path")
        if not place.is_dir():
            return read_value(place, cls)
        if not holds(path, "outcomes"):
            raise RunDirectoryError(
                f"{path} holds no finished retraining. Run the same job again to go on with it"
            )
        return read(path, "outcomes", cls)


class Trainer(Protocol):
    """The user's training: what it returns must depend on its two arguments alone."""

    def __call__(self, subset: Sequence[int], seed: int, /) -> nn.Module:
        """Train on the examples at these positions of the training data (ascending) and return the model."""
        ...


@one_at_a_time
def retrain(
    train: Trainer,
    subsets: Tensor | Sequence[Sequence[int]],
    seeds: Sequence[int],
    queries: Any,
    *,
    task: Task,
    num_examples: int | None = None,
    batch_size: int = 256,
    processes: int = 1,
    directory: str | Path | None = None,
    name: str = "",
) -> Outcomes:
    """Train on every subset with every seed, and measure the queries' losses under each model.

    The models are put into evaluation mode, measured and let go. The result is the same bit for bit whatever the
    number of processes; random numbers that ``train`` takes from Python, numpy or torch without seeding them begin
    at the seed, and the caller's are as before afterwards.

    Args:
        train: the user's training; see `Trainer`.
        subsets: a mask ``[subsets, n]`` of bool, as `half_subsets` gives, or a list of positions for each subset.
        seeds: different numbers from 0; each is used with every subset.
        queries: a data set, items as the task reads them, or `Questions`.
        task: gives the queries' losses (`Task.query_losses`: the mean over an example's terms).
        num_examples: n; needed where subsets are lists.
        batch_size: queries at a time.
        processes: how many train side by side, each with one thread and its own copy of ``train``, ``queries``
            and ``task``, which must be picklable. A trainer of large data had better hold their path.
        directory: where to keep what is finished, so that the same call goes on after an interruption. A directory
            of another job is refused.
        name: of the training's settings. Functions cannot be compared, so a directory is known to belong to
            another *trainer* by this name alone.

    Raises:
        ModelError: a training run failed, or its model's losses are NaN or infinite; says which.
    """
    if isinstance(seeds, int):
        raise OptionError(f"seeds is {seeds}; give each of them, such as range({max(seeds, 1)})")
    masks, queries = as_masks(subsets, num_examples), Questions.of(queries)
    job = _Job(train, masks, tuple(int(seed) for seed in seeds), queries, task, batch_size)
    job.check(processes)
    payload = job.pickled() if processes > 1 else b""
    places = list(itertools.product(range(len(masks)), range(len(job.seeds))))
    losses = torch.zeros(len(masks), len(job.seeds), len(queries), dtype=torch.float64)
    with _alone(), Run(directory, job.config(name), identity={}) as run:
        finished = {place for place in places if run.has(job.piece(place))}
        for place in finished:
            losses[place] = torch.from_numpy(run.keep_table(job.piece(place), dict)["loss"])
        todo = [place for place in places if place not in finished]
        here = ((place, job.run(place)) for place in todo)
        found = _in_processes(payload, todo, processes) if processes > 1 else here
        with ticker("retraining", len(places), done=len(finished)) as tick, closing(found):
            for place, row in found:
                losses[place] = row
                run.keep_table(job.piece(place), partial(dict, loss=row.numpy()))
                tick()
        return run.keep("outcomes", Outcomes, lambda: Outcomes(losses, masks, job.seeds))


def query_losses(model: nn.Module, queries: Any, task: Task, *, batch_size: int = 256) -> Tensor:
    """Each query's loss under a model, averaged over its terms, or what else is asked, ``[queries]`` in float64."""
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    parts = Questions.of(queries).parts(task)
    terms = TermSet(parts.examples, task, torch.device("cpu") if tensor is None else tensor.device)
    losses = torch.zeros(len(terms), dtype=torch.float64)
    with torch.no_grad():
        for positions in terms.by_length(torch.arange(len(terms))).split(batch_size):
            batch = terms.fetch(positions)
            outputs = task.outputs(model, batch)
            task.check(outputs, batch)
            losses[positions] = parts.worth(outputs, batch).double().cpu()
    return parts.together(losses)


# --- subsets ---------------------------------------------------------------------------------------------------


def half_subsets(n: int, count: int, *, fraction: float = 0.5, generator: torch.Generator) -> Tensor:
    """Random subsets of ``round(fraction · n)`` out of ``n`` examples, ``[count, n]`` of bool.

    Example:
        >>> half_subsets(10, 3, generator=torch.Generator().manual_seed(0)).sum(1)
        tensor([5, 5, 5])
    """
    if count < 1:
        raise OptionError(f"count is {count}; ask for at least one subset")
    size = round(fraction * n) if math.isfinite(fraction) else 0
    if not 1 <= size < n:
        raise OptionError(
            f"a fraction {fraction} of {n} examples is {size} of them; a subset needs at least one and not all"
        )
    masks = torch.zeros(count, n, dtype=torch.bool)
    for row in masks:
        row[torch.randperm(n, generator=generator, device=generator.device)[:size].cpu()] = True
    return masks


def as_masks(subsets: Tensor | Sequence[Sequence[int]], num_examples: int | None) -> Tensor:
    """Subsets, given as a mask or as lists of positions, as a mask ``[subsets, n]`` of bool."""
    if len(subsets) == 0:
        raise OptionError("there is no subset to train on; give at least one")
    if isinstance(subsets, Tensor) and subsets.dtype == torch.bool and subsets.ndim == 2:
        if num_examples not in (None, subsets.shape[1]):
            raise OptionError(
                f"the subsets are of {subsets.shape[1]} examples, num_examples is {num_examples}; give one of them"
            )
        masks = subsets.cpu().clone()
    elif num_examples is None:
        raise OptionError(
            "subsets are lists of positions, which do not tell how many examples there are; give num_examples, or a "
            "mask of bool, [subsets, n]"
        )
    else:
        masks = torch.stack([mask_of(s, num_examples, f"subset {k}") for k, s in enumerate(subsets)])
    for number in (~masks.any(1)).nonzero().flatten().tolist():
        raise OptionError(f"subset {number} is empty; there is nothing to train on")
    return masks


def mask_of(positions: Any, num_examples: int, what: str) -> Tensor:
    """Positions of examples, each of them within the data and given once, as a mask ``[n]`` of bool."""
    positions = torch.as_tensor(positions).reshape(-1)
    if positions.numel() and (positions.is_floating_point() or positions.dtype == torch.bool):
        raise OptionError(f"{what} holds {positions.dtype}; give positions in the training data")
    positions = positions.long()
    for outside in positions[(positions < 0) | (positions >= num_examples)].tolist():
        raise OptionError(
            f"{what} holds the position {outside}; with {num_examples} examples they are 0..{num_examples - 1}"
        )
    times = torch.bincount(positions, minlength=num_examples)
    for twice in (times > 1).nonzero().flatten().tolist():
        raise OptionError(f"{what} holds position {twice} more than once; give each example once")
    return times > 0


# --- training runs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """Everything that training runs need beside their place among them."""

    train: Trainer
    masks: Tensor
    seeds: tuple[int, ...]
    queries: Questions
    task: Task
    batch_size: int

    def check(self, processes: int) -> None:
        """Refuse what cannot work before anything is trained."""
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise OptionError(f"seeds are {list(self.seeds)}; give one or more different numbers from 0")
        if not callable(self.train):
            raise OptionError(f"train is a {type(self.train).__name__}; give a function train(subset, seed)")
        for name, value in (("processes", processes), ("batch_size", self.batch_size)):
            if not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} must be a whole number of at least 1, got {value}")
        parts = self.queries.parts(self.task)
        terms = TermSet(parts.examples, self.task, torch.device("cpu"))
        for position in (terms.counts() == 0).nonzero().flatten().tolist():
            raise DataError(
                f"{parts.name(position)} holds no term: every label is ignored or masked. Leave it out"
            )
        terms.look_through(len(terms))

    def config(self, name: str) -> dict[str, Any]:
        """What a directory is known by."""
        count, n = self.masks.shape
        return {
            "job": "retraining",
            "name": name,
            "examples": n,
            "subsets": f"{count:,}: {of_value(self.masks)}",
            "seeds": ", ".join(map(str, self.seeds)),
            "queries": f"{len(self.queries):,}: {of_data(self.queries.data)}",
            "task": type(self.task).__name__,
            "batch_size": self.batch_size,
        }

    def piece(self, place: Place) -> str:
        """What the losses of one training run are called in a directory."""
        return f"losses/subset-{place[0]:05d}-seed-{self.seeds[place[1]]}"

    def run(self, place: Place) -> Tensor:
        """Train and measure: ``[queries]``. Changes the global random numbers and the number of threads."""
        subset = self.masks[place[0]].nonzero().flatten().tolist()
        seed = self.seeds[place[1]]
        which = f"subset {place[0]} ({len(subset):,} of {self.masks.shape[1]:,} examples) with seed {seed}"
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            model = self.train(subset, seed)
        except Exception as error:
            raise ModelError(
                f"training on {which} failed ({type(error).__name__}: {error}); repair `train`, and the same "
                "call goes on from what its directory keeps"
            ) from error
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"training on {which} returned a {type(model).__name__}; `train` must return the trained module"
            )
        torch.set_num_threads(1)  # the user's training may have asked for more
        losses = query_losses(model.eval(), self.queries, self.task, batch_size=self.batch_size)
        for query in (~torch.isfinite(losses)).nonzero().flatten().tolist():
            raise ModelError(
                f"the model trained on {which} has the loss {float(losses[query])} on query {query}: its "
                "training diverged. Train with a smaller learning rate, or leave that query out"
            )
        return losses

    def pickled(self) -> bytes:
        """As bytes: ordinary copies, where multiprocessing would share the memory of tensors."""
        for name in ("train", "queries", "task"):
            try:
                pickle.dumps(getattr(self, name))
            except Exception as error:
                raise OptionError(
                    f"{name} cannot be pickled for other processes ({error}); define its functions and classes at "
                    "the top level of a module, or use processes=1"
                ) from error
        return pickle.dumps(self)


@contextmanager
def _alone() -> Iterator[None]:
    """One thread; afterwards its number and the global random numbers are as they were."""
    threads, python, of_numpy = torch.get_num_threads(), random.getstate(), np.random.get_state()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(of_numpy)


# --- processes -------------------------------------------------------------------------------------------------


def _in_processes(payload: bytes, todo: list[Place], processes: int) -> Generator[tuple[Place, Tensor]]:
    """Results as they come. After a failure nothing is begun any more, but what is under way is not lost."""
    if not todo:
        return
    executor = ProcessPoolExecutor(
        min(processes, len(todo)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(payload, str(torch.get_default_dtype()).removeprefix("torch.")),
    )
    waiting, running = iter(todo), dict[Future[list[float]], Place]()
    failure: BaseException | None = None
    try:
        while True:
            # No more than are trained at once: what the executor has queued could not be taken back.
            if failure is None:
                for place in itertools.islice(waiting, processes - len(running)):
                    running[executor.submit(_work, place)] = place
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                place = running.pop(future)
                error = future.exception()
                if error is None:
                    yield place, torch.tensor(future.result(), dtype=torch.float64)
                else:
                    failure = failure or error
    except BrokenProcessPool as error:  # while handing out work
        failure = error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
    if isinstance(failure, BrokenProcessPool):
        raise WhenceError(
            "a process that was training ended abruptly: it was killed (for its memory?) or could not start (a script "
            "that starts processes needs `if __name__ == '__main__':`). Use fewer processes, or processes=1"
        ) from failure
    if failure is not None:
        raise failure


_job: _Job | WhenceError  # of a worker, or why it has none


def _start_worker(payload: bytes, dtype: str) -> None:
    global _job
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, dtype))
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        _job = pickle.loads(payload)
    except Exception as error:  # pickled by name, and this process has no such name
        _job = OptionError(
            f"train, queries or task cannot be loaded in another process ({error}); define them in a module that "
            "can be imported, or use processes=1"
        )


def _end_with_the_parent() -> None:
    """A parent that was killed cannot say that nobody waits for the results any more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(place: Place) -> list[float]:
    if isinstance(_job, WhenceError):
        raise _job
    result: list[float] = _job.run(place).tolist()
    return result
