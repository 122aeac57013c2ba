"""Does it matter how many processes share the work, and what if one of them is killed?

    python -m benchmarks.ranks [--kills 20] [--only WORK …] [--ways WAY …] [--sizes 1 2 4]

A small Llama, LoRA on it and an MLP are attributed by 1, 2 and 4 processes over gloo, in float64 and in float32, with
the model whole on each and sharded over all (by exact products, and once more by finite differences): the largest
difference of any score from one process's, relative to the largest score; the seconds of the call on the slowest
process; and the peak memory, up to then, of the process with most (a program goes all ways, one after the other).
Written to ``results/ranks_WORK.json``. Then runs with a directory lose a process to SIGKILL at a random moment, and are
gone on with by another number of them (``results/ranks_killed.json``).

All processes share this machine's cores, so seconds say what sharing costs here, and nothing of many GPUs.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn

import whence
from benchmarks.timing import report, save
from whence.distributed import Ranks, launched, shard

#: What scores may differ by.
ALLOWED = {"float64": 1e-9, "float32": 1e-4}
SIZES = (1, 2, 4)


# --- works -------------------------------------------------------------------------------------------------------


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _mlp() -> tuple[nn.Module, list[Any], whence.Task]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 10))
    x = torch.randn(300, 32, generator=_random(1))
    y = torch.randint(10, (300,), generator=_random(2)).tolist()
    return model, list(zip(x, y, strict=True)), whence.Classification()


def _llama() -> tuple[nn.Module, list[Any], whence.Task]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    generator = _random(3)
    lengths = torch.randint(8, 24, (48,), generator=generator).tolist()
    rows = [torch.randint(1, 256, (length,), generator=generator) for length in lengths]
    return (
        LlamaForCausalLM(LlamaConfig(**sizes, **heads)),
        [{"input_ids": row, "labels": row} for row in rows],
        whence.LanguageModeling(),
    )


def _lora() -> tuple[nn.Module, list[Any], whence.Task]:
    from peft import LoraConfig, get_peft_model

    base, rows, task = _llama()
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.05, generator=_random(4))
    return model, rows, task


WORKS: dict[str, Callable[[], tuple[nn.Module, list[Any], whence.Task]]] = {
    "llama": _llama,
    "lora": _lora,
    "mlp": _mlp,
}
WAYS: dict[str, dict[str, Any]] = {
    "cg": {"solver": "cg"},
    "quick": {"accuracy": "quick"},
    "lissa": {"solver": "lissa", "damping": 0.3, "chains": 2},
    "sharded cg": {"solver": "cg"},
    "sharded quick": {"accuracy": "quick"},
    "sharded differences": {
        "solver": "cg",
        "product": "finite-difference",
        "micro_batch": 64,
        "method": "directional",
    },
    "sharded lissa": {"solver": "lissa", "damping": 0.3, "chains": 2},
}


#: Every work goes these ways; the MLP all of them.
USUAL = ("cg", "quick", "sharded cg", "sharded quick", "sharded differences")


def _ways(work: str) -> list[str]:
    return list(WAYS) if work == "mlp" else list(USUAL)


def _attribute(work: str, way: str, dtype: str, run_dir: str | None, ranks: Ranks) -> dict[str, Any]:
    """On every process: the scores, the seconds, and the peak memory in bytes so far."""
    model, data, task = WORKS[work]()
    kind = getattr(torch, dtype)
    model = model.to(kind).eval()
    if work == "mlp":
        data = [(x.to(kind), y) for x, y in data]
    if way.startswith("sharded") and ranks.size > 1:
        shard(model)
    begun = time.perf_counter()
    result = whence.attribute(
        model, data, data[:3], task=task, run_dir=run_dir, checkpoint_seconds=0.01, **WAYS[way]
    )
    numbers = torch.tensor([time.perf_counter() - begun, _peak()], dtype=torch.float64)
    worst = ranks.largest(numbers).tolist()
    return {"scores": result.scores, "solver": result.solve.solver, "numbers": worst}


def _peak() -> float:
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# --- processes ---------------------------------------------------------------------------------------------------

Found = dict[tuple[str, str], dict[str, Any]]


def _one(
    rank: int, size: int, port: int, work: str, pairs: list[tuple[str, str]], out: Path, directory: str
) -> None:
    """What one of the processes does, as a program under torchrun would."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with launched() as ranks:
        found = {pair: _attribute(work, *pair, directory or None, ranks) for pair in pairs}
        if ranks.rank == 0:
            torch.save(found, out)


