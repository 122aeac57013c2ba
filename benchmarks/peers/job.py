"""One contender's whole job, from a loaded model to scores, in this process: for `benchmarks.peers.interleaved`.

    python -m benchmarks.peers.job CONTENDER MODEL SCORES

Nothing is imported that the contender does not need, so that its memory is its own. Prints seconds of the processor,
and in megabytes what the process held before the job and at its peak.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.peers.roster import ROSTER

__all__ = ["CONTENDERS", "OURS"]

#: By name: options of `whence.attribute`.
OURS: dict[str, dict[str, Any]] = {"whence, quick": {"accuracy": "quick"}, "whence, default": {}}
#: They and the peers, which are asked at their defaults, or, where they have none, in the middle of their grid.
CONTENDERS = (*OURS, *ROSTER)


def job(contender: str, loaded: dict[str, Any]) -> Callable[[], Tensor]:
    """What is to be measured; its imports are done."""
    model, task, train, queries = (loaded[name] for name in ("model", "task", "train", "queries"))
    if contender in ROSTER:
        peers = importlib.import_module(f"benchmarks.peers.{ROSTER[contender].module}").PEERS
        peer = next(peer for peer in peers if peer.name == contender)

        def ask() -> Tensor:
            prepared = peer.prepared(model, task, train, loaded["checkpoints"])
            default = peer.settings.get("default", prepared.scale * sum(peer.multiples[4:5]))
            scores: Tensor = prepared.scores(queries, default)
            return scores

        return ask
    from torch.utils.data import TensorDataset

    from whence import LanguageModeling, attribute

    def examples(tensors: list[Tensor]) -> Any:
        if isinstance(task, LanguageModeling):
            return [{"input_ids": row} for row in tensors[0]]
        return TensorDataset(*tensors)

    data, asked = examples(train), examples(queries)
    # without the plain dot products beside the scores, which no peer gives either
    return lambda: attribute(model, data, asked, task=task, baseline=False, **OURS[contender]).scores


def megabytes(field: str) -> float:
    """Of this process: VmRSS, what it holds; VmHWM, the most it held. Unlike `ru_maxrss`, without its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.job", description=__doc__.split("\n")[0]
    )
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("model", type=Path, help="what `benchmarks.peers.interleaved` keeps of a work")
    parser.add_argument("scores", type=Path, help="where they go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = job(options.contender, torch.load(options.model, weights_only=False))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here on
    before, started = megabytes("VmRSS"), time.process_time()
    scores = run()
    seconds, peak = time.process_time() - started, megabytes("VmHWM")
    save_file({"scores": scores.contiguous()}, options.scores)
    print(json.dumps({"seconds": seconds, "loaded": before, "peak": peak}))


if __name__ == "__main__":
    main()
