"""`Finding`: what the paper claims, what was measured here, and whether it holds."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from whence.errors import OptionError

__all__ = ["Finding", "Profile", "check_profile"]

#: How much is run: ``"quick"`` for tests, ``"offline"`` what needs no download, ``"paper"`` the paper's own sizes.
Profile = Literal["quick", "offline", "paper"]

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_VERDICTS = {True: "holds", False: "does not hold", None: "cannot be told from this run"}


@dataclass(frozen=True)
class Finding:
    """The outcome of one reproduction.

    Attributes:
        name: of its files; lower-case words joined by hyphens.
        title: a heading.
        claim: what the paper says, in a sentence.
        measured: what was measured here, with figures; and why it cannot be told, where it cannot.
        holds: whether the claim does, or None if this run cannot tell.
        numbers: everything measured, as JSON can hold it; no NaN, no infinity.
        profile: how much was run.
        seconds: how long it took.
        errata: slips in the paper that turned up on the way, a sentence or two each.

    Example:
        >>> finding = Finding(
        ...     "half", "Halves", "Two halves are one.", "0.5 + 0.5 = 1.", True, {"sum": 1.0}, "quick", 0.1
        ... )
        >>> finding.verdict
        'holds'
    """

    name: str
    title: str
    claim: str
    measured: str
    holds: bool | None
    numbers: dict[str, Any]
    profile: Profile
    seconds: float
    errata: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise OptionError(
                f"a finding's name is {self.name!r}; it names files: use lower-case words joined by hyphens"
            )
        check_profile(self.profile)
        for field in ("title", "claim", "measured"):
            text = getattr(self, field)
            if not isinstance(text, str) or not text.strip():
                raise OptionError(f"the {field} of {self.name!r} is {text!r}; say it in words")
        if self.holds not in (True, False, None):
            raise OptionError(f"holds is {self.holds!r} in {self.name!r}; it must be True, False or None")
        if not 0 <= self.seconds < math.inf:
            raise OptionError(f"seconds is {self.seconds} in {self.name!r}; it must be a duration")
        if not isinstance(self.errata, tuple) or not all(isinstance(note, str) for note in self.errata):
            raise OptionError(f"errata of {self.name!r} must be a tuple of sentences, got {self.errata!r}")
        try:
            json.dumps(self.numbers, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"the numbers of {self.name!r} are not JSON ({error}); use plain Python numbers, strings, lists and "
                "dicts, and None for what is not a number"
            ) from error

    @property
    def verdict(self) -> str:
        """`holds` in words."""
        return _VERDICTS[self.holds]


def check_profile(profile: str) -> None:
    """Refuse a profile that no reproduction knows, before it starts."""
    if profile not in get_args(Profile):
        raise OptionError(f"profile is {profile!r}; it must be one of {', '.join(get_args(Profile))}")
