"""The quick answer: which factor EK-FAC wants, and whether what is said of the answer is true where nobody has looked.

    python -m benchmarks.quick [NAME …]      measures what is missing, then shows the tables

*Scales.* EK-FAC stands in for H + λ with its factors times s (`whence.attribution.planning.SCALE`). For every work with
a ground truth, the LDS over s, at the λ of `damping="auto"`.
*Statements.* On models that no constant of the quick answer was chosen on: the correlation with the exact damped scores
beside what is said of it, and how many of these lie within the 90% intervals.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.damping import SEED, score
from benchmarks.stages import exact_scores, judge
from benchmarks.timing import RESULTS, environment, report
from benchmarks.truth import truth
from benchmarks.works import (
    WORKS,
    Data,
    Work,
    cnn,
    digits_data,
    manual_data,
    mlp,
    mnist_data,
    speeches_data,
    table_data,
)
from whence import Classification, Damped, GaussNewton, LanguageModeling, Options, Regression, attribute
from whence.attribution.damping import metric_of
from whence.preconditioners.ekfac import ekfac
from whence.scoring import Scorer
from whence.solvers.factored import Factored

PATH = RESULTS / "quick.json"
SCALES = (1.0, 3.0, 6.0, 10.0, 18.0, 30.0)


# --- models that no constant was chosen on -----------------------------------------------------------------------


class Recurrent(nn.Module):
    """An LSTM that reads a picture line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 24, batch_first=True), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.unflatten(1, (8, 8)))[0][:, -1])


def _pictures(data: Callable[[], Data]) -> Data:
    """Digits as pictures of one channel."""
    known = data()
    return Data(*((x.unflatten(1, (1, 8, 8)), y) for x, y in (known.train, known.test)))


def _some(data: Callable[[], Data], train: int) -> Data:
    known = data()
    return Data(tuple(tensor[:train] for tensor in known.train), known.test)


