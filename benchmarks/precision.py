"""Do bfloat16 and float16 models have the scores of float32? A small Llama, trained on chains of random words.

Scores of the rounded model are compared with those of the model before it was rounded, and with those of the rounded
parameters in float32: what is left then is whence's own error. A second model is trained until it knows its data by
heart; where its scores lose more than 1%, the result must doubt them (`whence.attribution.rounding`).
"""

from __future__ import annotations

import argparse
import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import report, save
from whence import Attribution, LanguageModeling, attribute, keep_freed_memory

WORDS, LENGTH, TRAIN, QUERIES, STEPS = 64, 16, 48, 4, (30, 150)
SETTINGS = {
    "λmax/200": {"damping": "lambda_max/200"},
    "auto": {"damping": "auto"},
    "λmax/200, finite differences": {"damping": "lambda_max/200", "product": "finite-difference"},
}


def chains(count: int, generator: torch.Generator) -> list[dict[str, Tensor]]:
    """Sequences of a Markov chain, the same for any count."""
    steps = torch.softmax(2 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(0)), -1)
    words = torch.randint(WORDS, (count, 1), generator=generator)
    for _ in range(LENGTH - 1):
        following = torch.multinomial(steps[words[:, -1]], 1, generator=generator)
        words = torch.cat([words, following], 1)
    return [{"input_ids": row} for row in words]


def trained(data: list[dict[str, Tensor]], steps: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    tokens = torch.stack([row["input_ids"] for row in data])
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model.eval()


def lowest_correlation(found: Tensor, expected: Tensor) -> float:
    """Of the queries."""
    rows = zip(found.double(), expected.double(), strict=True)
    return min(float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in rows)


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.precision", description=__doc__.split("\n")[0]
    ).parse_args()
    keep_freed_memory()
    generator = torch.Generator().manual_seed(1)
    train, queries = chains(TRAIN, generator), chains(QUERIES, generator)
    rows: list[dict[str, Any]] = []

    def asked(of: nn.Module, setting: str) -> Attribution:
        return attribute(of, train, queries, task=LanguageModeling(), solver="cg", **SETTINGS[setting])

    for steps, setting in itertools.product(STEPS, SETTINGS):
        model = trained(train, steps)
        expected = asked(model, setting).scores
        for dtype in (torch.bfloat16, torch.float16):
            rounded = copy.deepcopy(model).to(dtype)
            result = asked(rounded, setting)
            found, told = result.scores, result.rounding
            assert told is not None
            rows.append(
                {
                    "steps": steps,
                    "setting": setting,
                    "dtype": str(dtype).removeprefix("torch."),
                    "with_the_model_in_float32": lowest_correlation(found, expected),
                    "with_rounded_parameters_in_float32": lowest_correlation(
                        found, asked(copy.deepcopy(rounded).float(), setting).scores
                    ),
                    "foretold": float(told.min()),
                    "doubted": any("16 bits" in doubt for doubt in result.doubts),
                }
            )
            save("precision", {"words": WORDS, "train": TRAIN, "queries": QUERIES, "rows": rows})  # so far
    report(
        "Lowest correlation of a query's scores",
        [
            "steps",
            "setting",
            "dtype",
            "with float32",
            "with float32 of the rounded parameters",
            "foretold",
            "doubted",
        ],
        [[f"{value:.5f}" if isinstance(value, float) else value for value in row.values()] for row in rows],
    )


if __name__ == "__main__":
    main()
