"""Scores and what is known of their errors, whichever solver they come from.

*Sampling.* Independent chains: their spread is the error, with Student's t for so few. Two scores of one query share
much of their error, so a difference is judged chain by chain.

*A certificate.* A deterministic solver proves ``‖u - u*‖_A ≤ b``, and the error of a score is taken to have the spread
``b ‖∇ℓ(z)‖ / √Tr(H)`` (`Certificate.score_error`): proven on average over examples, shared out by the length of their
gradients. (The bound that holds for each of them is `Attribution.bounds`.)

*Several checkpoints.* Their scores stand for chains, and the solver's error, as far as they share it, for the
certificate (`whence.attribution.checkpoint`).

*An expected error.* Of the quick answer, and of a solve that its budget ended, it is known what scores should be off by
on average, ε. A single one is taken to have the spread ``1.35 ε √(a² + s²)``, with a the mean size of its query's
scores: large scores are off in proportion to themselves. ``python -m benchmarks.stages`` measures how often that holds.

But for the spread between checkpoints, all bound the solver's error, the distance to the exact damped score; none knows
of the distance from influence to retraining.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.special import ndtri, stdtrit
from torch import Tensor

from whence.errors import OptionError
from whence.solvers import Statistics
from whence.spectrum import Spectrum

__all__ = ["Scored", "expects", "half_width"]

#: Errors of single scores in units of what is expected of all.
_WIDER = 1.35


def half_width(stderr: Tensor, degrees_of_freedom: float, confidence: float) -> Tensor:
    """Half of a confidence interval, by Student's t, or by the normal distribution at infinitely many degrees."""
    return stderr * _quantile(degrees_of_freedom, confidence)


def _quantile(degrees_of_freedom: float, confidence: float) -> float:
    if not 0 < confidence < 1:
        raise OptionError(f"confidence is {confidence}; it is a probability, such as 0.95")
    part = 0.5 + confidence / 2
    return float(ndtri(part) if math.isinf(degrees_of_freedom) else stdtrit(degrees_of_freedom, part))


def expects(stats: Statistics, chains: int) -> bool:
    """Whether errors are what is expected of the solve: of one chain without a certificate, or ended by its budget."""
    unfinished = stats.certificate is None or not bool(stats.converged.all())
    return stats.error_parts.expected is not None and chains == 1 and unfinished


@dataclass(frozen=True)
class Scored:
    """Scores with their errors.

    Attributes:
        chains: by every independent chain, ``[chains, …]``; one where the solver is deterministic. Of several
            checkpoints, by each of them.
        certified: spread that a certificate or an expected error allows for, ``[…]``, or None.
    """

    chains: Tensor
    certified: Tensor | None = None

    @staticmethod
    def of(chains: Tensor, stats: Statistics, norms: Tensor | None, spectrum: Spectrum) -> Scored:
        """Scores by every chain, with what a certificate allows for where the examples' gradient norms are known.

        Of one chain without a certificate, or one that was not gone on with to what was asked, with what is expected.
        """
        certificate, expected = stats.certificate, stats.error_parts.expected
        if expected is not None and expects(stats, len(chains)):
            mean = chains[0].abs().mean(-1, keepdim=True)
            return Scored(chains, _WIDER * expected.unsqueeze(-1).to(chains) * torch.hypot(mean, chains[0]))
        if certificate is None or norms is None:
            return Scored(chains)
        return Scored(chains, certificate.score_error(norms, spectrum.trace.value))

    @property
    def mean(self) -> Tensor:
        """The scores."""
        return self.chains.mean(0)

    @property
    def stderr(self) -> Tensor:
        """Standard errors: of the chains' mean, of the certificate, or of both together."""
        return self._combined(1.0, 1.0)

    @property
    def degrees_of_freedom(self) -> float:
        """For Student's t: one less than the chains; infinite where there is nothing random."""
        return len(self.chains) - 1 if len(self.chains) > 1 else math.inf

    @property
    def sampling(self) -> Tensor:
        """The part of the standard error that chains, or checkpoints, show by their spread; 0 where there is one."""
        count = len(self.chains)
        return self.chains.std(0) / math.sqrt(count) if count > 1 else torch.zeros_like(self.chains[0])

    @property
    def systematic(self) -> Tensor:
        """The part that all chains share."""
        return torch.zeros_like(self.chains[0]) if self.certified is None else self.certified

    def half_width_of_another(self, confidence: float) -> Tensor:
        """Half of the intervals that one more chain, or checkpoint, should fall into, around the mean."""
        return half_width(
            self.sampling * math.sqrt(len(self.chains) + 1), self.degrees_of_freedom, confidence
        )

    def half_width(self, confidence: float) -> Tensor:
        """Half of the confidence intervals."""
        student, normal = (_quantile(degrees, confidence) for degrees in (self.degrees_of_freedom, math.inf))
        return self._combined(student, normal)

    def at(self, *where: int | slice | list[int] | Tensor) -> Scored:
        """The same for a part of the scores."""
        certified = None if self.certified is None else self.certified[where]
        return Scored(self.chains[(slice(None), *where)], certified)

    def minus(self, other: Scored) -> Scored:
        """Differences of scores of one query, which share what is common in their errors."""
        certified = None
        if self.certified is not None and other.certified is not None:
            certified = torch.hypot(self.certified, other.certified)
        return Scored(self.chains - other.chains, certified)

    def above(self, other: Scored, confidence: float) -> Tensor:
        """Whether these scores exceed the others beyond the errors of their differences."""
        difference = self.minus(other)
        result: Tensor = difference.mean > difference.half_width(confidence)
        return result

    @staticmethod
    def join(parts: Sequence[Scored]) -> Scored:
        """Lists of scores, one after the other."""
        certified = [part.certified for part in parts if part.certified is not None]
        return Scored(
            torch.cat([part.chains for part in parts], dim=1),
            torch.cat(certified) if len(certified) == len(parts) else None,
        )

    def _combined(self, student: float, normal: float) -> Tensor:
        """The error by sampling and that by the certificate, each so many times."""
        if len(self.chains) == 1:
            return normal * self.systematic
        if self.certified is None:
            return student * self.sampling
        return torch.hypot(student * self.sampling, normal * self.certified)
