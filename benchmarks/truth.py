"""The ground truth: every work retrained on random halves of its data, kept in the repository.

    python -m benchmarks.truth [NAME …]

What is there is not trained again; what was interrupted goes on.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from benchmarks.works import WORKS, Work, work
from whence.validation import Outcomes, half_subsets, retrain

__all__ = ["truth"]

DIRECTORY = Path(__file__).parent / "results" / "truth"
SCRATCH = Path("runs") / "truth"


def truth(of: Work) -> Outcomes:
    """Losses of a work's queries after training on halves, as kept.

    Raises:
        RunDirectoryError: nobody has trained them yet.
    """
    return Outcomes.load(DIRECTORY / f"{of.name}.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORKS)}; all by default")
    parser.add_argument("--processes", type=int, default=1, help="that train side by side (1)")
    options = parser.parse_args()
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name in options.names or WORKS:
        each, path = work(name), DIRECTORY / f"{name}.safetensors"
        if path.exists():
            continue
        started = time.process_time()
        subsets = half_subsets(len(each.train_set()), each.halves, generator=torch.Generator().manual_seed(0))
        outcomes = retrain(
            each,
            subsets,
            range(each.seeds),
            each.asked(),
            task=each.task,
            processes=options.processes,
            directory=SCRATCH / name,
            name=name,
        )
        outcomes.save(path)
        print(
            f"{name}: {each.halves} halves × {each.seeds} seeds, {time.process_time() - started:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
