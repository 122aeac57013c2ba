"""Direct preference optimisation: one term per pair of completions, of which one was chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import DataError, OptionError
from whence.tasks.base import Batch, accepts, read_outputs, without_cache
from whence.tasks.binary import BinaryClassification
from whence.tasks.categorical import IGNORED
from whence.tasks.collate import pad

__all__ = ["Preference"]

_SIDES = ("chosen", "rejected")


class Preference(BinaryClassification):
    """The loss of direct preference optimisation, of pairs of completions of one prompt.

    With the log-probability ``L(y) = Σ_j log p(y_j | x, y_<j)`` of a completion, and that of the reference model, L°,

        h = β (L(chosen) - L(rejected) - r),   r = L°(chosen) - L°(rejected)
        ℓ = -log σ(h),     S = σ(h) (1 - σ(h))

    The output is the margin h, in which ℓ is convex; in the logits it is not. So ``H = (1/n) Σ S ∇h ∇hᵀ``, one term per
    pair. The reference does not depend on the parameters, so all of it is the number r.

    Examples are dicts of ``chosen_ids`` and ``rejected_ids`` (prompt and completion), ``chosen_labels`` and
    ``rejected_labels`` (the same, -100 where a token belongs to the prompt), and ``reference``: r. See `pair`.

    Args:
        beta: β.

    Example:
        >>> task = Preference(beta=0.1)
        >>> pair = task.pair(prompt=[5, 6], chosen=[7, 8], rejected=[9], reference=-0.5)
        >>> pair["rejected_labels"].tolist()
        [-100, -100, 9]
    """

    measures = ("margin",)

    def __init__(self, *, beta: float = 0.1) -> None:
        super().__init__()
        if not 0 < beta < float("inf"):
            raise OptionError(f"beta is {beta}; it must be a positive number")
        self.beta = float(beta)

    def settings(self) -> Mapping[str, object]:
        return {"beta": self.beta}

    @staticmethod
    def pair(
        prompt: Sequence[int], chosen: Sequence[int], rejected: Sequence[int], *, reference: float
    ) -> dict[str, Tensor]:
        """An example from token ids, and r."""
        fields = {"reference": torch.tensor(float(reference))}
        for side, completion in zip(_SIDES, (chosen, rejected), strict=True):
            ids = torch.tensor([*prompt, *completion])
            fields[f"{side}_ids"], fields[f"{side}_labels"] = ids, ids.clone()
            fields[f"{side}_labels"][: len(prompt)] = IGNORED
        return fields

    def collate(self, examples: Sequence[Any]) -> Batch:
        fields: dict[str, Tensor] = {}
        wanted = {"reference", *(f"{side}_{kind}" for side in _SIDES for kind in ("ids", "labels"))}
        for position, example in enumerate(examples):
            if not isinstance(example, Mapping) or not wanted <= set(example):
                found = sorted(example) if isinstance(example, Mapping) else type(example).__name__
                raise DataError(
                    f"example {position} of the batch has {found}; Preference reads {sorted(wanted)}, as "
                    "Preference.pair makes them"
                )
        for side in _SIDES:
            ids, labels = (
                [torch.as_tensor(example[f"{side}_{kind}"]).long() for example in examples]
                for kind in ("ids", "labels")
            )
            for row, wanted_row in zip(ids, labels, strict=True):
                if row.ndim != 1 or row.shape != wanted_row.shape:
                    raise DataError(
                        f"'{side}_labels' has shape {tuple(wanted_row.shape)} beside '{side}_ids' of shape "
                        f"{tuple(row.shape)}; they must be equally long"
                    )
                if not bool((wanted_row[1:] != IGNORED).any()):
                    raise DataError(
                        f"the {side} completion of a pair has no token; leave the pair out, or cut its prompt"
                    )
            fields[f"{side}_ids"] = pad(ids, 0)
            fields[f"{side}_labels"] = pad(labels, IGNORED)
            fields[f"{side}_mask"] = pad([torch.ones_like(row) for row in ids], 0)
        numbers = [torch.as_tensor(example["reference"], dtype=torch.float64) for example in examples]
        fields["reference"] = torch.stack(numbers).reshape(-1)
        return Batch((), fields, torch.ones(len(examples)))

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        chosen, rejected = (self._log_probability(model, batch, side) for side in _SIDES)
        return self.beta * (chosen - rejected - batch.kwargs["reference"].to(chosen.dtype))

    @staticmethod
    def _log_probability(model: nn.Module, batch: Batch, side: str) -> Tensor:
        """L, ``[n]``."""
        inputs = {"input_ids": batch.kwargs[f"{side}_ids"]}
        if accepts(model, "attention_mask"):
            inputs["attention_mask"] = batch.kwargs[f"{side}_mask"]
        inputs = without_cache(model, inputs)
        first = () if accepts(model, "input_ids") else (inputs.pop("input_ids"),)
        logits = read_outputs(model(*first, **inputs))[:, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = batch.kwargs[f"{side}_labels"][:, 1:]
        ignored = labels == IGNORED
        asked = logits.gather(-1, labels.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
        return (asked - logits.logsumexp(-1)).masked_fill(ignored, 0.0).sum(1)
