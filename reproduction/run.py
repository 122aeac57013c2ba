"""`reproduce`: one table or figure of the paper by its name, or all of them, into one directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from reproduction import counterexample, figure1, figure2, figure3, figure4, table1, table2, tfidf
from reproduction.finding import Finding, Profile, check_profile
from reproduction.provenance import commit
from reproduction.spectra import Measured, measure
from reproduction.subjects import Kind, Subject, load_subject, subjects
from reproduction.writing import read, read_provenance, summary, write
from whence.errors import OptionError
from whence.model.importance import Importance, measure_importance
from whence.runs.files import read_json, read_tensors, replace_file, write_json, write_tensors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["NAMES", "reproduce"]

Outcome = tuple[Finding, "Figure"]


class _Bench:
    """Subjects and their spectra, loaded and measured when something needs them, once."""

    def __init__(
        self, profile: Profile, output: Path, inputs: Path | None, download: bool, seed: int
    ) -> None:
        self.profile, self.output, self.seed = profile, output, seed
        #: Where partial results are kept: an interrupted reproduction goes on from them.
        self.work = output / "work" / f"{profile}-{seed}"
        self._inputs, self._download = inputs, download
        self._loaded: dict[str, Subject] = {}

    def begun_at(self) -> str | None:
        """The commit whose code left the first of the partial results, which this run goes on with."""
        path = self.work / "begun.json"
        if not path.exists():
            write_json(path, {"commit": commit()})
        found: str | None = read_json(path)["commit"]
        return found

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def subject(self, key: str) -> Subject:
        if key not in self._loaded:
            self._loaded.clear()  # one at a time: the paper's are large
            subject = load_subject(key, inputs=self._inputs, allow_download=self._download)
            self._loaded[key] = self._with_importance(key, subject) if subject.certain else subject
        return self._loaded[key]

    def _with_importance(self, key: str, subject: Subject) -> Subject:
        path = self.work / "importance" / f"{key}.safetensors"
        if not path.exists():
            write_tensors(path, {"curvature": measure_importance(subject.operator()).curvature}, {})
        return replace(subject, importance=Importance(read_tensors(path)[0]["curvature"]).probabilities())

    def measured(self, key: str) -> Measured:
        return measure(key, lambda: self.subject(key), self.profile, self.work, seed=self.seed)

    @cached_property
    def spectra(self) -> list[Measured]:
        return [self.measured(key) for key in subjects(self.profile)]

    def first(self, kind: Kind) -> str:
        return subjects(self.profile, kind)[0]


def _table1(bench: _Bench) -> Outcome:
    return table1.run(bench.spectra, bench.profile)


def _table2(bench: _Bench) -> Outcome:
    return table2.run(bench.spectra, bench.profile)


def _figure1(bench: _Bench) -> Outcome:
    key = bench.first("vision")
    return figure1.run(
        key, bench.subject(key), bench.measured(key), bench.profile, bench.work, seed=bench.seed
    )


def _figure2(bench: _Bench) -> Outcome:
    key = bench.first("vision")
    return figure2.run(
        key, bench.subject(key), bench.measured(key), bench.profile, bench.work, seed=bench.seed
    )


def _figure3(bench: _Bench) -> Outcome:
    key = bench.first("language")
    return figure3.run(
        key, bench.subject(key), bench.measured(key), bench.profile, bench.work, seed=bench.seed
    )


def _figure4(bench: _Bench) -> Outcome:
    keys = subjects(bench.profile)
    if bench.profile == "offline":  # a language model small enough to show the slope to a few percent
        keys = (*keys, *subjects("quick", "language"))
    return figure4.run(keys, bench.subject, bench.profile, bench.work, seed=bench.seed)


def _counterexample(bench: _Bench) -> Outcome:
    return counterexample.run(bench.profile, generator=bench.generator)


def _tfidf(bench: _Bench) -> Outcome:
    return tfidf.run(bench.profile, generator=bench.generator)


_RUNS: dict[str, Callable[[_Bench], Outcome]] = {
    "table1": _table1,
    "table2": _table2,
    "figure1": _figure1,
    "figure2": _figure2,
    "figure3": _figure3,
    "figure4": _figure4,
    "counterexample": _counterexample,
    "tfidf": _tfidf,
}
#: What can be reproduced.
NAMES = tuple(_RUNS)


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
        output: where ``NAME.json``, figures and paragraphs go, and ``RESULTS.md``; an interrupted run goes on there.
        inputs: directory with the paper's models and data, for the profile ``paper``.
        allow_download: whether the paper's models and data may be fetched from the hub where ``inputs`` lacks them.
        seed: of all random numbers.
    """
    if name != "all" and name not in _RUNS:
        raise OptionError(f"there is no table or figure {name!r}; it is one of {', '.join(NAMES)}, or all")
    check_profile(profile)
    return _reproduce(
        NAMES if name == "all" else (name,), _Bench(profile, output, inputs, allow_download, seed)
    )


def _reproduce(names: tuple[str, ...], bench: _Bench) -> Iterator[Finding]:
    begun_at = bench.begun_at()
    for name in names:
        finding, drawn = _RUNS[name](bench)
        write(finding, drawn, bench.output, begun_at=begun_at)
        ordered = sorted(read(bench.output), key=lambda found: NAMES.index(found.name))
        text = summary(ordered, read_provenance(bench.output))
        replace_file(bench.output / "RESULTS.md", partial(_write, text=text))
        yield finding


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
