"""Models, tasks and data that products are tested on, small enough for a dense float64 Hessian."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whence import Classification, LanguageModeling
from whence.tasks import Task

VOCABULARY = 17


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    task: Task
    data: Callable[[torch.dtype], list[Any]]

    def model(self, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        model = self.build().to(torch.float32)
        with torch.no_grad():  # untrained logits are near zero and hide errors; sharpen the last layers
            for parameter in model.parameters():
                parameter.mul_(1.5)
        return model.to(dtype).eval()


def sequences(dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Ragged token sequences, one with ignored labels."""
    generator = torch.Generator().manual_seed(1)
    lengths = [6, 3, 7, 5]
    rows = [{"input_ids": torch.randint(VOCABULARY, (n,), generator=generator)} for n in lengths]
    for row in rows:
        row["labels"] = row["input_ids"].clone()
    rows[2]["labels"][:3] = -100
    return rows


def labelled_sequences(dtype: torch.dtype) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "labels": i % 3} for i, row in enumerate(sequences(dtype))]


def images(dtype: torch.dtype) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(3, 12, 12, generator=generator).to(dtype), i % 4) for i in range(6)]


def pixel_values(dtype: torch.dtype) -> list[dict[str, Any]]:
    return [{"pixel_values": x, "labels": y} for x, y in images(dtype)]


def vectors(dtype: torch.dtype) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(6, generator=generator).to(dtype), i % 4) for i in range(20)]


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)
    )


class ConvNet(nn.Module):
    """Convolutions, BatchNorm with non-trivial statistics, max pooling, LeakyReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.LeakyReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(6, 4)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class AttentionNet(nn.Module):
    """`nn.MultiheadAttention` uses its output projection's weight without calling it; weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = x + self.attention(x, x, x, attn_mask=causal, need_weights=False)[0]
        return self.head(self.norm(x))


def _lm(name: str, **overrides: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        config_class = getattr(transformers, f"{name}Config")
        sizes = {
            "GPT2": {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16},
            "OPT": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 16,
                    "max_position_embeddings": 16, "word_embed_proj_dim": 8},
        }.get(name, {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
                     "intermediate_size": 16, "max_position_embeddings": 16})  # fmt: skip
        if name in ("Llama", "Mistral", "Qwen2"):
            sizes["num_key_value_heads"] = 1
        config = config_class(vocab_size=VOCABULARY, initializer_range=0.3, **special, **sizes, **overrides)
        suffix = {"GPT2": "LMHeadModel"}.get(name, "ForCausalLM")
        return getattr(transformers, f"{name}{suffix}")(config)

    return build


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=16, num_labels=3, initializer_range=0.3,
        )
    )  # fmt: skip


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=4
    )
    return ResNetForImageClassification(config)


PLAIN = [
    Case("mlp", mlp, Classification(), vectors),
    Case("convnet", ConvNet, Classification(), images),
    Case("attention", AttentionNet, LanguageModeling(), sequences),
]
HUGGING_FACE = [
    *[
        Case(name.lower(), _lm(name), LanguageModeling(), sequences)
        for name in ("GPT2", "OPT", "Llama", "Mistral", "Qwen2", "GPTNeoX")
    ],
    Case("bert", _bert, Classification(), labelled_sequences),
    Case("resnet", _resnet, Classification(), pixel_values),
]
CASES = PLAIN + HUGGING_FACE
