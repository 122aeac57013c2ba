"""Do scores keep their digits where a model is certain? ResNet-56 on its own training images, float32 beside float64.

Scores are derivatives ``∇ℓ(z)ᵀu`` along the gradients u of two test images: by directional derivatives, by one gradient
per example, as a Gauss-Newton product notes them on its way; and by autograd through `cross_entropy`, which subtracts a
probability from 1. All are compared with gradients in float64, relative to each score's own size.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import report, save
from reproduction.assets import cifar10, resnet56
from whence import Classification, GaussNewton, ParamVector, keep_freed_memory
from whence.scoring import Scorer

IMAGES = 400


def by_cross_entropy(gnh: GaussNewton, data: Any, along: ParamVector) -> Tensor:
    """What plain autograd gives."""
    names = list(gnh.network.parameters)
    parameters = [gnh.network.parameters[name] for name in names]
    rows = torch.cat([along[name].flatten(1) for name in names], 1)
    found = []
    for x, y in (data[i] for i in range(len(data))):
        loss = F.cross_entropy(gnh.network.model(x.unsqueeze(0)), torch.as_tensor([int(y)]))
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        found.append((rows @ gradient).double())
    return torch.stack(found, 1)


def wide(data: Any) -> list[Any]:
    return [(x.double(), y) for x, y in (data[i] for i in range(len(data)))]


def errors(found: Tensor, exact: Tensor) -> dict[str, float]:
    """Of the scores, relative to each."""
    relative = ((found - exact).abs() / exact.abs().clamp_min(1e-300)).flatten()
    return {
        "median": float(relative.median()),
        "99%": float(relative.quantile(0.99)),
        "share_above_a_tenth": float((relative > 0.1).double().mean()),
    }


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.certainty", description=__doc__.split("\n")[0]
    ).parse_args()
    keep_freed_memory()
    train, test = cifar10("train").select(torch.arange(IMAGES)), cifar10("test")
    asked = [test[0], test[1]]
    gnh = GaussNewton(resnet56(), Classification(), train)
    reference = GaussNewton(copy.deepcopy(gnh.network.model).double(), Classification(), wide(train))
    along = gnh.gradients(asked)
    exactly = ParamVector({name: tensor.double() for name, tensor in along.items()}, columns=len(asked))
    positions = torch.arange(IMAGES)
    exact, lengths = Scorer(reference, exactly, method="gradients", norms=True).score_with_norms(positions)
    found = {
        "directional derivatives": Scorer(gnh, along, method="directional").score(positions),
        "one gradient per example": Scorer(gnh, along, method="gradients").score(positions),
        "noted by a product": gnh.matvec_with_slopes(along)[1],
        "autograd of cross_entropy": by_cross_entropy(gnh, train, along),
    }
    rows = {name: errors(scores, exact) for name, scores in found.items()}
    report(
        f"relative error of {exact.numel()} scores in float32; a gradient's length is "
        f"{float(lengths.median()):.1e} in the median, {float(lengths.max()):.1f} at most",
        ("", "median", "99%", "more than a tenth off"),
        [
            (name, f"{row['median']:.1e}", f"{row['99%']:.1e}", f"{row['share_above_a_tenth']:.0%}")
            for name, row in rows.items()
        ],
    )
    save("certainty", {"images": IMAGES, "median_length": float(lengths.median()), "rows": rows})


if __name__ == "__main__":
    main()
