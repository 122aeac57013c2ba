"""Classification: one label per example."""

from __future__ import annotations

from whence.tasks.categorical import CategoricalTask

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
