"""Which training images made the model misread this digit? The core of whence, step by step, in a minute.

Trains a small network on scikit-learn's digits with one label in twenty flipped, picks test images that it
misreads, and follows whence's steps: operator, spectrum, plan, solution, scores with error bars.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import TensorDataset

import whence
from whence.demo.digits import load_digits_with_flipped_labels, train_digits

QUERIES = 3
console = Console()


def main() -> None:
    """Train, ask, answer."""
    digits = load_digits_with_flipped_labels()
    train_set, test_set, flipped = digits.train, digits.test, digits.flipped
    console.rule("A model to ask about")
    model = train_digits(train_set)
    x, y = test_set.tensors
    guesses = model(x).argmax(1)
    misread = (guesses != y).nonzero().flatten()[:QUERIES]
    console.print(f"{float((guesses == y).float().mean()):.1%} of {len(y)} test images read correctly")

    console.rule("Spectrum of the Gauss-Newton Hessian")
    generator = torch.Generator().manual_seed(0)
    gnh = whence.GaussNewton(model, whence.Classification(), train_set)
    console.print(gnh)
    spectrum = whence.estimate_spectrum(gnh, generator=generator)
    console.print(str(spectrum))

    console.rule("Plan")
    damping = spectrum.lambda_max.value / 100
    plan = whence.Plan.from_spectrum(spectrum, damping, C=spectrum.safe_constant).refined(4)
    console.print(str(plan))

    console.rule("Solution")
    queries = [test_set[int(i)] for i in misread]
    solution = whence.Lissa(plan).solve(
        whence.Damped(gnh, damping), gnh.gradients(queries), generator=generator
    )
    for k, (residual, error) in enumerate(zip(solution.residual, solution.residual_stderr, strict=True)):
        verdict = "converged" if solution.converged[k] else "not converged"
        console.print(f"query {k}: residual {float(residual):.2f} ± {float(error):.2f} of ‖g‖, {verdict}")

    console.rule("What made the model misread these?")
    scores, stderr = solution.project(gnh.gradients(train_set))
    for k, image in enumerate(misread.tolist()):
        show(k, image, int(y[image]), int(guesses[image]), scores[k], stderr[k], train_set, flipped)


def show(
    k: int,
    image: int,
    label: int,
    guess: int,
    scores: Tensor,
    stderr: Tensor,
    data: TensorDataset,
    flipped: Tensor,
) -> None:
    """The most harmful training images for one query: those whose removal would lower its loss most."""
    table = Table(title=f"test image {image}: a {label}, read as {guess}. Most harmful training images:")
    for column in ("image", "label", "score", "stderr", "effect of removal", ""):
        table.add_column(column, justify="right")
    for index in scores.argsort()[:5].tolist():
        table.add_row(
            str(index),
            str(int(data.tensors[1][index])),
            f"{float(scores[index]):.1f}",
            f"± {float(stderr[index]):.1f}",
            f"{float(scores[index]) / len(data):+.3f} nats",
            "flipped label" if flipped[index] else "",
        )
    console.print(table)


if __name__ == "__main__":
    main()
