"""How much memory each of several processes needs, where a model is sharded over them.

    python -m benchmarks.ranks_memory

A Llama with random weights in float32, attributed by one process, and by two over which it is sharded: with
four steps of LiSSA, and by the quick answer (EK-FAC). Bytes are the most that the largest process had in memory during
the call, its model with it, less what it had before the model was made.

Results go to ``benchmarks/results/ranks_memory.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.growth import sequences
from benchmarks.timing import report, save
from whence import Estimate, LanguageModeling, Lissa, Plan, Spectrum, attribute
from whence.distributed import launched, shard

#: Layers of the model, by way: EK-FAC takes more time for each.
LAYERS = {"lissa": 16, "quick": 4}
WIDTH, VOCABULARY, EXAMPLES, TOKENS, DAMPING = 512, 2048, 8, 32, 100.0
SIZES = (1, 2)


def llama(layers: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=layers,
        num_attention_heads=8, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def measure(way: str) -> dict[str, float]:
    """On every process; the largest numbers of all."""
    torch.set_num_threads(1)
    llama(1)  # what imports take is no part of it
    given: dict[str, Any] = {"accuracy": "quick"}
    if way == "lissa":
        one = Estimate(100.0)
        plan = Plan.from_spectrum(Spectrum(trace=one, frobenius=one, lambda_max=one), DAMPING, chains=2)
        given = {"solver": Lissa(plan.replace(batch_size=64, num_steps=4), recover=False, residual_batches=2)}
    with launched() as ranks:
        before = _status("VmRSS")
        model = llama(LAYERS[way])
        parameters = sum(p.numel() for p in model.parameters())
        if ranks.size > 1:
            shard(model)
        Path("/proc/self/clear_refs").write_text(
            "5"
        )  # the peak begins anew: the model was whole on its way here
        data, begun = sequences(EXAMPLES, TOKENS, 1), time.perf_counter()
        attribute(
            model, data, sequences(1, TOKENS, 2), task=LanguageModeling(), damping=DAMPING, baseline=False,
            micro_batch=4, **given,
        )  # fmt: skip
        seconds = time.perf_counter() - begun
        found = torch.tensor([_status("VmHWM") - before, seconds], dtype=torch.float64)
        peak, seconds = ranks.largest(found).tolist()
    return {"parameters": parameters, "bytes": peak, "seconds": seconds}


def _status(name: str) -> float:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(name))
    return 1024.0 * int(line.split()[1])


def measured(size: int, way: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "found.json"
        started = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        subprocess.run(
            [*started, "-m", "benchmarks.ranks_memory", "--measure", way, "--out", str(out)], check=True
        )
        return {"way": way, "processes": size, **json.loads(out.read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ranks_memory", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--measure", choices=list(LAYERS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        found = json.dumps(measure(given.measure))
        given.out.write_text(found)  # the same from each
        return
    rows: list[dict[str, Any]] = []
    for way in LAYERS:
        for size in SIZES:
            rows.append(measured(size, way))
            rows[-1]["of one process"] = rows[-1]["bytes"] / rows[-size.bit_length()]["bytes"]
            print(rows[-1], flush=True)
            save("ranks_memory", rows)  # so far
    report(
        "Memory of the largest process",
        ["way", "parameters", "processes", "MB", "of one process", "seconds"],
        [
            [row["way"], f"{row['parameters']:,}", row["processes"], f"{row['bytes'] / 1e6:.0f}",
             f"{row['of one process']:.2f}", f"{row['seconds']:.0f}"]
            for row in rows
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
