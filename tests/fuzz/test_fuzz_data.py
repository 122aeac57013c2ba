"""Data of any kind: a typed error before the first product, or a product that is finite."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from fuzz.fuzzing import JUNK, fuzzed, refused_or_fine
from whence import Classification, GaussNewton, LanguageModeling, Regression
from whence.errors import WhenceError

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    value = draw(st.sampled_from([0.0, 1.0, 3.0, -1.0, 1e38, float("nan"), float("inf")]))
    return torch.full(shape, value).nan_to_num(1.0, 1.0).to(draw(st.sampled_from(DTYPES))) * (
        1 if value == value and abs(value) != float("inf") else value
    )


GOOD = [(torch.tensor([1.0, 0.5, -1.0]), 1), {"input_ids": [1, 2, 3]}, torch.tensor([1, 2, 0])]
PARTS = st.one_of(tensors(), JUNK, st.just(torch.ones(3)), st.integers(0, 2))
EXAMPLES = st.one_of(
    st.sampled_from(GOOD),
    st.tuples(PARTS, PARTS),
    st.tuples(st.just(torch.ones(3)), PARTS),
    st.dictionaries(
        st.sampled_from(["input_ids", "labels", "attention_mask", "x", "label"]), PARTS, max_size=3
    ),
    PARTS,
)


class Raising:
    """Fails at one index, as a file that is lost would."""

    def __init__(self, examples: list[Any], at: int) -> None:
        self.examples, self.at = examples, at

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            raise OSError("lost")
        return self.examples[index]


def classifier() -> nn.Module:
    return nn.Linear(3, 3).eval()


def reader() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)).eval()


def check_data(examples: Any, kind: int, at: int | None) -> None:
    model, task = [
        (classifier(), Classification()),
        (classifier(), Regression()),
        (reader(), LanguageModeling()),
    ][kind]
    data = examples if at is None or not isinstance(examples, list) else Raising(examples, at)
    with refused_or_fine():
        gnh = GaussNewton(model, task, data)
        assert gnh.matvec(gnh.zeros().randn_like(torch.Generator().manual_seed(0))).is_finite()


test_data, test_data_long = fuzzed(
    check_data,
    quick=150,
    long=20_000,
    examples=st.one_of(
        st.lists(EXAMPLES, max_size=4),
        st.integers(1, 3).flatmap(lambda k: st.lists(EXAMPLES, max_size=1).map(lambda e: e * k)),
        JUNK,
    ),
    kind=st.integers(0, 2),
    at=st.one_of(st.none(), st.integers(0, 3)),
)


class Model(nn.Module):
    """Does one of many things to its outputs."""

    def __init__(self, twist: str) -> None:
        super().__init__()
        self.linear, self.twist, self.calls = nn.Linear(3, 3), twist, 0

    def forward(self, x: Tensor) -> Any:
        h, self.calls = self.linear(x), self.calls + 1
        return {
            "fine": lambda: h,
            "probabilities": lambda: h.softmax(-1),
            "counts": lambda: h + self.calls,
            "batch": lambda: h - h.mean(0),
            "random": lambda: h + torch.randn(3),
            "short": lambda: h[:1],
            "none": lambda: None,
            "detached": lambda: h.detach(),
            "integers": lambda: h.long(),
            "nan": lambda: h / 0,
            "key": lambda: {}["x"],  # type: ignore[index]
            "stop": lambda: next(iter(())),
            "assert": lambda: (_ for _ in ()).throw(AssertionError("inside")),
        }[self.twist]()


TWISTS = ["fine", "probabilities", "counts", "batch", "random", "short", "none", "detached", "integers", "nan", "key",
          "stop", "assert"]  # fmt: skip


def check_model(twist: str, count: int) -> None:
    random = torch.Generator().manual_seed(count)
    data = [(torch.randn(3, generator=random), i % 3) for i in range(count)]
    try:
        GaussNewton(Model(twist).eval(), Classification(), data)
    except WhenceError:
        assert twist != "fine"
    else:
        # two examples are needed to see that one depends on the other
        assert twist == "fine" or (twist in ("batch", "short") and count == 1)


test_models, test_models_long = fuzzed(
    check_model, quick=60, long=300, twist=st.sampled_from(TWISTS), count=st.integers(1, 5)
)
