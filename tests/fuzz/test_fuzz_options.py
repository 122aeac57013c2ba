"""Options of any kind: a typed error when they are made, or an attribution that ends."""

from __future__ import annotations

import re
import warnings
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import whence
from fuzz.fuzzing import JUNK, fuzzed, refused_or_fine
from whence.errors import OptionError
from whence.options import CleanOptions, Options


def junk_for(cls: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from([each.name for each in fields(cls)]), JUNK, max_size=4)


def check_options(given: dict[str, Any]) -> None:
    with refused_or_fine():
        options = Options(**given)
        options.generator(3)
        assert 0.5 <= options.correlation < 1


def check_clean_options(given: dict[str, Any]) -> None:
    with refused_or_fine():
        CleanOptions(**given)


test_options, test_options_long = fuzzed(check_options, quick=300, long=20_000, given=junk_for(Options))
test_clean_options, test_clean_options_long = fuzzed(
    check_clean_options, quick=200, long=20_000, given=junk_for(CleanOptions)
)


@st.composite
def settings_of_a_run(draw: st.DrawFn) -> dict[str, Any]:
    """Options that can be made, extreme ones among them; LiSSA's λ not so small that it would go on for hours."""
    solver = draw(st.sampled_from(["auto", "cg", "lissa"]))
    extreme = st.sampled_from([1e-300, 1e-30, 1e-12, 1e12, 1e30, 1e300])
    usual = st.sampled_from(["auto", "auto/4", "lambda_max/3", "lambda_max/50", 0.01])
    optional = {
        "damping": st.one_of(usual, extreme) if solver != "lissa" else st.one_of(usual, st.just(1e300)),
        "seed": st.integers(0, 2**40 - 1),
        "chains": st.integers(2, 3),
        "micro_batch": st.sampled_from([None, 1, 3, 2**39]),
        "part_size": st.sampled_from([None, 1, 2, 2**39]),
        "spectrum_terms": st.sampled_from([1, 2, 4096]),
        "product": st.sampled_from(["auto", "exact", "finite-difference"]),
        "method": st.sampled_from(["auto", "directional", "layers", "gradients"]),
        "sampling": st.sampled_from(["auto", "uniform", "curvature"]),
        "accuracy": st.sampled_from(
            ["auto", 0.9, "10%"] + (["quick", "certified"] if solver != "lissa" else [])
        ),
        "until": st.sampled_from([None, "top-1 stable", "top-99999999999999999999 stable"]),
        "shown": st.sampled_from([1, 2**39]),
        "stability": st.booleans(),
        "baseline": st.booleans(),
    }
    return {"solver": solver, **draw(st.fixed_dictionaries({}, optional=optional))}


def check_a_run(given: dict[str, Any], examples: int, scale: float, wide: bool) -> None:
    dtype = torch.float64 if wide else torch.float32
    random = torch.Generator().manual_seed(examples)
    data = [(torch.randn(3, generator=random, dtype=dtype), i % 2) for i in range(examples)]
    model = nn.Linear(3, 2).to(dtype).eval()
    with torch.no_grad():
        model.weight.copy_(scale * torch.randn(2, 3, generator=random, dtype=dtype))
        model.bias.zero_()
    with refused_or_fine(), warnings.catch_warnings():
        warnings.simplefilter("ignore", whence.errors.WhenceWarning)
        result = whence.attribute(model, data, data[:1], task=whence.Classification(), **given)
        low, high = result.interval(0.95)
        assert bool((low <= high).all())
        assert result.scores.shape == (1, examples)
        result.top(3)


test_runs, test_runs_long = fuzzed(
    check_a_run,
    quick=15,
    long=600,
    given=settings_of_a_run(),
    examples=st.integers(1, 12),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e4, 1e20]),
    wide=st.booleans(),
)


@pytest.mark.parametrize(
    ("name", "value"), [("chains", "4"), ("budget", None), ("damping", []), ("title", 5), ("baseline", "no")]
)
def test_an_option_of_another_kind_is_told_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=re.escape(f"{name} is {value!r}; it must be ")):
        Options(**{name: value})
