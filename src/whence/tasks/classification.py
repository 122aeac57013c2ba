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

    Args:
        label_smoothing: ε, what of a label's weight is spread evenly over all classes.
        class_weights: ``[K]``; by default 1 for each. Means are over examples, not over their weights.

    Example:
        >>> import torch
        >>> task = Classification()
        >>> batch = task.collate([(torch.zeros(4), 1), (torch.ones(4), 0)])
        >>> task.losses(torch.zeros(2, 3), batch)
        tensor([1.0986, 1.0986])
        >>> Classification(class_weights=[1.0, 2.0, 1.0]).losses(torch.zeros(2, 3), batch)
        tensor([2.1972, 1.0986])
    """

    def check_targets(self, batch: Batch, width: int | None) -> None:
        if batch.targets.ndim > 1:
            raise DataError(
                f"labels have shape {tuple(batch.targets.shape)}; Classification reads one for each example. Use "
                "TokenClassification for one at every token, LanguageModeling or MaskedLanguageModeling for tokens "
                "themselves, BinaryClassification for several yes-or-no labels"
            )
        super().check_targets(batch, width)
        ignored = (batch.targets == IGNORED).nonzero()
        if len(ignored):  # every example is a term here, so an ignored one would be counted all the same
            raise DataError(
                f"{batch.name(int(ignored[0][0]))} has the label {IGNORED} (ignored); leave it out of the data"
            )
