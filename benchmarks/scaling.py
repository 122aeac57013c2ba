"""What models of billions of parameters would cost on GPUs: predicted, from what was measured on small ones.

    python -m benchmarks.scaling

Gradients per product and copies of the parameters are those of ``products.json`` and ``memory.json`` (the Llama of the
former). A gradient takes 6 operations per parameter and token, of which a GPU does the part `USED` of what its maker
names for float32 without TF32. None of it was run on a GPU. docs/scaling.md has the table.

Results go to ``benchmarks/results/scaling.json``.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from benchmarks.timing import RESULTS, report, save

#: name -> parameters.
MODELS = {"OPT-1.3B": 1.316e9, "7B": 6.74e9, "70B": 69.0e9}
#: name -> (bytes of memory, operations per second in float32 and bytes per second to others, by data sheets).
GPUS = {
    "A100 80 GB": (80e9, 19.5e12, 300e9),
    "H100 SXM 80 GB": (80e9, 67e12, 450e9),
    "H200 141 GB": (141e9, 67e12, 450e9),
}
#: The part of its operations and of its memory that a GPU is taken to give: assumptions.
USED, FILLED = 0.6, 0.9
#: A question: training tokens, queries, LiSSA's steps and tokens in each.
TOKENS, QUERIES, STEPS, BATCH = 1_000_000, 10, 1000, 2048
#: Bytes of a number, and of LoRA's parameters as a part of the model's (rank 8 to 16 on attention).
WIDE, ADAPTER = 4, 0.003


def calibration() -> dict[str, float]:
    """Gradients per product, and copies of the parameters that a LiSSA step holds beside the model."""
    products = json.loads((RESULTS / "products.json").read_text())["results"]["workloads"]["llama"][
        "contenders"
    ]
    cases = json.loads((RESULTS / "memory.json").read_text())["results"]["cases"]
    copies = max(case["peak_copies"] for case in cases if case["chains"] == 1 and case["passes"] == 1)
    return {
        "gradients of an exact product": products["whence exact"]["gradients"]["median"],
        "gradients of a LiSSA step": products["whence LiSSA step"]["gradients"]["median"],
        "copies of a LiSSA step": copies,
    }


def predicted(parameters: float, gpu: str, measured: dict[str, float]) -> dict[str, Any]:
    """Of one model on one kind of GPU: how many it takes, hours, and bytes sent."""
    memory, speed, link = GPUS[gpu]
    held = (1 + measured["copies of a LiSSA step"]) * WIDE * parameters
    number = max(1, math.ceil(held / (FILLED * memory)))
    gradient = 6 * parameters / (USED * speed * number)  # seconds of a token
    solving = QUERIES * STEPS * BATCH * measured["gradients of a LiSSA step"] * gradient
    scoring = TOKENS * gradient  # one gradient an example, whatever the number of queries
    # FSDP: parameters are gathered for two forwards and one backward, and gradients scattered, once a step
    sent = 4 * WIDE * parameters * (number - 1) / number
    adapters = parameters * (WIDE + ADAPTER * WIDE * (1 + measured["copies of a LiSSA step"]))
    return {
        "gigabytes": held / 1e9,
        "gpus": number,
        "hours solving": solving / 3600,
        "hours scoring": scoring / 3600,
        "gigabytes sent a step": sent / 1e9,
        "hours sending": QUERIES * STEPS * sent / link / 3600,
        "gigabytes, adapters over float32": adapters / 1e9,
        "gigabytes, adapters over int8": (adapters - (WIDE - 1) * parameters) / 1e9,
        "gigabytes, adapters over int4": (adapters - (WIDE - 0.56) * parameters)
        / 1e9,  # with scales of groups of 64
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.split("\n")[0])
    parser.parse_args()
    measured = calibration()
    found = {model: {gpu: predicted(count, gpu, measured) for gpu in GPUS} for model, count in MODELS.items()}
    columns = list(found["7B"]["A100 80 GB"])
    report(
        "PREDICTED, not measured",
        ("", *columns),
        [
            (f"{m}, {g}", *(f"{row[c]:,.3g}" for c in columns))
            for m, by in found.items()
            for g, row in by.items()
        ],
    )
    save("scaling", {"measured": measured, "assumed": {"used": USED, "filled": FILLED}, "predicted": found})


if __name__ == "__main__":
    main()
