"""How findings are written down: `write` leaves four files of one name, `summary` makes one page of all."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reproduction.finding import Finding
from reproduction.provenance import provenance
from whence.errors import OptionError, RunDirectoryError
from whence.report.drawing import save_figure
from whence.runs.files import read_object, replace_file, write_json
from whence.units import format_duration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["read", "read_provenance", "summary", "write"]

#: Raised when the files change their meaning; files of another format are refused.
FORMAT = 1


def write(finding: Finding, figure: Figure, directory: str | Path, *, begun_at: str | None = None) -> Path:
    """Write ``NAME.svg``, ``NAME.png``, ``NAME.md`` and ``NAME.json`` to a directory, the last of them last.

    Each takes its place at once, so that a reader never sees half a file.

    Args:
        finding: what to write.
        figure: its figure.
        directory: made if it does not exist.
        begun_at: the commit that began it, where an interrupted run goes on with another.

    Returns:
        The path of the JSON file.

    Raises:
        StorageError: a file could not be written.
    """
    place = Path(directory)
    replace_file(place / f"{finding.name}.svg", partial(save_figure, drawn=figure, kind="svg"))
    replace_file(place / f"{finding.name}.png", partial(save_figure, drawn=figure, kind="png"))
    text = f"# {_escaped(finding.title)}\n\n{_section(finding)}"
    replace_file(place / f"{finding.name}.md", partial(_write_text, text=text))
    path = place / f"{finding.name}.json"
    origin = provenance(finding.seconds)
    if begun_at is not None and begun_at != origin["commit"]:
        origin["begun_at"] = begun_at
    write_json(path, {"format": FORMAT, "finding": asdict(finding), "provenance": origin})
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


def read_provenance(directory: str | Path) -> dict[str, dict[str, Any]]:
    """Where the findings of a directory come from, by their names."""
    return {
        path.stem: dict(read_object(path)["provenance"]) for path in sorted(Path(directory).glob("*.json"))
    }


def summary(findings: Sequence[Finding], provenances: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """A page of all findings, for the directory that they were written to: verdicts first, then each in full.

    Args:
        findings: in the order of the page.
        provenances: where they come from, by their names; the page says it once for all that have it in common.
    """
    lines = ["# Results", "", "| finding | the claim | profile | time |", "|---|---|---|---|"]
    for finding in findings:
        title = f"[{_escaped(finding.title)}](#{finding.name})"
        lines.append(
            f"| {title} | {finding.verdict} | {finding.profile} | {format_duration(finding.seconds)} |"
        )
    if provenances:
        lines += ["", *_origins(findings, provenances)]
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


def _origins(findings: Sequence[Finding], provenances: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for every commit, set of versions and machine that findings come from."""
    together: dict[str, list[str]] = {}
    for finding in findings:
        if finding.name in provenances:
            together.setdefault(_origin(provenances[finding.name]), []).append(finding.name)
    shared = "Times include measurements that several findings share."
    if len(together) == 1:
        return [f"{shared} {_escaped(origin)}" for origin in together]
    return [shared, "", *(f"- {', '.join(names)}: {_escaped(origin)}" for origin, names in together.items())]


#: Facts about a run that are no version of a package.
_MACHINE = (
    "date",
    "seconds",
    "commit",
    "begun_at",
    "python",
    "machine",
    "threads",
    "cpu",
    "cores",
    "platform",
)


def _origin(found: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in found.items() if name not in _MACHINE)
    begun = found.get("begun_at")
    return (
        f"Commit {found['commit'] or 'unknown'}{f', partial results kept since {begun}' if begun else ''}; "
        f"Python {found['python']}, {versions}; {found['cpu']}, {found['cores']} cores, {found['threads']} "
        f"thread{'' if found['threads'] == '1' else 's'}."
    )


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
