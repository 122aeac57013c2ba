"""Saving an `Attribution` and loading it again, from what `save` wrote or from a finished run directory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from whence.attribution.result import Attribution, Solve
from whence.errors import RunDirectoryError
from whence.exhibit import Exhibit
from whence.report.checks import Validation
from whence.runs import Run, ScoreParts
from whence.runs.files import read_json, replace_file, write_json
from whence.runs.run import environment, read_config
from whence.runs.scores import PartOfScores
from whence.solvers.certificate import Certificate
from whence.solvers.error_parts import ErrorParts
from whence.solvers.plan import Plan
from whence.spectrum import Estimate, Spectrum

__all__ = [
    "VALIDATION",
    "certificate_from_json",
    "certificate_to_json",
    "load",
    "plan_from_json",
    "plan_to_json",
    "read_shown",
    "read_validation",
    "readable",
    "save",
    "spectrum_from_json",
    "spectrum_to_json",
    "write_result",
    "write_shown",
]

#: What `whence.validate` keeps beside a result.
VALIDATION = "validation.json"


def save(result: Attribution, directory: Path) -> None:
    """Write everything of a result into a new directory (or over an earlier save of the same settings)."""
    part = PartOfScores(result.indices, result.terms, result.chain_scores, result.dot_products, result.norms)
    with Run(directory, dict(result.settings)):
        ScoreParts(directory / "scores").write(0, part)
        write_result(result, directory, parts=1)


def write_result(result: Attribution, directory: Path, *, parts: int, scores: str = "scores") -> None:
    """Write what stands beside the scores; ``result.json`` last, since it says that all is there."""
    write_shown(
        directory / "shown.parquet",
        queries=result.queries,
        exhibits=result.exhibits,
        token_scores=result.token_scores,
    )
    if result.validation is not None:
        write_json(directory / VALIDATION, result.validation.to_json())
    solve = result.solve
    write_json(
        directory / "result.json",
        {
            "title": result.title,
            "scores": scores,
            "score_parts": parts,
            "num_examples": result.num_examples,
            "num_terms": result.num_terms,
            "query_losses": result.query_losses.tolist(),
            "query_products": result.query_products.tolist(),
            "query_dots": result.query_dots.tolist(),
            "not_scored": result.not_scored,
            "score_method": result.score_method,
            "seconds": dict(result.seconds),
            "solve": {
                "plan": plan_to_json(solve.plan),
                "spectrum": spectrum_to_json(solve.plan.spectrum),
                "residual": solve.residual.tolist(),
                "residual_stderr": solve.residual_stderr.tolist(),
                "converged": solve.converged.tolist(),
                "num_products": solve.num_products,
                "num_term_products": solve.num_term_products,
                "events": list(solve.events),
                "paths": solve.paths.tolist(),
                "solver": solve.solver,
                "choice": solve.choice,
                "certificate": certificate_to_json(solve.certificate),
                "score_rms": None if solve.score_rms is None else solve.score_rms.tolist(),
                "by_curvature": solve.by_curvature,
                "error_parts": None if solve.error_parts is None else solve.error_parts.to_json(),
            },
        },
    )


def load(directory: str | Path) -> Attribution:
    """Read a saved attribution, or a finished run directory.

    Raises:
        RunDirectoryError: where there is none, or its run is not finished.
    """
    path = Path(directory)
    if not (path / "config.json").exists():
        raise RunDirectoryError(f"{path} holds no run of whence: there is no config.json in it")
    config = read_config(path)
    if config.get("command") == "clean":
        raise RunDirectoryError(
            f"{path} holds a run of whence clean, which has no scores to load; `whence report {path}` writes its page"
        )
    if not (path / "result.json").exists():
        raise RunDirectoryError(
            f"the run in {path} is not finished; run the same command again to go on with it"
        )
    notes = read_json(path / "result.json")
    scores = ScoreParts(path / notes["scores"]).read_all(notes["score_parts"])
    queries, exhibits, token_scores = read_shown(path / "shown.parquet")
    solve = notes["solve"]
    rms = solve["score_rms"]
    return Attribution(
        chain_scores=scores.chains,
        indices=scores.indices,
        terms=scores.terms,
        num_examples=notes["num_examples"],
        num_terms=notes["num_terms"],
        dot_products=scores.dots,
        query_losses=torch.tensor(notes["query_losses"], dtype=torch.float64),
        query_products=torch.tensor(notes["query_products"], dtype=torch.float64),
        query_dots=torch.tensor(notes["query_dots"], dtype=torch.float64),
        solve=Solve(
            plan=plan_from_json(solve["plan"], spectrum_from_json(solve["spectrum"])),
            residual=torch.tensor(solve["residual"], dtype=torch.float64),
            residual_stderr=torch.tensor(solve["residual_stderr"], dtype=torch.float64),
            converged=torch.tensor(solve["converged"], dtype=torch.bool),
            num_products=solve["num_products"],
            num_term_products=solve["num_term_products"],
            events=tuple(solve["events"]),
            paths=torch.tensor(solve["paths"], dtype=torch.float64),
            solver=solve["solver"],
            choice=solve["choice"],
            certificate=certificate_from_json(solve["certificate"]),
            score_rms=None if rms is None else torch.tensor(rms, dtype=torch.float64),
            by_curvature=solve["by_curvature"],
            error_parts=None
            if solve.get("error_parts") is None
            else ErrorParts.from_json(solve["error_parts"]),
        ),
        queries=queries,
        exhibits=exhibits,
        token_scores=token_scores,
        not_scored=notes["not_scored"],
        score_method=notes["score_method"],
        title=notes["title"],
        settings=config,
        versions=read_json(path / "environment.json")
        if (path / "environment.json").exists()
        else environment(),
        seconds=notes["seconds"],
        validation=read_validation(path),
        norms=scores.norms,
    )


def read_validation(directory: Path) -> Validation | None:
    """What was found by checking a result, as far as it was checked."""
    path = directory / VALIDATION
    if not path.exists():
        return None
    try:
        return Validation.from_json(read_json(path))
    except (RunDirectoryError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(
            f"{path} cannot be read ({error!r}): it was changed since it was written. Delete it and validate again"
        ) from error


# --- what pages show ---------------------------------------------------------------------------------------

_FIELDS = [field.name for field in fields(Exhibit)]


def write_shown(
    path: Path,
    *,
    queries: Sequence[Exhibit] = (),
    exhibits: Mapping[int, Exhibit],
    token_scores: Mapping[tuple[int, int], Sequence[float]] | None = None,
) -> None:
    """Exhibits of queries and examples, and token scores, as one Parquet table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = [
        {"kind": "query", "query": q, "index": -1, **asdict(exhibit)} for q, exhibit in enumerate(queries)
    ]
    rows += [
        {"kind": "example", "query": -1, "index": index, **asdict(exhibit)}
        for index, exhibit in exhibits.items()
    ]
    rows += [
        {"kind": "tokens", "query": query, "index": index, "token_scores": list(scores)}
        for (query, index), scores in (token_scores or {}).items()
    ]
    types = {name: pa.string() for name in _FIELDS} | {
        "tokens": pa.list_(pa.string()),
        "image": pa.binary(),
    }
    schema = pa.schema(
        [("kind", pa.string()), ("query", pa.int32()), ("index", pa.int64())]
        + [(name, types[name]) for name in _FIELDS]
        + [("token_scores", pa.list_(pa.float64()))]
    )
    table = pa.Table.from_pylist([_encodable(row) for row in rows], schema=schema)
    replace_file(path, lambda temporary: pq.write_table(table, temporary))


