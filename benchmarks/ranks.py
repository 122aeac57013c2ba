"""Does it matter how many processes share the work, and what if one of them is killed?

    python -m benchmarks.ranks [--kills 20] [--only WORK …]

A small Llama, LoRA on it and an MLP are attributed by 1, 2 and 4 processes over gloo, in float64 and in float32, with
the model whole on each and sharded over all: the largest difference of any score from one process's, relative to the
largest score; the seconds of the call on the slowest process; and the peak memory, up to then, of the process with
most (a program goes all ways, one after the other). Written to ``results/ranks.json``. Then runs with a directory lose
a process to SIGKILL at a random moment, and are gone on with by another number of them (``results/ranks_killed.json``).

All processes share this machine's cores, so seconds say what sharing costs here, and nothing of many GPUs.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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
_PROGRAM = "--on-each-process"


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
    "sharded cg": {
        "solver": "cg",
        "product": "finite-difference",
        "micro_batch": 64,
        "method": "directional",
    },
    "sharded lissa": {
        "solver": "lissa",
        "damping": 0.3,
        "chains": 2,
        "product": "finite-difference",
        "micro_batch": 64,
        "method": "directional",
    },
}


#: Every work goes these ways; the MLP all of them.
USUAL = ("cg", "quick", "sharded cg")


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


def _command(processes: int, *words: str) -> list[str]:
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    return [sys.executable, "-m", *(launcher if processes > 1 else []), "benchmarks.ranks", _PROGRAM, *words]


def _found(
    processes: int, work: str, way: str, dtype: str, directory: Path | None = None
) -> dict[tuple[str, str], dict[str, Any]]:
    """(way, dtype) -> what was found; all of a work's ways and both dtypes where these are "all"."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "found.pt"
        command = _command(processes, work, way, dtype, str(out), str(directory or ""))
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        found: dict[tuple[str, str], dict[str, Any]] = torch.load(out, weights_only=False)
        return found


def _off(found: dict[str, Any], expected: dict[str, Any]) -> float:
    there = expected["scores"]
    return float((found["scores"] - there).abs().max() / there.abs().max())


def _sizes(works: list[str]) -> list[dict[str, Any]]:
    rows = []
    for work in works:
        expected = _found(1, work, "all", "all")
        for size in SIZES:
            found = expected if size == 1 else _found(size, work, "all", "all")
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
    return rows


# --- kills -------------------------------------------------------------------------------------------------------


def _kills(count: int) -> list[dict[str, Any]]:
    """A run loses a random process at a random moment, and is gone on with by another number of them."""
    choose, rows = random.Random(0), []
    kinds = [("mlp", "cg"), ("mlp", "lissa"), ("mlp", "quick"), ("mlp", "sharded cg")]
    expected = {kind: _found(1, *kind, "float64")[kind[1], "float64"] for kind in kinds}
    takes = {kind: _lasting(kind) for kind in kinds}
    for number in range(count):
        kind = kinds[number % len(kinds)]
        first, then = choose.choice([(4, 2), (2, 1), (2, 4), (4, 1)])
        directory = Path(tempfile.mkdtemp())
        moment = choose.uniform(*takes[kind])
        lost = _kill_one(first, kind, directory / "run", moment, choose)
        begun = time.perf_counter()
        found = _found(then, *kind, "float64", directory / "run")[kind[1], "float64"]
        rows.append(
            {
                "work": kind[0],
                "way": kind[1],
                "processes": first,
                "then": then,
                "moment": moment,
                **lost,
                "seconds_to_go_on": time.perf_counter() - begun,
                "difference": _off(found, expected[kind]),
            }
        )
        print(rows[-1], flush=True)
        save("ranks_killed", rows)  # so far
        shutil.rmtree(directory)
    return rows


def _lasting(kind: tuple[str, str]) -> tuple[float, float]:
    """Seconds from the directory's first sign to the result, on four processes; from 0 on."""
    directory = Path(tempfile.mkdtemp())
    begun = _begin(4, kind, directory / "run")
    _await(directory / "run" / "manifest.json", begun)
    first = time.perf_counter()
    _await(directory / "run" / "result.json", begun)
    last = time.perf_counter()
    begun.wait()
    shutil.rmtree(directory)
    return 0.0, last - first


def _begin(processes: int, kind: tuple[str, str], directory: Path) -> subprocess.Popen[bytes]:
    out = directory.parent / "found.pt"
    return subprocess.Popen(
        _command(processes, *kind, "float64", str(out), str(directory)), stderr=subprocess.DEVNULL
    )


def _await(path: Path, program: subprocess.Popen[bytes]) -> None:
    while not path.exists() and program.poll() is None:
        time.sleep(0.02)


def _kill_one(
    processes: int, kind: tuple[str, str], directory: Path, moment: float, choose: random.Random
) -> dict[str, Any]:
    begun = _begin(processes, kind, directory)
    _await(directory / "manifest.json", begun)
    time.sleep(moment)
    told = subprocess.run(["ps", "-o", "pid=", "--ppid", str(begun.pid)], capture_output=True, text=True)
    pids = sorted(int(word) for word in told.stdout.split())
    victim = choose.randrange(processes)
    if len(pids) == processes and begun.poll() is None:
        os.kill(pids[victim], signal.SIGKILL)
    killed = time.perf_counter()
    code = begun.wait()
    artifacts = [path.name for path in directory.glob("*") if path.suffix != ".html"]
    return {
        "killed": code != 0,
        "rank": victim,
        "seconds_until_all_ended": time.perf_counter() - killed,
        "files": len(artifacts),
    }


# --- the command -------------------------------------------------------------------------------------------------


def main() -> None:
    if _PROGRAM in sys.argv:
        torch.set_num_threads(1)
        work, way, dtype, out, directory = sys.argv[sys.argv.index(_PROGRAM) + 1 :]
        ways = _ways(work) if way == "all" else [way]
        dtypes = list(ALLOWED) if dtype == "all" else [dtype]
        with launched() as ranks:
            pairs = [(each, kind) for each in ways for kind in dtypes]
            found = {pair: _attribute(work, *pair, directory or None, ranks) for pair in pairs}
            if ranks.rank == 0:
                torch.save(found, out)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=list(WORKS), choices=list(WORKS))
    given = parser.parse_args()
    if given.only:
        _report_sizes(_sizes(given.only))
    if given.kills:
        _report_kills(_kills(given.kills))


def _report_sizes(sizes: list[dict[str, Any]]) -> None:
    save("ranks", sizes)
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
