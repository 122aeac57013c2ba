"""What a run of `clean` keeps beside its numbers, so that its page can be written again without the model or the data.

::

    examples.parquet    name, label and prediction of every example in words, and its harm to the queries
    shown.parquet       what the page shows of the first of the rankings
    page.json           how the examples are ranked, and what the page says; written last
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from whence.attribution.saving import read_shown, readable, write_shown
from whence.cleaning.cleaning import Cleaning, Harm
from whence.cleaning.measuring import read_measured
from whence.errors import RunDirectoryError
from whence.runs.files import read_object, replace_file, write_json
from whence.runs.run import read_config

__all__ = ["is_cleaning", "load_cleaning", "save_cleaning"]

_SCORES = ("scores", "low", "high")  # of `Harm`


def save_cleaning(result: Cleaning, directory: Path) -> None:
    """Write what stands beside the numbers into their run directory, over an earlier page of the same run."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {"id": pa.array(map(readable, result.ids), pa.string())}
    for name, words in (("label", result.labels), ("prediction", result.predictions)):
        if words is not None:
            columns[name] = pa.array(map(readable, words), pa.string())
    if result.harm is not None:
        columns |= {name: getattr(result.harm, name).numpy() for name in _SCORES}
    table = pa.table(columns)
    (directory / "page.json").unlink(missing_ok=True)  # or a page in between would be of two runs
    replace_file(directory / "examples.parquet", lambda temporary: pq.write_table(table, temporary))
    write_shown(directory / "shown.parquet", exhibits=result.exhibits)
    harm = None
    if result.harm is not None:
        harm = {"queries": result.harm.queries, "converged": result.harm.converged}
    write_json(
        directory / "page.json",
        {
            "title": result.title,
            "by": result.by,
            "shown": result.shown,
            "term": result.term,
            "harm": harm,
            "versions": dict(result.versions),
            "seconds": dict(result.seconds),
        },
    )


def is_cleaning(directory: Path) -> bool:
    """Whether a directory holds a run of `clean`."""
    return (directory / "config.json").exists() and read_config(directory).get("command") == "clean"


def load_cleaning(directory: str | Path) -> Cleaning:
    """Read a finished run of `clean`.

    Raises:
        RunDirectoryError: where there is none, or it is not finished.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(directory)
    if not is_cleaning(path):
        raise RunDirectoryError(f"{path} holds no run of whence clean")
    if not (path / "page.json").exists():
        raise RunDirectoryError(
            f"the run in {path} is not finished; run the same command again to go on with it"
        )
    page = read_object(path / "page.json")
    try:
        table = pq.read_table(path / "examples.parquet", partitioning=None)
        words = {
            name: table[name].to_pylist()
            for name in ("id", "label", "prediction")
            if name in table.column_names
        }
        harm = None
        if page["harm"] is not None:
            scores, low, high = (torch.from_numpy(table[name].to_numpy().copy()) for name in _SCORES)
            harm = Harm(scores, low, high, **page["harm"])
        _, exhibits, _ = read_shown(path / "shown.parquet")
        found, spectrum = read_measured(path, len(table))
        return Cleaning(
            found=found,
            by=page["by"],
            ids=tuple(words["id"]),
            labels=tuple(words["label"]) if "label" in words else None,
            predictions=tuple(words["prediction"]) if "prediction" in words else None,
            exhibits=exhibits,
            shown=page["shown"],
            lambda_max=spectrum.lambda_max,
            harm=harm,
            term=page["term"],
            title=page["title"],
            settings={**read_config(path), "queries": 0 if harm is None else harm.queries, "by": page["by"]},
            versions=page["versions"],
            seconds=page["seconds"],
        )
    except (OSError, KeyError, TypeError, pa.ArrowException) as error:
        raise RunDirectoryError(
            f"{path} cannot be read ({error!r}): it was changed since it was written. Run the same command again: "
            "what is whole is not computed anew"
        ) from error
