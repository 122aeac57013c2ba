"""What can be asked of each command.

One frozen dataclass is a command's keyword signature, its command line, its saved configuration and what a resumed run
compares itself with. A new option is written once, here.
"""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import torch

from whence.errors import OptionError
from whence.solvers.auto import resolve_accuracy
from whence.solvers.plan import check_damping
from whence.units import duration_seconds

__all__ = [
    "AskOptions",
    "Budget",
    "CheckedOptions",
    "CleanOptions",
    "IndexOptions",
    "MeasureOptions",
    "Options",
    "RunOptions",
    "Until",
    "chosen_options",
    "option",
    "takes",
]

#: Whole numbers are below this, which a float holds and which can be written out.
_LARGE = 10**300
#: What an option may be, in words.
_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", NoneType: "None"}

F = TypeVar("F", bound=Callable[..., Any])
O = TypeVar("O", bound="CheckedOptions")  # noqa: E741


def option(default: Any, help: str, *, common: bool = False, saved: bool = True, plan: bool = True) -> Any:
    """A field of an options class.

    Args:
        default: its default.
        help: one sentence, for Python and for the command line.
        common: whether a function's signature shows it; the others can be given just the same.
        saved: whether a run's numbers or files depend on it, so that another value is another run.
        plan: whether what `whence plan` tells depends on it; the others it does not take.
    """
    return field(default=default, metadata={"help": help, "common": common, "saved": saved, "plan": plan})


