"""Classification: one label per example."""

from __future__ import annotations

from whence.errors import DataError
from whence.tasks.base import Batch
from whence.tasks.categorical import IGNORED, CategoricalTask

__all__ = ["Classification"]


class Classification(CategoricalTask):
    """Cross-entropy classification: logits ``[n, K]``, labels ``[n]``, one term per example.

    Examples are ``(x, y)`` or dicts with ``labels``; the model returns logits, or an object with ``.logits``
    as Hugging Face models do.

    Example:
        >>> import torch
        >>> task = Classification()
        >>> batch = task.collate([(torch.zeros(4), 1), (torch.ones(4), 0)])
        >>> task.losses(torch.zeros(2, 3), batch)
        tensor([1.0986, 1.0986])
    """

    def check_targets(self, batch: Batch, width: int | None) -> None:
        super().check_targets(batch, width)
        ignored = (batch.targets == IGNORED).nonzero()
        if len(ignored):  # every example is a term here, so an ignored one would be counted all the same
            raise DataError(
                f"{batch.name(int(ignored[0][0]))} has the label {IGNORED} (ignored); leave it out of the data"
            )