def _normed() -> nn.Module:
    """A convolutional network with batch norms and pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def _language(kind: str, vocabulary: int, tokens: int) -> nn.Module:
    from transformers import AutoModelForCausalLM, GPTNeoXConfig, Qwen2Config

    sizes: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": tokens, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    config = {
        "qwen2": lambda: Qwen2Config(num_key_value_heads=1, tie_word_embeddings=True, **sizes),
        "neox": lambda: GPTNeoXConfig(**sizes),
    }[kind]()
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


_adam, _adamw, _sgd = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
_asked: dict[str, Any] = {"queries": 20}

UNSEEN = [
    Work(
        "iris", "iris, SiLU MLP, Adam", Classification(), partial(table_data, "iris", 120),
        partial(mlp, 4, 16, 3, activation=nn.SiLU), partial(_adam, lr=3e-3), epochs=60, **_asked,
    ),
    Work(
        "digits-softmax", "digits, one linear layer, SGD", Classification(), digits_data,
        partial(mlp, 64, 10, activation=nn.ReLU), partial(_sgd, lr=0.05), epochs=10, **_asked,
    ),
    Work(
        "digits-cnn", "digits, CNN, AdamW", Classification(), partial(_pictures, digits_data),
        partial(cnn, 1, 8, (8, 16)), partial(_adamw, lr=2e-3), epochs=20, **_asked,
    ),
    Work(
        "digits-lstm", "digits line by line, LSTM, Adam", Classification(), digits_data, Recurrent,
        partial(_adam, lr=3e-3), epochs=20, **_asked,
    ),
    Work(
        "digits-norms", "digits, CNN with batch norms, SGD momentum", Classification(), partial(_pictures, digits_data),
        _normed, partial(_sgd, lr=0.05, momentum=0.9), epochs=10, **_asked,
    ),
    Work(
        "wine-deep", "wine, deep GELU MLP, AdamW 0.1", Classification(), partial(table_data, "wine", 128),
        partial(mlp, 13, 24, 24, 24, 3, activation=nn.GELU), partial(_adamw, lr=2e-3, weight_decay=0.1), epochs=40,
        **_asked,
    ),
    Work(
        "cancer-early", "breast cancer, wide tanh MLP stopped early, SGD", Classification(),
        partial(table_data, "breast_cancer", 420), partial(mlp, 30, 96, 2, activation=nn.Tanh),
        partial(_sgd, lr=0.02), epochs=4, **_asked,
    ),
    Work(
        "diabetes-wide", "diabetes, wide ReLU MLP, AdamW, cosine", Regression(), partial(table_data, "diabetes", 342),
        partial(mlp, 10, 128, 1, activation=nn.ReLU), partial(_adamw, lr=1e-3), epochs=40, cosine=True, **_asked,
    ),
    Work(
        "mnist-tanh", "MNIST, 1,500, deep tanh MLP, Adam", Classification(), partial(mnist_data, 1500, flat=True),
        partial(mlp, 784, 48, 48, 48, 10, activation=nn.Tanh), partial(_adam, lr=1e-3), epochs=10, **_asked,
    ),
    Work(
        "mnist-gelu", "MNIST, 1,000, CNN, AdamW 0.1", Classification(), partial(mnist_data, 1000, flat=False),
        partial(cnn, 1, 28, (6, 12, 12)), partial(_adamw, lr=3e-3, weight_decay=0.1), epochs=12, **_asked,
    ),
    Work(
        "qwen2", "Qwen2 from scratch, 300 passages of the manual", LanguageModeling(), partial(_some, manual_data, 300),
        partial(_language, "qwen2", 1500, 64), partial(_adamw, lr=3e-3), epochs=6, batch=16, clip=1.0, **_asked,
    ),
    Work(
        "neox", "GPT-NeoX from scratch, 300 windows of speeches", LanguageModeling(),
        partial(_some, speeches_data, 300),
        partial(_language, "neox", 1000, 48), partial(_adam, lr=3e-3), epochs=6, batch=16, clip=1.0, **_asked,
    ),
]  # fmt: skip


# --- measuring ---------------------------------------------------------------------------------------------------


def statement(of: Work) -> dict[str, Any]:
    """What the quick answer says of itself, beside the truth."""
    train, asked = of.train_set(), of.asked()
    model = of.fit(range(len(train)), SEED).model
    result = attribute(model, train, asked, task=of.task, baseline=False, accuracy="quick")
    exact = exact_scores(model, of, train, asked, result.solve.plan.damping)
    return {"about": of.about, "queries": len(asked), **judge(result, exact)}


def scales(of: Work) -> dict[str, Any]:
    """LDS by EK-FAC with its factors times s, for all s."""
    train, asked = of.train_set(), of.asked()
    model = of.fit(range(len(train)), SEED).model
    gnh = GaussNewton(model, of.task, train)
    gnh = gnh.in_metric(metric_of(gnh, None, Options()))
    damping = attribute(
        model, train, asked, task=of.task, baseline=False, accuracy="quick"
    ).solve.plan.damping
    factors = ekfac(gnh, damping, generator=torch.Generator().manual_seed(0))
    gradients, outcomes = gnh.gradients(asked), truth(of)
    found = {}
    for s in SCALES:
        solver = Factored(preconditioner=factors.with_scale(s))
        solution = solver.solve(
            Damped(gnh, damping), gradients, generator=torch.Generator().manual_seed(0)
        ).value
        found[str(s)] = score(Scorer(gnh, solution).score(torch.arange(len(train))), outcomes)
    return {"about": of.about, "damping": damping, "lds": found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quick", description=__doc__.split("\n")[0])
    unseen = {of.name: of for of in UNSEEN}
    names = [*unseen, *WORKS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--show", action="store_true", help="what is there, measuring nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"environment": environment(), "statements": {}, "scales": {}}
    if PATH.exists():
        found = json.loads(PATH.read_text())
    for name in [] if options.show else options.names or names:
        kind, measured = ("statements", statement) if name in unseen else ("scales", scales)
        if name in found[kind]:
            continue
        found[kind][name] = measured(unseen[name] if name in unseen else WORKS[name])
        print(name, found[kind][name], flush=True)
        PATH.write_text(json.dumps(found, indent=1) + "\n")
    show(found)


def show(found: dict[str, Any]) -> None:
    """The two tables."""
    report(
        "LDS of EK-FAC with its factors times s",
        ("", *(f"s = {s:g}" for s in SCALES)),
        [
            (name, *(f"{row['lds'][str(s)]['lds']:.3f}" for s in SCALES))
            for name, row in found["scales"].items()
        ],
    )
    rows = found["statements"]
    report(
        "models that no constant was chosen on: what the quick answer says, and what is so",
        ("", "correlation", "said (90%)", "within 90%", "of the 20 largest", "size"),
        [
            (
                row["about"],
                f"{row['correlation']:.3f}",
                "{:.3f} ({:.3f} to {:.3f})".format(*row["stated"]),
                f"{row['covered']:.3f}",
                f"{row['covered_largest']:.3f}",
                f"{row['size']:.2f}",
            )
            for row in rows.values()
        ],
    )
    true = sum(row["stated"][1] <= row["correlation"] <= row["stated"][2] for row in rows.values())
    print(f"the interval of the correlation holds on {true} of {len(rows)}")


if __name__ == "__main__":
    main()
