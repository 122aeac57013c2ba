"""`reproduce`: one table or figure of the paper by its name, or all of them, into one directory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from reproduction import counterexample, figure1, figure2, figure3, figure4, table1, table2, tfidf
from reproduction.bench import Bench
from reproduction.finding import Conclusion, Finding, Profile, page, write
from reproduction.kept import read_object
from whence.errors import OptionError, RunDirectoryError, WhenceWarning
from whence.runs.files import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["NAMES", "read", "reproduce", "summarise"]


class _Reproduction(Protocol):
    """What each of the modules has: it measures numbers; conclusion and figure follow from these alone."""

    def measure(self, bench: Bench) -> dict[str, Any]: ...

    def conclude(self, numbers: dict[str, Any]) -> Conclusion: ...

    def draw(self, numbers: dict[str, Any]) -> Figure: ...


_REPRODUCTIONS: Mapping[str, _Reproduction] = {
    "table1": table1,
    "table2": table2,
    "figure1": figure1,
    "figure2": figure2,
    "figure3": figure3,
    "figure4": figure4,
    "counterexample": counterexample,
    "tfidf": tfidf,
}
#: What can be reproduced.
NAMES = tuple(_REPRODUCTIONS)


def reproduce(
    name: str,
    profile: Profile,
    output: Path,
    *,
    inputs: Path | None = None,
    allow_download: bool = False,
    seed: int = 0,
) -> Iterator[Finding]:
    """Reproduce one table or figure, or ``"all"``; each finding is written before it is handed over.

    Args:
        name: one of `NAMES`, or ``"all"``.
        profile: how much is run, and on which models.
        output: where ``NAME.json``, figures and ``RESULTS.md`` go; an interrupted run goes on there.
        inputs: directory with the paper's models and data, for the profile ``paper``.
        allow_download: whether the paper's models and data may be fetched from the hub where ``inputs`` lacks them.
        seed: of all random numbers.

    Raises:
        OptionError: no such name or profile, or ``output`` holds this finding of another profile.
    """
    if name not in (*NAMES, "all"):
        raise OptionError(f"there is no table or figure {name!r}; it is one of {', '.join(NAMES)}, or all")
    names = NAMES if name == "all" else (name,)
    bench = Bench(profile, output, inputs=inputs, allow_download=allow_download, seed=seed)
    kept = [path for name in names if (path := output / f"{name}.json").exists()]
    other = next((path for path in kept if read_object(path).get("profile") != profile), None)
    if other is not None:
        raise OptionError(
            f"{other} is of another profile than {profile}, which would overwrite it; choose another --output"
        )
    return _reproduce(names, bench)


def _reproduce(names: tuple[str, ...], bench: Bench) -> Iterator[Finding]:
    for name in names:
        bench.start_watch()
        numbers = _REPRODUCTIONS[name].measure(bench)
        finding = _concluded(name, bench.profile, bench.seconds, numbers)
        write(finding, _REPRODUCTIONS[name].draw(numbers), bench.output, provenance=bench.provenance())
        _write_page(bench.output)
        yield finding


def summarise(output: Path) -> list[Finding]:
    """Conclude and draw again from the numbers that ``output`` holds, measuring nothing, and write its page."""
    found = _read_all(output)
    for finding, provenance in found:
        write(finding, _REPRODUCTIONS[finding.name].draw(finding.numbers), output, provenance=provenance)
    _write_page(output)
    return [finding for finding, _ in found]


def read(name: str, output: Path) -> tuple[Finding, dict[str, Any]]:
    """A finding that was written to a directory, concluded anew from its numbers; and where these come from.

    Raises:
        RunDirectoryError: the file holds other numbers than this version measures.
    """
    path = output / f"{name}.json"
    content = read_object(path)
    try:
        kept = (content[field] for field in ("profile", "seconds", "numbers"))
        return _concluded(name, *kept), content["provenance"]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RunDirectoryError(
            f"{path} does not hold the numbers that this version measures ({error!r}); reproduce it again"
        ) from error


def _concluded(name: str, profile: Profile, seconds: float, numbers: dict[str, Any]) -> Finding:
    conclusion = _REPRODUCTIONS[name].conclude(numbers)
    return Finding(name=name, profile=profile, seconds=seconds, numbers=numbers, **vars(conclusion))


def _read_all(output: Path) -> list[tuple[Finding, dict[str, Any]]]:
    """All that can be read, in the order of the page."""
    found = []
    for name in (name for name in NAMES if (output / f"{name}.json").exists()):
        try:
            found.append(read(name, output))
        except RunDirectoryError as error:
            warnings.warn(f"left out of the page: {error}", WhenceWarning, stacklevel=2)
    if not found:
        raise RunDirectoryError(f"{output} holds no findings; reproduce something into it first")
    return found


def _write_page(output: Path) -> None:
    text = page(_read_all(output))
    replace_file(output / "RESULTS.md", lambda path: _write_text(path, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
