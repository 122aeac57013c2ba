"""`Ranks`: the processes that work on one question, and all that they say to each other.

Every process runs the same program on the same question. They differ in what they hold of every vector
(`whence.distributed.shards`) and in which examples they pass through the model; what is decided, they decide alike, as
every number that a decision rests on is a sum over all of them, and has the same bits on each. What only one can know,
the disk and the clock, the first of them tells the others.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from whence import errors
from whence.errors import RankError, WhenceError

__all__ = ["ALONE", "Ranks", "alone", "current", "one_process"]

T = TypeVar("T")

#: Under its newer name, where torch has that.
_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


#: Errors that are told by name.
_TYPED = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, WhenceError)
}


class Ranks:
    """The processes of torch.distributed's default group, or this one alone.

    Attributes:
        rank: of this process; the first, 0, reads and writes files.
        size: how many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    # --- numbers -----------------------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, on each with the same bits; may overwrite the tensor."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest over all processes, entry by entry; may overwrite the tensor."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def joined(self, numbers: Tensor, counts: Sequence[int]) -> Tensor:
        """Numbers of all processes, one after the other: so many of each."""
        if self.size == 1:
            return numbers
        padded = numbers.new_zeros(max(counts))
        padded[: len(numbers)] = numbers
        every = self.gathered(padded)
        return torch.cat([row[:count] for row, count in zip(every, counts, strict=True)])

    def gathered(self, tensor: Tensor) -> Tensor:
        """A tensor of one shape from every process: ``[size, *shape]``."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        mine = self._sent(tensor.contiguous())
        every = mine.new_empty(self.size * mine.numel())
        with self._talking():
            _gather(every, mine.reshape(-1))
        return every.reshape(self.size, *tensor.shape).to(tensor.device)

    def same(self, tensor: Tensor) -> Tensor:
        """The first one's numbers, written over the others'."""
        if self.size > 1:
            sent = self._sent(tensor.contiguous())
            with self._talking():
                dist.broadcast(sent, 0)
            tensor.copy_(sent)
        return tensor

    # --- words -------------------------------------------------------------------------------------------

    def told(self, function: Callable[[], T]) -> T:
        """What the function returns where it is called, on the first process alone; or what it raises, on all."""
        if self.size == 1:
            return function()
        found: list[Any] = [None, None]
        raised: BaseException | None = None
        if self.rank == 0:
            try:
                found[0] = function()
            except Exception as error:
                raised, found[1] = error, _said(error)
        with self._talking():
            dist.broadcast_object_list(found, src=0)
        if raised is not None:
            raise raised
        if found[1] is not None:
            raise _again(*found[1])
        value: T = found[0]
        return value

    def agree(self, what: str, value: object) -> None:
        """Refuse to go on where another process has another value: a model of other weights, other options.

        Raises:
            RankError: on all processes.
        """
        if self.size == 1:
            return
        every: list[Any] = [None] * self.size
        with self._talking():
            dist.all_gather_object(every, hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest())
        others = [rank for rank, theirs in enumerate(every) if theirs != every[0]]
        if others:
            raise RankError(
                f"the processes do not agree on {what}: rank {others[0]} has another than rank 0. All of them must "
                "make the same call, with the same weights, data and options (seed random initialisation, and load the "
                "same files)"
            )

    # --- how ---------------------------------------------------------------------------------------------

    def _reduced(self, tensor: Tensor, how: Any) -> Tensor:
        if self.size == 1:
            return tensor
        sent = self._sent(tensor.contiguous())
        with self._talking():
            dist.all_reduce(sent, how)
        return sent.to(tensor.device)

    @staticmethod
    def _sent(tensor: Tensor) -> Tensor:
        """Where the group's backend can read it: NCCL reads no memory but the devices'."""
        if dist.get_backend() == "nccl" and tensor.device.type == "cpu":
            return tensor.cuda()
        return tensor

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """A process that is lost becomes a `RankError`."""
        try:
            yield
        except (
            RuntimeError
        ) as error:  # torch's own for a closed connection, and for one that is silent for too long
            if isinstance(error, WhenceError):
                raise
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RankError(
                f"rank {self.rank} of {self.size} lost another one, which ended or does not answer ({first:.200}). See "
                "what that one said; the same call, on as many processes as you like, goes on from the run directory"
            ) from error


#: This process, with no others.
ALONE = Ranks()

_apart: list[None] = []


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """In here whence works in this process alone, whatever process group there is.

    Example:
        >>> with alone():
        ...     current().size
        1
    """
    _apart.append(None)
    try:
        yield
    finally:
        _apart.pop()


def current() -> Ranks:
    """All processes of the default group, where there is one; else this process alone."""
    if _apart or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    return Ranks(dist.get_rank(), dist.get_world_size())


def one_process(what: str) -> None:
    """Refuse several processes, for what is done by one.

    Raises:
        RankError: there are several.
    """
    if current().size > 1:
        raise RankError(
            f"{what} works in one process, and there are {current().size}. Call it in one of them alone, inside `with "
            "whence.distributed.alone():`, with a model that this one holds whole"
        )


def _said(error: Exception) -> tuple[str, str]:
    """An error as other processes are told it: by name and message."""
    return type(error).__name__, str(error)


def _again(name: str, message: str) -> WhenceError:
    """The error that was told; one that is not whence's own is a `RankError` on the other processes."""
    kind: type[WhenceError] | None = _TYPED.get(name)
    return RankError(f"rank 0 failed: {name}: {message}") if kind is None else kind(message)
