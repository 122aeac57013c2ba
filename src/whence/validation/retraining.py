"""Retraining: the truth that influence estimates, one training run for every subset of the data and every seed.

    L[S, s, q] = ℓ(q; train(S, s))

What is computed depends on the job alone: not on how many processes share it, nor on their order, nor on how often
it was interrupted. So every run has one thread, and random numbers that begin at its seed.
"""

from __future__ import annotations

import itertools
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
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from whence.errors import DataError, ModelError, OptionError, WhenceError
from whence.model.data import TermSet
from whence.progress import ticker
from whence.runs import Run
from whence.runs.files import read_tensors, write_tensors
from whence.runs.fingerprint import of_data, of_value
from whence.tasks import Task
from whence.validation.outcomes import FILE, Outcomes, as_masks, half_subsets

__all__ = ["Outcomes", "Trainer", "half_subsets", "query_losses", "retrain"]

Place = tuple[int, int]  # of a training run: which subset, which seed


class Trainer(Protocol):
    """The user's training: what it returns must depend on its two arguments alone."""

    def __call__(self, subset: Sequence[int], seed: int, /) -> nn.Module:
        """Train on the examples at these positions of the training data (ascending) and return the model."""
        ...


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
        queries: a data set, items as the task reads them.
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
    masks = as_masks(subsets, num_examples)
    job = _Job(train, masks, _checked_seeds(seeds), queries, task, batch_size)
    _check(job, processes)
    payload = _pickled(job) if processes > 1 else b""
    places = list(itertools.product(range(len(masks)), range(len(job.seeds))))
    losses = torch.zeros(len(masks), len(job.seeds), len(queries), dtype=torch.float64)
    with _one_thread(), Run(directory, _config(job, name)) as run:
        todo = [place for place in places if not _read(run, job, place, losses)]
        found = _in_processes(payload, todo, processes) if processes > 1 else _here(job, todo)
        with ticker("retraining", len(places), done=len(places) - len(todo)) as tick, closing(found):
            for place, row in found:
                losses[place] = row
                if run.path is not None:
                    write_tensors(_piece(run.path, job, place), {"losses": row}, {})
                tick()
        outcomes = Outcomes(losses, masks, job.seeds)
        if run.path is not None:
            outcomes.save(run.path / FILE)
    return outcomes


def query_losses(model: nn.Module, queries: Any, task: Task, *, batch_size: int = 256) -> Tensor:
    """Each query's loss under a model, averaged over its terms, ``[queries]`` in float64."""
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    terms = TermSet(queries, task, torch.device("cpu") if tensor is None else tensor.device)
    losses = torch.zeros(len(terms), dtype=torch.float64)
    with torch.no_grad():
        for positions in terms.by_length(torch.arange(len(terms))).split(batch_size):
            batch = terms.fetch(positions)
            outputs = task.outputs(model, batch)
            task.check(outputs, batch)
            losses[positions] = task.query_losses(outputs, batch).double().cpu()
    return losses


# --- one training run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """Everything that training runs need beside their place among them."""

    train: Trainer
    masks: Tensor
    seeds: tuple[int, ...]
    queries: Any
    task: Task
    batch_size: int

    def run(self, place: Place) -> Tensor:
        """Train and measure: ``[queries]``."""
        subset = self.masks[place[0]].nonzero().flatten().tolist()
        seed = self.seeds[place[1]]
        which = f"subset {place[0]} ({len(subset):,} of {self.masks.shape[1]:,} examples) with seed {seed}"
        with _isolated(seed):
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
        bad = (~torch.isfinite(losses)).nonzero().flatten()
        if len(bad):
            raise ModelError(
                f"the model trained on {which} has the loss {float(losses[bad[0]])} on query {int(bad[0])}: its "
                "training diverged. Train with a smaller learning rate, or leave that query out"
            )
        return losses


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _isolated(seed: int) -> Iterator[None]:
    """One thread, and global random numbers that begin at the seed; both as they were afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        with _one_thread():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


# --- all of them -----------------------------------------------------------------------------------------------


def _here(job: _Job, todo: list[Place]) -> Generator[tuple[Place, Tensor]]:
    for place in todo:
        yield place, job.run(place)


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


def _pickled(job: _Job) -> bytes:
    """The job as bytes: ordinary copies, where multiprocessing would share the memory of tensors."""
    try:
        return pickle.dumps(job)
    except Exception:
        for name in ("train", "queries", "task"):
            try:
                pickle.dumps(getattr(job, name))
            except Exception as error:
                raise OptionError(
                    f"{name} cannot be pickled for other processes ({error}); define its functions and classes at the "
                    "top level of a module, or use processes=1"
                ) from error
        raise


_payload = b""
_job: _Job | None = None


def _start_worker(payload: bytes, dtype: str) -> None:
    global _payload
    _payload = payload
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, dtype))
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    """A parent that was killed cannot say that nobody waits for the results any more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(place: Place) -> list[float]:
    global _job, _payload
    if _job is None:
        try:
            _job = pickle.loads(_payload)
        except Exception as error:  # pickled by name, and this process has no such name
            raise OptionError(
                f"train, queries or task cannot be loaded in another process ({error}); define them in a module that "
                "can be imported, or use processes=1"
            ) from error
        _payload = b""
    result: list[float] = _job.run(place).tolist()
    return result


# --- the directory ---------------------------------------------------------------------------------------------


def _config(job: _Job, name: str) -> dict[str, Any]:
    count, n = job.masks.shape
    return {
        "job": "retraining",
        "name": name,
        "examples": n,
        "subsets": f"{count:,}: {of_value(job.masks)}",
        "seeds": ", ".join(map(str, job.seeds)),
        "queries": f"{len(job.queries):,}: {of_data(job.queries)}",
        "task": type(job.task).__name__,
        "batch_size": job.batch_size,
    }


def _piece(directory: Path, job: _Job, place: Place) -> Path:
    return directory / "losses" / f"subset-{place[0]:05d}-seed-{job.seeds[place[1]]}.safetensors"


def _read(run: Run, job: _Job, place: Place, losses: Tensor) -> bool:
    """Whether a training run was finished before; then its losses are put in their place."""
    if run.path is None or not (path := _piece(run.path, job, place)).exists():
        return False
    losses[place] = read_tensors(path)[0]["losses"]
    return True


# --- checks ----------------------------------------------------------------------------------------------------


def _checked_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    if isinstance(seeds, int):
        raise OptionError(f"seeds is {seeds}; give each of them, such as range({max(seeds, 1)})")
    checked = tuple(int(seed) for seed in seeds)
    if not checked or len(set(checked)) < len(checked) or min(checked) < 0:
        raise OptionError(f"seeds are {list(checked)}; give one or more different numbers from 0")
    return checked


def _check(job: _Job, processes: int) -> None:
    if not callable(job.train):
        raise OptionError(f"train is a {type(job.train).__name__}; give a function train(subset, seed)")
    for name, value in (("processes", processes), ("batch_size", job.batch_size)):
        if not isinstance(value, int) or value < 1:
            raise OptionError(f"{name} must be a whole number of at least 1, got {value}")
    terms = TermSet(job.queries, job.task, torch.device("cpu"))
    nothing = (terms.counts() == 0).nonzero().flatten()
    if len(nothing):
        raise DataError(
            f"query {int(nothing[0])} holds no term: every label is ignored or masked. Leave it out"
        )
    terms.look_through(len(terms))
