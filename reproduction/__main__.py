"""``python -m reproduction``: the paper's tables and figures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from reproduction import NAMES, Finding, reproduce, summarise
from reproduction.finding import PROFILES
from whence.cli.options import AsJson, guarded
from whence.cli.outcome import out, print_json

__all__ = ["app"]

app = typer.Typer(add_completion=False)


@app.command()
@guarded
def reproduction(
    name: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(NAMES)}, all, or summary, which writes RESULTS.md and the figures anew from the "
            "numbers in --output and measures nothing."
        ),
    ],
    profile: Annotated[
        str,
        typer.Option(help=" ".join(f"{name}: {meaning}." for name, meaning in PROFILES.items())),
    ] = "quick",
    output: Annotated[
        Path | None,
        typer.Option(
            help="Where numbers, figures and RESULTS.md go; an interrupted run goes on there. By default "
            "runs/reproduction-PROFILE; what is kept of the offline profile is in results."
        ),
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="Of the paper profile: a directory with resnet-18, resnet-50, opt-1.3b, llama-7b, mistral-7b (Hugging "
            "Face directories), imagenet (train and val image folders) and openwebtext (files that whence reads)."
        ),
    ] = None,
    allow_download: Annotated[
        bool,
        typer.Option(
            "--allow-download",
            help="Fetch the paper's models and data from the hub where --inputs lacks them.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Regenerate a table or figure of the paper: what it claims, what is measured here, and whether it holds."""
    place = output or Path("runs") / f"reproduction-{profile}"
    if name == "summary":
        findings = iter(summarise(place))
    else:
        findings = reproduce(
            name,
            profile,  # type: ignore[arg-type]  # checked there
            place,
            inputs=inputs,
            allow_download=allow_download,
            seed=seed,
        )
    for finding in findings:
        _print(finding, place, as_json=as_json)


def _print(finding: Finding, place: Path, *, as_json: bool) -> None:
    if as_json:
        shown = asdict(finding)
        return print_json({field: shown[field] for field in ("name", "holds", "verdict", "rows")})
    console = out()
    console.rule(finding.title)
    console.print(f"The paper's claim. {finding.claim}\n", markup=False)
    console.print(f"It {finding.outcome}. {finding.verdict}\n", markup=False)
    return console.print(str(place / f"{finding.name}.svg"), markup=False, soft_wrap=True)


if __name__ == "__main__":
    app()