def read_shown(
    path: Path,
) -> tuple[tuple[Exhibit, ...], dict[int, Exhibit], dict[tuple[int, int], tuple[float, ...]]]:
    """Inverse of `write_shown`."""
    import pyarrow.parquet as pq

    queries: list[Exhibit] = []
    exhibits: dict[int, Exhibit] = {}
    token_scores: dict[tuple[int, int], tuple[float, ...]] = {}
    for row in pq.read_table(path, partitioning=None).to_pylist():
        if row["kind"] == "tokens":
            token_scores[row["query"], row["index"]] = tuple(row["token_scores"])
            continue
        tokens = row["tokens"]
        exhibit = Exhibit(
            **{**{n: row[n] for n in _FIELDS}, "tokens": None if tokens is None else tuple(tokens)}
        )
        if row["kind"] == "query":
            queries.append(exhibit)
        else:
            exhibits[row["index"]] = exhibit
    return tuple(queries), exhibits, token_scores


def readable(text: str) -> str:
    """Text that can be stored: half of a surrogate pair, as some decoders produce, is shown as unreadable."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _encodable(row: dict[str, Any]) -> dict[str, Any]:
    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return readable(value)
        return [clean(item) for item in value] if isinstance(value, (list, tuple)) else value

    return {name: clean(value) for name, value in row.items()}


# --- certificate, spectrum and plan --------------------------------------------------------------------


def certificate_to_json(certificate: Certificate | None) -> dict[str, Any] | None:
    """Lists of numbers; JSON has no infinity, so what is not bounded is null."""
    if certificate is None:
        return None
    upper = [bound if math.isfinite(bound) else None for bound in certificate.upper.tolist()]
    kept = {name: getattr(certificate, name) for name in ("damping", "operator_terms", "subset")}
    return {"lower": certificate.lower.tolist(), "upper": upper, **kept}


def certificate_from_json(value: dict[str, Any] | None) -> Certificate | None:
    """Inverse of `certificate_to_json`."""
    if value is None:
        return None
    upper = [math.inf if bound is None else bound for bound in value["upper"]]
    bounds = {"lower": value["lower"], "upper": upper}
    tensors = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in bounds.items()}
    return Certificate(**{**value, **tensors})


def spectrum_to_json(spectrum: Spectrum) -> dict[str, Any]:
    """Numbers, and pairs of a number and its error."""

    def pair(estimate: Estimate | None) -> list[float] | None:
        return None if estimate is None else [estimate.value, estimate.stderr]

    return {
        "trace": pair(spectrum.trace),
        "frobenius": pair(spectrum.frobenius),
        "lambda_max": pair(spectrum.lambda_max),
        "sampling_constant": pair(spectrum.sampling_constant),
        "top_sampling_constant": pair(spectrum.top_sampling_constant),
        "eigenvalues": None if spectrum.eigenvalues is None else spectrum.eigenvalues.tolist(),
        "num_parameters": spectrum.num_parameters,
        "seconds_per_term": spectrum.seconds_per_term,
        "weights": None if spectrum.weights is None else spectrum.weights.tolist(),
    }


def spectrum_from_json(value: dict[str, Any]) -> Spectrum:
    """Inverse of `spectrum_to_json`."""

    def estimate(pair: list[float]) -> Estimate:
        return Estimate(pair[0], pair[1])

    constants = [value["sampling_constant"], value["top_sampling_constant"]]
    constant, top_constant = (None if pair is None else estimate(pair) for pair in constants)
    eigenvalues, weights = (
        None if value[name] is None else torch.tensor(value[name], dtype=torch.float64)
        for name in ("eigenvalues", "weights")
    )
    return Spectrum(
        trace=estimate(value["trace"]),
        frobenius=estimate(value["frobenius"]),
        lambda_max=estimate(value["lambda_max"]),
        sampling_constant=constant,
        top_sampling_constant=top_constant,
        eigenvalues=eigenvalues,
        num_parameters=value["num_parameters"],
        seconds_per_term=value["seconds_per_term"],
        weights=weights,
    )


_PLAN = ("damping", "step_size", "batch_size", "num_steps", "chains", "constant")


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan's numbers, without its spectrum."""
    return {name: getattr(plan, name) for name in _PLAN}


def plan_from_json(value: dict[str, Any], spectrum: Spectrum) -> Plan:
    """Inverse of `plan_to_json`."""
    return Plan(spectrum=spectrum, **value)