def _begin(
    size: int, work: str, pairs: list[tuple[str, str]], out: Path, directory: Path | str = ""
) -> list[ForkProcess]:
    """So many processes, forked from this one, which has never run a model: no time goes into imports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("fork")
    begun = [
        context.Process(target=_one, args=(rank, size, port, work, pairs, out, str(directory)), daemon=True)
        for rank in range(size)
    ]
    for process in begun:
        process.start()
    return begun


def _found(size: int, work: str, pairs: list[tuple[str, str]], directory: Path | str = "") -> Found:
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "found.pt"
        for process in _begin(size, work, pairs, out, directory):
            process.join()
            if process.exitcode:
                raise RuntimeError(f"{work} {pairs} on {size} processes ended with {process.exitcode}")
        found: Found = torch.load(out, weights_only=False)
        return found


def _off(found: dict[str, Any], expected: dict[str, Any]) -> float:
    there = expected["scores"]
    return float((found["scores"] - there).abs().max() / there.abs().max())


def _sizes(works: list[str], ways: list[str], sizes: list[int]) -> list[dict[str, Any]]:
    rows = []
    for work in works:
        pairs = [(way, dtype) for way in ways or _ways(work) for dtype in ALLOWED]
        expected = _found(1, work, pairs)
        for size in sizes:
            found = expected if size == 1 else _found(size, work, pairs)
            for (way, dtype), mine in found.items():
                seconds, peak = mine["numbers"]
                rows.append(
                    {
                        "work": work,
                        "way": way,
                        "dtype": dtype,
                        "processes": size,
                        "solver": mine["solver"],
                        "difference": _off(mine, expected[way, dtype]),
                        "seconds": seconds,
                        "peak_bytes_so_far": peak,
                    }
                )
                print(rows[-1], flush=True)
            save(f"ranks_{work}", [row for row in rows if row["work"] == work])  # so far
    return rows


# --- kills -------------------------------------------------------------------------------------------------------


def _kills(count: int) -> list[dict[str, Any]]:
    """A run loses a random process at a random moment, and is gone on with by another number of them."""
    choose, rows = random.Random(0), []
    expected = {way: _found(1, "mlp", [(way, "float64")])[way, "float64"] for way in WAYS}
    lasts: dict[tuple[str, int], float] = {}
    for number in range(count):
        way = list(WAYS)[number % len(WAYS)]
        first, then = choose.choice([(4, 2), (2, 1), (2, 4), (4, 1)])
        directory = Path(tempfile.mkdtemp())
        if (way, first) not in lasts:
            begun = time.perf_counter()
            _found(first, "mlp", [(way, "float64")], directory / "whole")
            lasts[way, first] = time.perf_counter() - begun
        moment = choose.uniform(0.0, lasts[way, first])
        lost = _kill_one(first, way, directory / "run", moment, choose)
        begun = time.perf_counter()
        found = _found(then, "mlp", [(way, "float64")], directory / "run")[way, "float64"]
        rows.append(
            {
                "work": "mlp",
                "way": way,
                "processes": first,
                "then": then,
                "lasts": lasts[way, first],
                "moment": moment,
                **lost,
                "seconds_to_go_on": time.perf_counter() - begun,
                "difference": _off(found, expected[way]),
            }
        )
        print(rows[-1], flush=True)
        save("ranks_killed", rows)  # so far
        shutil.rmtree(directory)
    return rows


def _kill_one(size: int, way: str, directory: Path, moment: float, choose: random.Random) -> dict[str, Any]:
    begun = _begin(size, "mlp", [(way, "float64")], directory.parent / "found.pt", directory)
    time.sleep(moment)
    victim = choose.randrange(size)
    killed = begun[victim].is_alive()
    begun[victim].kill()
    since = time.perf_counter()
    for process in begun:
        process.join()
    artifacts = [
        path for path in directory.rglob("*") if path.suffix in (".json", ".safetensors", ".parquet")
    ]
    return {
        "killed": killed,
        "rank": victim,
        "seconds_until_all_ended": time.perf_counter() - since,
        "exit_codes": [process.exitcode for process in begun],
        "files": len(artifacts),
    }


# --- the command -------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--ways", nargs="*", default=[], choices=list(WAYS))
    parser.add_argument("--sizes", nargs="*", type=int, default=list(SIZES), choices=SIZES)
    given = parser.parse_args()
    if given.only:
        _report_sizes(_sizes(given.only, given.ways, given.sizes))
    if given.kills:
        _report_kills(_kills(given.kills))


def _report_sizes(sizes: list[dict[str, Any]]) -> None:
    report(
        "Processes",
        ["work", "way", "dtype", "processes", "difference", "allowed", "", "seconds", "peak MB"],
        [
            [
                *(row[name] for name in ("work", "way", "dtype", "processes")),
                f"{row['difference']:.1e}",
                f"{ALLOWED[row['dtype']]:g}",
                "PASS" if row["difference"] <= ALLOWED[row["dtype"]] else "MISS",
                f"{row['seconds']:.2f}",
                f"{row['peak_bytes_so_far'] / 2**20:.0f}",
            ]
            for row in sizes
        ],
    )


def _report_kills(kills: list[dict[str, Any]]) -> None:
    save("ranks_killed", kills)
    report(
        "Killed, and gone on with",
        ["work", "way", "processes", "then", "killed", "ended after s", "difference", ""],
        [
            [
                *(row[name] for name in ("work", "way", "processes", "then", "killed")),
                f"{row['seconds_until_all_ended']:.1f}",
                f"{row['difference']:.1e}",
                "PASS" if row["difference"] <= ALLOWED["float64"] else "MISS",
            ]
            for row in kills
        ],
    )


if __name__ == "__main__":
    main()