@dataclass(frozen=True, kw_only=True)
class CheckedOptions:
    """Options that are refused where they are of another kind than their hints say."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            kinds = get_args(hint) or (hint,)
            value = getattr(self, name)
            fits = type(value) in (*kinds, *([int] if float in kinds else []))
            if type(value) is int and not -_LARGE < value < _LARGE:
                fits = False
            self._refuse_unless(fits, name, f"it must be {' or '.join(_KINDS[kind] for kind in kinds)}")
        for name in ("micro_batch", "spectrum_terms", "part_size", "shown", "rescored"):
            value = getattr(self, name, None)
            fits = value is None or 1 <= value < 2**40
            self._refuse_unless(fits, name, "it must be a whole number of at least 1, and below 2^40")

    def _refuse_unless(self, fits: bool, name: str, remedy: str) -> None:
        if not fits:
            value = getattr(self, name)
            large = type(value) is int and not -_LARGE < value < _LARGE  # too long to be shown
            raise OptionError(f"{name} is {'beyond all numbers' if large else repr(value)}; {remedy}")

    def _one_of(self, name: str, *values: str) -> None:
        *first, last = map(repr, values)
        self._refuse_unless(getattr(self, name) in values, name, f"it must be {', '.join(first)} or {last}")


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(CheckedOptions):
    """What everything that measures a model's curvature has in common: options of `whence spectrum`."""

    product: str = option("auto", "How Gauss-Newton products are computed: auto, exact or finite-difference.")
    seed: int = option(0, "Of all random numbers.", common=True)
    micro_batch: int | None = option(None, "Examples per pass; by default as many as fit.")
    spectrum_terms: int = option(4096, "Terms (tokens) of the data that curvature is measured on, at most.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("product", "auto", "exact", "finite-difference")
        self._refuse_unless(0 <= self.seed < 2**40, "seed", "give a whole number from 0 to 2^40")

    def generator(self, phase: int) -> torch.Generator:
        """Random numbers of one phase: they start from the seed in every phase, so that a resumed run has the same."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + phase)

    def saved(self) -> dict[str, Any]:
        """What a run's numbers and files depend on: name -> value."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.metadata["saved"]}


@dataclass(frozen=True, kw_only=True)
class RunOptions(MeasureOptions):
    """What the commands that make a run have in common."""

    damping: float | str = option(
        "auto",
        "λ, or 'auto': found from the training where that is given, else from model and data (docs/solvers.md); "
        "a part of that is written 'auto/4', one of λmax 'lambda_max/200'.",
        common=True,
    )
    part_size: int | None = option(
        None, "Examples per part of the results on disk; a minute's work by default.", plan=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_damping(self.damping)


@dataclass(frozen=True)
class Until:
    """Stop once the ``k`` most helpful examples of every query are separated from the rest.

    Attributes:
        k: how many.
        confidence: that the set is right, per query.
    """

    k: int
    confidence: float = 0.95

    @classmethod
    def parse(cls, text: str) -> Until:
        """From ``"top-10 stable"``, or ``"top-10 stable at 0.99"``."""
        found = re.fullmatch(r"top-(\d+) stable(?: at (0?\.\d+))?", text.strip())
        if found is None or int(found[1]) < 1:
            raise OptionError(
                f"until is {text!r}; write 'top-10 stable', or 'top-10 stable at 0.99' for another confidence"
            )
        return cls(int(found[1]), float(found[2] or 0.95))

    def __str__(self) -> str:
        return f"top-{self.k} stable at {self.confidence:g}"


@dataclass(frozen=True)
class Budget:
    """What an attribution may cost, in one of two ways; neither where that follows from the accuracy.

    Attributes:
        multiple: of what the quick answer costs.
        seconds: on the clock.
    """

    multiple: float | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, given: float | str) -> Budget:
        """From ``"auto"``, a number or a time such as ``"5min"``."""
        if given == "auto":
            return cls()
        if isinstance(given, str):
            seconds = duration_seconds(given)
            if seconds is not None and seconds > 0:
                return cls(seconds=seconds)
        elif 1 <= given < float("inf"):
            return cls(multiple=float(given))
        raise OptionError(
            f"budget is {given!r}; give a multiple of the quick answer's cost, at least 1, or a time such as 90s, 5min "
            "or 2h"
        )


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """Options of `whence.attribute`."""

    solver: str = option(
        "auto",
        "auto (`whence.attribution.budget` and `whence.solvers.auto` have the rule), cg: conjugate gradients over all "
        "of the data, with a certificate, or lissa: stochastic steps under a plan made from the measured spectrum.",
        common=True,
    )
    accuracy: float | str = option(
        "auto",
        "What to aim at: the expected correlation of the scores with the exact damped ones, such as 0.99, or their "
        "relative error, as '10%', which is the same as 0.995; quick, the first answer alone, by EK-FAC; certified, an "
        "error of 10% that is proven; or auto, 0.995 as far as the budget goes.",
        common=True,
    )
    until: str | None = option(
        None,
        "'top-10 stable' solves on until the ten most helpful examples of every query are separated from the rest, at "
        "a confidence of 0.95 or as in 'top-10 stable at 0.99'; the result says whether they are.",
        common=True,
        plan=False,
    )
    budget: float | str = option(
        "auto",
        "What all may cost: a multiple of the quick answer's cost, or a time, such as 5min. By default 2.5, and at "
        "least half a minute's work, with accuracy='auto', and no limit with an accuracy that is named; of 'until', "
        "eight times the first round. Of several checkpoints, each of them.",
        common=True,
    )
    chains: int = option(
        4, "LiSSA's independent solves: their mean is the answer, their spread the error bar.", common=True
    )
    refine: float | None = option(
        None, "Cost of each chain, as a multiple of the paper's plan; by default what the accuracy needs."
    )
    sampling: str = option(
        "auto",
        "How LiSSA's batches are drawn: uniform; curvature, by how uncertain the model is of an example, which pays "
        "where it is certain of almost all; or auto, by curvature where the measured noise says that it pays.",
        plan=False,
    )
    method: str = option(
        "auto", "How examples are scored: auto, directional, layers or gradients.", plan=False
    )
    baseline: bool = option(True, "Also compute plain gradient dot products, to compare with.", common=True)
    norms: bool = option(
        False,
        "Measure the exact length of every example's gradient, for rankings by='unit'; what conjugate gradients know "
        "of it is often right to a quarter only.",
        plan=False,
    )
    shown: int = option(
        20, "Examples at each end of a ranking that are kept for the page.", common=True, plan=False
    )
    stability: bool = option(
        False,
        "Measure how far scores depend on which half of the data the curvature is measured on, also where λ is given.",
        plan=False,
    )
    title: str = option("Which training examples are behind this?", "Of the page.", common=True, plan=False)
    checkpoint_seconds: float = option(
        30.0, "How often the solver's state is written to disk.", saved=False, plan=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accuracy not in ("auto", "quick", "certified"):
            object.__setattr__(self, "accuracy", resolve_accuracy(self.accuracy))
        Budget.parse(self.budget)
        self._one_of("solver", "auto", "cg", "lissa")
        self._one_of("method", "auto", "directional", "layers", "gradients")
        self._one_of("sampling", "auto", "uniform", "curvature")
        if self.until is not None:
            Until.parse(self.until)
        own = self.accuracy not in ("quick", "certified") or self.solver in ("auto", "cg")
        self._refuse_unless(
            own, "solver", f"accuracy={self.accuracy!r} is not of this solver; leave one of them out"
        )
        self._refuse_unless(
            2 <= self.chains <= 1000,
            "chains",
            "error bars need at least 2 independent chains (4 by default), and a thousand are more than any",
        )
        longer = "it multiplies the plan's cost, and is at least 1 and at most 1e6"
        self._refuse_unless(self.refine is None or 1 <= self.refine <= 1e6, "refine", longer)
        fits = 0 <= self.checkpoint_seconds < float("inf")
        self._refuse_unless(fits, "checkpoint_seconds", "give seconds, such as 30")

    @property
    def correlation(self) -> float:
        """The correlation with exact scores to aim at."""
        return resolve_accuracy("10%" if self.accuracy in ("auto", "quick", "certified") else self.accuracy)


@dataclass(frozen=True, kw_only=True)
class CleanOptions(RunOptions):
    """Options of `whence.clean`."""

    damping: float | str = option(
        "auto", "λ, or 'auto': λmax/200; any other part of λmax is written 'lambda_max/50'.", common=True
    )
    by: str = option(
        "self-influence",
        "What ranks the examples: self-influence, loss or gradient-norm. All three are computed and shown.",
        common=True,
        saved=False,
    )
    rank: int | None = option(
        None,
        "Directions of the curvature's approximation: so many copies of the model. 32, or what half of memory holds.",
        common=True,
    )
    exact_solves: int = option(
        8, "Examples that are solved for exactly, to set the scale; 0 for none.", common=True
    )
    shown: int = option(100, "Examples of each ranking on the page.", common=True, saved=False)
    title: str = option(
        "Which training examples look like mistakes?", "Of the page.", common=True, saved=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("by", "self-influence", "loss", "gradient-norm")
        self._refuse_unless(self.rank is None or 1 <= self.rank < 2**40, "rank", "it must be at least 1")
        several = self.exact_solves == 0 or 2 <= self.exact_solves < 2**40
        self._refuse_unless(several, "exact_solves", "solve for at least 2 examples, or for none (0)")


@dataclass(frozen=True, kw_only=True)
class IndexOptions(RunOptions):
    """Options of `whence.index`."""

    bytes: int = option(
        4096,
        "Of every training example in the index, but for 12 more: eight signs each. A power of two; errors of "
        "estimates fall with its root.",
        common=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = 8 <= self.bytes <= 2**20 and self.bytes & (self.bytes - 1) == 0
        self._refuse_unless(fits, "bytes", "it must be a power of two, from 8 to 2^20, such as 4096")


@dataclass(frozen=True, kw_only=True)
class AskOptions(CheckedOptions):
    """Options of `Index.ask`."""

    rescored: int = option(
        500,
        "Examples of every query that are scored again without the index's error: those at the ends of its ranking.",
        common=True,
    )
    baseline: bool = option(True, "Of those also plain gradient dot products, to compare with.", common=True)
    shown: int = option(20, "Examples at each end of a ranking that are kept for the page.", common=True)
    title: str = option("Which training examples are behind this?", "Of the page.", common=True)


def chosen_options(cls: type[O], options: O | None, given: Mapping[str, Any]) -> O:
    """Options with what was given by keyword; a keyword that is none gets an error that names the nearest."""
    known = [each.name for each in fields(cls)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise OptionError(f"there is no option {name!r}; {hint}")
    if options is not None and not isinstance(options, cls):
        raise OptionError(f"options are a {type(options).__name__}; give a whence.{cls.__name__}")
    return replace(cls() if options is None else options, **given)


def takes(cls: type[CheckedOptions]) -> Callable[[F], F]:
    """Show the common options of ``cls`` in a function's signature, and explain them in its documentation.

    The function takes them as ``**given``; its docstring says where with a line ``{options}``.
    """

    def decorate(function: F) -> F:
        hints = get_type_hints(cls)
        shown = [
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name]
            )
            for each in fields(cls)
            if each.metadata["common"]
        ]
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        explained = "\n".join(
            textwrap.fill(f"- {each.name}: {each.metadata['help']}", 108, subsequent_indent="  ")
            for each in fields(cls)
        )
        before, mark, after = (function.__doc__ or "").partition("{options}")
        if mark:
            margin = before[len(before.rstrip(" ")) :]  # a method's is wider than a function's
            function.__doc__ = before + textwrap.indent(explained, margin).lstrip(" ") + after
        return function

    return decorate
