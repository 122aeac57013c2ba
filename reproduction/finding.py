"""`Finding`: what the paper claims, what was measured here and whether it holds; its files, and the page of all."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from reproduction.kept import write_json
from whence.errors import OptionError
from whence.report.drawing import save_figure
from whence.runs.files import replace_file
from whence.units import format_duration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PROFILES", "Conclusion", "Finding", "Profile", "number", "page", "plus_minus", "write"]

#: How much is run, and on which models.
Profile = Literal["quick", "offline", "paper"]
PROFILES: dict[Profile, str] = {
    "quick": "small models trained on the spot, minutes",
    "offline": "real models and data that package registries carry, in place of the paper's, hours",
    "paper": "the paper's own models and data",
}
_HOLDS = {True: "holds", False: "does not hold", None: "cannot be told"}


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """What follows from the numbers of a reproduction, and from nothing else.

    Attributes:
        title: a heading.
        claim: what the paper says, in a sentence.
        holds: whether the claim does, or None if this run cannot tell.
        verdict: the one sentence that says why.
        rows: the table: a quantity, what the paper has for it, what was measured here.
        details: what only some readers want to know, a sentence or two each.
        errata: slips in the paper that turned up on the way, a sentence or two each.
    """

    title: str
    claim: str
    holds: bool | None
    verdict: str
    rows: tuple[tuple[str, str, str], ...]
    details: tuple[str, ...] = ()
    errata: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding(Conclusion):
    """The outcome of one reproduction: its numbers, and the conclusion from them.

    Attributes:
        name: of its files.
        profile: how much was run.
        seconds: how long it took.
        numbers: everything measured, as JSON can hold it; no NaN, no infinity.
    """

    name: str
    profile: Profile
    seconds: float
    numbers: dict[str, Any]

    def __post_init__(self) -> None:
        try:
            json.dumps(self.numbers, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"the numbers of {self.name!r} are not JSON ({error}); use plain Python numbers, strings, lists and "
                "dicts, and None for what is not a number"
            ) from error

    @property
    def outcome(self) -> str:
        """`holds` in words."""
        return _HOLDS[self.holds]


# --- numbers in words ------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three digits, with a power of ten where zeros would have to be counted.

    Example:
        >>> number(26700), number(5.0), number(0.00389), number(4.737e-05)
        ('26,700', '5', '0.00389', '4.74·10⁻⁵')
    """
    power = _power(value)
    if power == 0:
        decimals = 2 - math.floor(math.log10(abs(value))) if value else 0
        text = f"{round(value, decimals):,.{max(decimals, 0)}f}"
        return text.rstrip("0").rstrip(".") if decimals > 0 else text
    return f"{value / 10**power:.3g}·10{_superscript(power)}"


def plus_minus(value: float, stderr: float) -> str:
    """A value and its standard error, to the digits that the error leaves.

    Example:
        >>> plus_minus(150.36, 50.4), plus_minus(3.146, 0.315), plus_minus(4.737e-05, 5.7e-07)
        ('150 ± 50', '3.1 ± 0.3', '(4.74 ± 0.06)·10⁻⁵')
    """
    if stderr == 0:
        return number(value)
    power = _power(value)
    scale = 10**power
    decimals = max(0, -math.floor(math.log10(stderr / scale)))
    text = f"{value / scale:,.{decimals}f} ± {stderr / scale:,.{decimals}f}"
    return f"({text})·10{_superscript(power)}" if power else text


def _power(value: float) -> int:
    return 0 if value == 0 or 1e-3 <= abs(value) < 1e5 else math.floor(math.log10(abs(value)))


def _superscript(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


# --- files -----------------------------------------------------------------------------------------------


def write(finding: Finding, figure: Figure, directory: Path, *, provenance: Mapping[str, Any]) -> None:
    """Write ``NAME.svg``, ``NAME.png`` and ``NAME.json`` to a directory, each at once, the last of them last.

    Args:
        finding: what to write.
        figure: its figure.
        directory: made if it does not exist.
        provenance: where the numbers come from.

    Raises:
        StorageError: a file could not be written.
    """
    replace_file(directory / f"{finding.name}.svg", partial(save_figure, drawn=figure, kind="svg"))
    replace_file(directory / f"{finding.name}.png", partial(save_figure, drawn=figure, kind="png"))
    content = {**asdict(finding), "provenance": dict(provenance)}
    write_json(directory / f"{finding.name}.json", content)


# --- the page --------------------------------------------------------------------------------------------


def page(findings: Sequence[tuple[Finding, Mapping[str, Any]]]) -> str:
    """A page for readers: the verdicts, then for each its sentence, table and figure, the details folded.

    Args:
        findings: in the order of the page, each with its provenance.
    """
    lines = [
        "# Results",
        "",
        "What the paper claims, and what was measured here. `python -m reproduction` writes this page: every number on "
        "it is computed from those in the JSON files beside it.",
        "",
        *(
            f"Profile {name}: {PROFILES[name]}."
            for name in sorted({finding.profile for finding, _ in findings})
        ),
        "",
        "| finding | the claim | in a sentence |",
        "|---|---|---|",
    ]
    for finding, _ in findings:
        title = f"[{_escaped(finding.title)}](#{finding.name})"
        lines.append(f"| {title} | {finding.outcome} | {_escaped(finding.verdict)} |")
    for finding, provenance in findings:
        lines += _section(finding, provenance)
    return "\n".join(lines) + "\n"


def _section(finding: Finding, provenance: Mapping[str, Any]) -> list[str]:
    outcome = finding.outcome.capitalize()
    # An anchor of its own: how a heading's is made from its text differs between readers.
    lines = ["", f'<a id="{finding.name}"></a>', "", f"## {_escaped(finding.title)}", ""]
    lines += [
        f"**The claim.** {_escaped(finding.claim)}",
        "",
        f"**{outcome}.** {_escaped(finding.verdict)}",
        "",
    ]
    lines += ["| | the paper | here |", "|---|---|---|"]
    lines += [f"| {' | '.join(map(_escaped, row))} |" for row in finding.rows]
    lines += ["", f"![{_escaped(finding.title)}]({finding.name}.svg)", ""]
    lines += ["<details>", "<summary>Details</summary>", ""]
    lines += [f"- {_escaped(note)}" for note in finding.details]
    if finding.errata:
        lines += ["", "Slips in the paper's text that turned up:", ""]
        lines += [f"- {_escaped(note)}" for note in finding.errata]
    begun = provenance.get("begun_at")
    kept = f", with measurements kept since {begun}" if begun else ""
    lines += [
        "",
        f"{format_duration(finding.seconds)} on {_escaped(str(provenance.get('cpu')))}, threads: "
        f"{provenance.get('threads')}, at commit {provenance.get('commit') or 'unknown'}{kept}. All numbers and "
        f"versions: [{finding.name}.json]({finding.name}.json)",
        "",
        "</details>",
    ]
    return lines


def _escaped(text: str) -> str:
    r"""Text as Markdown that reads as the text, in a paragraph or in a cell of a table.

    Example:
        >>> print(_escaped("|B| < 2*x"))
        \|B\| \< 2\*x
    """
    return re.sub(r"([\\`*_{}\[\]<>#|~$&!])", r"\\\1", " ".join(text.split()))
