"""`python -m reproduction`: the paper's tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whence.cli.options import AsJson, guarded
from whence.cli.outcome import out, print_json

__all__ = ["reproduce_command"]


@guarded
def reproduce_command(
    name: Annotated[
        str,
        typer.Argument(
            help="table1, table2, figure1, figure2, figure3, figure4, counterexample, tfidf, or all."
        ),
    ],
    profile: Annotated[
        str,
        typer.Option(
            help="quick: small models trained on the spot, minutes. offline: real models and data that package "
            "registries carry, hours. paper: the paper's own models and data, from --inputs."
        ),
    ] = "quick",
    output: Annotated[
        Path, typer.Option(help="Where numbers, figures and RESULTS.md go; an interrupted run goes on there.")
    ] = Path("results"),
    inputs: Annotated[
        Path | None,
        typer.Option(
            help="Of the paper profile: a directory with resnet-18, resnet-50, opt-1.3b, llama-7b, mistral-7b (Hugging "
            "Face directories), imagenet (train and val image folders) and openwebtext (files that whence reads)."
        ),
    ] = None,
    allow_download: Annotated[
        bool, typer.Option(help="Fetch the paper's models and data from the hub where --inputs lacks them.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Regenerate a table or figure of the paper: what it claims, what is measured here, and whether it holds."""
    from reproduction import reproduce

    for finding in reproduce(
        name,
        profile,  # type: ignore[arg-type]  # checked there
        output,
        inputs=inputs,
        allow_download=allow_download,
        seed=seed,
    ):
        if as_json:
            print_json({"name": finding.name, "holds": finding.holds, "measured": finding.measured})
            continue
        out().rule(finding.title)
        out().print(f"The paper's claim. {finding.claim}\n", markup=False)
        out().print(f"Measured here. {finding.measured}\n", markup=False)
        out().print(
            f"The claim {finding.verdict}.   {output / finding.name}.svg", markup=False, soft_wrap=True
        )


if __name__ == "__main__":
    typer.run(reproduce_command)
