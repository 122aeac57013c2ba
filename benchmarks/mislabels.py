"""Which labels are wrong? Self-influence beside plain loss and gradient norm, with one label in ten flipped.

`peers` compares `whence.clean` on the digits with the self-influence that peers gave at their defaults
(``--mislabels`` of their scripts).

Two classifiers are trained on data with wrong labels in them: a small network on scikit-learn's digits, a convolutional
one on 5,000 images of CIFAR-10. Counted is the share of the flipped labels among the tenth, and the fifth, of the
training examples that look most suspicious. On digits, exact self-influence of every example, by conjugate gradients,
shows what the approximation costs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.peers.answers import Answers, kept
from benchmarks.peers.asking import MISLABELLED
from benchmarks.peers.roster import ROSTER
from benchmarks.timing import report, save
from benchmarks.works import flip, mislabelled, mislabelled_digits
from reproduction.assets import cifar10
from whence import Classification, Damped, Estimate, GaussNewton, clean, estimate_spectrum, keep_freed_memory
from whence.demo.digits import TRAIN
from whence.preconditioners import nystrom
from whence.progress import track
from whence.scoring.self_influence import self_influence
from whence.solvers import ConjugateGradient
from whence.solvers.plan import auto_damping
from whence.validation import detection_curve

INSPECTED = (0.1, 0.2)
SELF, EXACT, LOSS, NORM = "self-influence, rank {}", "self-influence, exact", "loss", "gradient norm"
OURS, LESS = "whence.clean", "whence less it, 10%"


@dataclass(frozen=True)
class Trained:
    """A model, what it was trained on, which labels are wrong, and how well it reads other data."""

    model: nn.Module
    train: TensorDataset
    wrong: Tensor
    test_accuracy: float

    @property
    def train_accuracy(self) -> float:
        """With the wrong labels counted as right."""
        return accuracy(self.model, *self.train.tensors)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    guesses = torch.cat([model(part).argmax(1) for part in x.split(500)])
    return float((guesses == y).float().mean())


def digits(seed: int) -> Trained:
    data, wrong = mislabelled_digits(seed)
    model = mislabelled(seed).fit(range(len(wrong)), seed).model
    return Trained(model, TensorDataset(*data.train), wrong, accuracy(model, *data.test))


def images(seed: int, count: int = 5000, epochs: int = 12) -> Trained:
    generator = torch.Generator().manual_seed(seed)
    everything, test = cifar10("train"), cifar10("test")
    chosen = torch.randperm(len(everything), generator=generator)[:count]
    x = 2 * everything.inputs(chosen) - 1
    labels, wrong = flip(everything.labels[chosen], 10, generator)
    train = TensorDataset(x, labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = convolutional()
    steps = epochs * -(-count // 100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in track(range(epochs), "training on CIFAR-10"):
        for index in torch.randperm(count, generator=generator).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), labels[index]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    held_out = torch.arange(2000)
    return Trained(model, train, wrong, accuracy(model, 2 * test.inputs(held_out) - 1, test.labels[held_out]))


def convolutional() -> nn.Module:
    """34,058 parameters; group norm, so that examples do not meet in a batch."""

    def block(inside: int, outside: int) -> list[nn.Module]:
        conv = nn.Conv2d(inside, outside, 3, padding=1)
        return [conv, nn.GroupNorm(4, outside), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.Flatten(), nn.Linear(64 * 4 * 4, 10)]
    return nn.Sequential(*block(3, 16), *block(16, 32), *block(32, 64), *head)


def exact_self_influence(gnh: GaussNewton, damping: float, block: int = 100) -> Tensor:
    """By conjugate gradients for every example: ``gᵀx + ‖e‖²_A``, the latter from its proven bounds."""
    P = nystrom(gnh, damping, rank=64, generator=torch.Generator().manual_seed(0))
    solver = ConjugateGradient(tolerance=0.1, preconditioner=P, verify=False)
    found = []
    for positions in track(torch.arange(len(gnh.terms)).split(block), "exact self-influence"):
        rhs = gnh.gradients([gnh.terms.data[i] for i in positions.tolist()])
        solution = solver.solve(Damped(gnh, damping), rhs, generator=torch.Generator().manual_seed(0))
        assert solution.certificate is not None
        left = 0.5 * (solution.certificate.lower.square() + solution.certificate.upper.square())
        found.append(rhs.dot(solution.value) + left)
    return torch.cat(found)


def measure(trained: Trained, *, rank: int, terms: int, exact: bool) -> dict[str, Any]:
    """Shares of the flipped labels found, by every measure."""
    gnh = GaussNewton(trained.model, Classification(), trained.train)
    generator = torch.Generator().manual_seed(0)
    spectrum = estimate_spectrum(gnh, generator=generator, terms=terms, measure_constant=False)
    damping = auto_damping(spectrum)
    begun = time.perf_counter()
    found = self_influence(gnh, damping, rank=rank, terms=terms, generator=generator)
    seconds = time.perf_counter() - begun
    suspicions = {SELF.format(rank): found.values, LOSS: found.losses, NORM: found.norms}
    results: dict[str, Any] = {
        "damping": damping,
        "seconds": seconds,
        "bounds": [found.bounds.smallest, found.bounds.largest],
        "scale": None if found.calibration is None else [found.calibration.value, found.calibration.stderr],
        "train_accuracy": trained.train_accuracy,
        "test_accuracy": trained.test_accuracy,
        "num_parameters": gnh.num_parameters,
        "num_flipped": int(trained.wrong.sum()),
    }
    if exact:
        values = exact_self_influence(gnh, damping)
        suspicions[EXACT] = values
        results["correlation_with_exact"] = float(torch.corrcoef(torch.stack([found.values, values]))[0, 1])
        results["median_ratio_to_exact"] = float((found.values / values).median())
        results["within_bounds"] = float(((found.low <= values) & (values <= found.high)).double().mean())
    curves = {name: detection_curve(suspicion, trained.wrong) for name, suspicion in suspicions.items()}
    results["found"] = {
        name: {f"{share:.0%}": curve.found(share) for share in INSPECTED} | {"area": curve.area}
        for name, curve in curves.items()
    }
    return results


def beside_peers(seeds: Sequence[int]) -> dict[str, Any]:
    """Shares of the flipped labels found by `clean` and by peers: means over the seeds, with their standard errors."""
    shares: dict[str, list[dict[str, float]]] = {}
    for seed in seeds:
        trained = digits(seed)
        begun = time.process_time()
        own = clean(trained.model, trained.train, task=Classification()).found
        spent = {OURS: time.process_time() - begun}
        suspicions = {OURS: own.values, LOSS: own.losses, NORM: own.norms}
        for peer, entry in ROSTER.items():
            if (path := kept(peer, mislabelled(seed).name)).exists():
                answers = Answers.load(path)
                suspicions[entry.words] = answers.answers[0].scores[0]
                spent[entry.words] = answers.seconds + answers.answers[0].seconds
        ours = detection_curve(own.values, trained.wrong).found(INSPECTED[0])
        for name, suspicion in suspicions.items():
            curve = detection_curve(suspicion, trained.wrong)
            found = {f"{share:.0%} inspected": curve.found(share) for share in INSPECTED}
            less = {} if name == OURS else {LESS: ours - curve.found(INSPECTED[0])}
            known = {"CPU s": spent[name]} if name in spent else {}
            shares.setdefault(name, []).append({**found, **less, "area": curve.area, **known})
    return {
        name: {column: asdict(Estimate.from_samples([row[column] for row in rows])) for column in rows[0]}
        for name, rows in shares.items()
    }


def show_beside(found: dict[str, Any]) -> None:
    columns = (*(f"{share:.0%} inspected" for share in INSPECTED), LESS, "area", "CPU s")
    rows = [
        (
            name,
            *(f"{each[c]['value']:.3f} ± {each[c]['stderr']:.3f}" if c in each else "" for c in columns),
        )
        for name, each in found.items()
    ]
    report("digits, one label in ten flipped: shares of them found", ("", *columns), rows)


def show(name: str, runs: list[dict[str, Any]]) -> None:
    rows = []
    for measure_name in runs[0]["found"]:
        shares = [
            Estimate.from_samples([run["found"][measure_name][column] for run in runs])
            for column in (*(f"{share:.0%}" for share in INSPECTED), "area")
        ]
        rows.append(
            (
                measure_name,
                *(f"{s.value:.3f}" + (f" ± {s.stderr:.3f}" if len(runs) > 1 else "") for s in shares),
            )
        )
    first = runs[0]
    report(
        f"{name}: share of {first['num_flipped']:,} flipped labels found; {first['num_parameters']:,} parameters, "
        f"accuracy {first['train_accuracy']:.3f} on the labels given, {first['test_accuracy']:.3f} on test data"
        + ("" if len(runs) == 1 else f" (first of {len(runs)} seeds)"),
        ("", *(f"{share:.0%} inspected" for share in INSPECTED), "area (best 0.95)"),
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mislabels", description=__doc__.split("\n")[0]
    )
    parser.add_argument("part", nargs="?", default="all", choices=["digits", "cifar10", "peers", "all"])
    parser.add_argument("--seeds", type=int, default=3, help="flips and trainings on digits (3)")
    parser.add_argument("--images", type=int, default=5000, help="of CIFAR-10 (5000)")
    parser.add_argument(
        "--terms", type=int, default=1000, help="of these that curvature is measured on (1000)"
    )
    parser.add_argument("--rank", type=int, default=32, help="of the approximation (32)")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, 500 images, nothing exact, nothing saved"
    )
    options = parser.parse_args()
    keep_freed_memory()
    count, terms = (500, 100) if options.quick else (options.images, options.terms)
    seeds = range(1 if options.quick else options.seeds)
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "digits": lambda: [
            measure(digits(seed), rank=options.rank, terms=TRAIN, exact=not options.quick) for seed in seeds
        ],
        "cifar10": lambda: [measure(images(0, count), rank=options.rank, terms=terms, exact=False)],
    }
    if options.part == "peers":
        found = beside_peers(range(MISLABELLED))
        show_beside(found)
        save("mislabels_peers", {"seeds": MISLABELLED, "found": found})
    for name, make in parts.items():
        if options.part not in (name, "all"):
            continue
        runs = make()
        show(name, runs)
        if not options.quick:
            save(f"mislabels_{name}", {"settings": vars(options), "runs": runs})


if __name__ == "__main__":
    main()
