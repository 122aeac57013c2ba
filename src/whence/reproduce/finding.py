"""`Finding`: what the paper claims, what was measured here, and whether it holds; and how findings are written down.

A reproduction ends in a finding and a figure. `write` leaves four files of one name in a directory: the numbers with
where they come from (JSON), the figure (SVG and PNG), and the paragraph (Markdown). `summary` makes one page of all.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from whence.errors import OptionError, RunDirectoryError
from whence.plan import format_duration
from whence.sources.libraries import load_library
from whence.store.files import read_object, replace_file, write_json
from whence.store.run import environment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "Finding",
    "Profile",
    "check_profile",
    "commit",
    "cpu_name",
    "figure",
    "provenance",
    "read",
    "summary",
    "write",
]

#: How much is run: ``"quick"`` for tests, ``"offline"`` what needs no download, ``"paper"`` the paper's own sizes.
Profile = Literal["quick", "offline", "paper"]

#: Distinguishable to colour-blind readers, and in this order also by lightness (Okabe and Ito's palette).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")

#: Raised when the files change their meaning; files of another format are refused.
FORMAT = 1
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_VERDICTS = {True: "holds", False: "does not hold", None: "cannot be told from this run"}
_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 10,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "figure.titlesize": 12,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters on every machine
    "font.size": 10,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.framealpha": 0.85,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "savefig.dpi": 150,
    "svg.fonttype": "path",
    "svg.hashsalt": "whence",  # the ids inside an SVG are random without it
}


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


# --- figures -----------------------------------------------------------------------------------------------------


@contextmanager
def figure(
    rows: int = 1, columns: int = 1, *, width: float = 5.0, height: float = 3.8
) -> Iterator[tuple[Figure, list[Axes]]]:
    """An empty figure in the one style of all figures; what is drawn inside the ``with`` has it too.

    No window, no global state: the figure is drawn by Agg, whatever the machine has.

    Args:
        rows: of panels.
        columns: of panels.
        width: of a panel, in inches.
        height: of a panel, in inches.

    Yields:
        The figure and its panels, row by row.

    Raises:
        OptionError: matplotlib is not installed.
    """
    matplotlib = load_library("matplotlib", "reproduce", "to draw the figures")
    figures = load_library("matplotlib.figure", "reproduce", "to draw the figures")
    agg = load_library("matplotlib.backends.backend_agg", "reproduce", "to draw the figures")
    with matplotlib.rc_context({**_STYLE, "axes.prop_cycle": matplotlib.cycler(color=COLOURS)}):
        drawn = figures.Figure(figsize=(width * columns, height * rows))
        agg.FigureCanvasAgg(drawn)
        yield drawn, list(drawn.subplots(rows, columns, squeeze=False).flat)


def _save_figure(path: Path, drawn: Figure, *, kind: Literal["svg", "png"]) -> None:
    matplotlib = load_library("matplotlib", "reproduce", "to draw the figures")
    # The same figure is the same file: no date, and ids that depend on what is drawn alone.
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context(_STYLE):
        drawn.savefig(path, format=kind, metadata=metadata)


# --- files -------------------------------------------------------------------------------------------------------


def write(finding: Finding, figure: Figure, directory: str | Path) -> Path:
    """Write ``NAME.svg``, ``NAME.png``, ``NAME.md`` and ``NAME.json`` to a directory, the last of them last.

    Each takes its place at once, so that a reader never sees half a file.

    Args:
        finding: what to write.
        figure: its figure.
        directory: made if it does not exist.

    Returns:
        The path of the JSON file.

    Raises:
        StorageError: a file could not be written.
    """
    place = Path(directory)
    replace_file(place / f"{finding.name}.svg", partial(_save_figure, drawn=figure, kind="svg"))
    replace_file(place / f"{finding.name}.png", partial(_save_figure, drawn=figure, kind="png"))
    text = f"# {_escaped(finding.title)}\n\n{_section(finding)}"
    replace_file(place / f"{finding.name}.md", partial(_write_text, text=text))
    path = place / f"{finding.name}.json"
    write_json(
        path, {"format": FORMAT, "finding": asdict(finding), "provenance": provenance(finding.seconds)}
    )
    return path


def read(directory: str | Path) -> list[Finding]:
    """All findings that `write` left in a directory, by name.

    Raises:
        RunDirectoryError: there is no such directory, or a JSON file in it that is no finding.
    """
    place = Path(directory)
    if not place.is_dir():
        raise RunDirectoryError(f"{place} is not a directory; give the one that findings were written to")
    return [_read(path) for path in sorted(place.glob("*.json"))]


def _read(path: Path) -> Finding:
    content = read_object(path)
    if content.get("format") != FORMAT or not isinstance(content.get("finding"), dict):
        raise RunDirectoryError(
            f"{path} is no finding of format {FORMAT} (format {content.get('format')!r}); give the directory that "
            "findings were written to, and nothing else in it"
        )
    values: dict[str, Any] = dict(content["finding"])
    expected = {field.name for field in fields(Finding)}
    if set(values) != expected:
        raise RunDirectoryError(
            f"{path} has other fields than a finding ({', '.join(sorted(set(values) ^ expected))}): it was changed "
            "since it was written. Reproduce it again"
        )
    try:
        return Finding(**{**values, "errata": tuple(values["errata"])})
    except (OptionError, TypeError) as error:
        raise RunDirectoryError(
            f"{path} holds no finding ({error}): it was changed since it was written. Reproduce it again"
        ) from error


def summary(findings: Sequence[Finding]) -> str:
    """A page of all findings, for the directory that they were written to: verdicts first, then each in full."""
    lines = ["# Results", "", "| finding | the claim | profile | time |", "|---|---|---|---|"]
    for finding in findings:
        title = f"[{_escaped(finding.title)}](#{finding.name})"
        lines.append(
            f"| {title} | {finding.verdict} | {finding.profile} | {format_duration(finding.seconds)} |"
        )
    for finding in findings:
        # An anchor of its own: how a heading's is made from its text differs between readers.
        lines += [
            "",
            f'<a id="{finding.name}"></a>',
            "",
            f"## {_escaped(finding.title)}",
            "",
            _section(finding),
        ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(finding: Finding) -> str:
    paragraph = (
        f"**The paper's claim.** {_escaped(finding.claim)} **Measured here.** {_escaped(finding.measured)} "
        f"**Verdict.** The claim {finding.verdict}."
    )
    lines = [paragraph, "", f"![{_escaped(finding.title)}]({finding.name}.svg)", ""]
    if finding.errata:
        lines += ["Slips in the paper's text that turned up:", ""]
        lines += [f"- {_escaped(note)}" for note in finding.errata]
        lines.append("")
    lines.append(
        f"Profile {finding.profile}, {format_duration(finding.seconds)}; all numbers, versions and machine: "
        f"[{finding.name}.json]({finding.name}.json)"
    )
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    r"""Text as Markdown that reads as the text, in a paragraph or in a cell of a table.

    Example:
        >>> print(_escaped("|B| < 2*x"))
        \|B\| \< 2\*x
    """
    return re.sub(r"([\\`*_{}\[\]<>#|~$&!])", r"\\\1", " ".join(text.split()))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


# --- provenance --------------------------------------------------------------------------------------------------


def provenance(seconds: float) -> dict[str, Any]:
    """Where numbers come from: date, commit, versions, machine, and how long they took."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": seconds,
        "commit": commit(),
        **environment(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
    }


def commit() -> str | None:
    """The commit this file belongs to, marked where tracked files differ from it; None outside a checkout."""
    here = Path(__file__).resolve()
    try:
        # Installed into an environment inside somebody else's checkout, the commit would be theirs.
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def cpu_name() -> str:
    """The processor, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
