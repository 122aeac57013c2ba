"""Models, tasks and data that products are tested on, small enough for a dense float64 Hessian.

`CASES` go through every test of products; `ARCHITECTURES` are compared with their dense matrices once
(test_architectures.py). docs/data.md names them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whence import (
    Classification,
    LanguageModeling,
    MaskedLanguageModeling,
    SequenceToSequence,
    TokenClassification,
)
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
        if dtype == torch.float64 and getattr(model, "_can_set_experts_implementation", bool)():
            model.set_experts_implementation("eager")  # the fused kernel has no float64
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


def masked_sequences(dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Every third token is masked by the last of the vocabulary, and asked for."""
    rows = []
    for shift, row in enumerate(sequences(dtype)):
        tokens = row["input_ids"]
        masked = (torch.arange(len(tokens)) + shift) % 3 == 0
        rows.append(
            {
                "input_ids": tokens.masked_fill(masked, VOCABULARY - 1),
                "labels": tokens.masked_fill(~masked, -100),
            }
        )
    return rows


def tagged_sequences(dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"] % 3} for row in sequences(dtype)]
    rows[1]["labels"][0] = -100
    return rows


def answered_sequences(dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Answers of two lengths: the first tokens backwards."""
    found = enumerate(row["input_ids"] for row in sequences(dtype))
    return [{"input_ids": tokens, "labels": tokens[: 2 + i % 2].flip(0)} for i, tokens in found]


def ended_sequences(dtype: torch.dtype) -> list[dict[str, Any]]:
    """One end of sequence in each, which T5's classifier looks at."""
    rows = labelled_sequences(dtype)
    end = torch.ones(1, dtype=torch.long)
    return [row | {"input_ids": torch.cat([row["input_ids"].clamp_min(3), end])} for row in rows]


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


# --- more architectures ----------------------------------------------------------------------------------

_SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_TINY = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": 16, "initializer_range": 0.3,
}  # fmt: skip
_GROUPED = {**_TINY, **_SPECIAL, "num_key_value_heads": 1, "head_dim": 4}
_EXPERTS = {**_GROUPED, "intermediate_size": 4, "num_experts_per_tok": 2}
_SHARED = {"moe_intermediate_size": 4, "shared_expert_intermediate_size": 4}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_GEMMA = {**_GROUPED, "query_pre_attn_scalar": 4, "sliding_window": 16}
_STATES = {"vocab_size": VOCABULARY, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 2, **_SPECIAL}
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2,
    "relative_attention_num_buckets": 4, "decoder_start_token_id": 2, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_CLASSES = {"num_labels": 4, "initializer_range": 0.3}


def _hugging_face(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, f"{config}Config")(**settings))

    return build


def _causal(name: str, model: str, settings: dict[str, Any], config: str = "", **more: Any) -> Case:
    build = _hugging_face(f"{model}ForCausalLM", config or model, **{**settings, **more})
    return Case(name, build, LanguageModeling(), sequences)


class Recurrent(nn.Module):
    """An LSTM, which keeps its weights in a list of its own as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


def parametrized() -> nn.Module:
    parametrizations = nn.utils.parametrizations
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 9)), nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(9, 9)), nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(9, 4)),
    )  # fmt: skip


class LowRank(nn.Module):
    """Low-rank adapters as LoRA adds them to frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        self.base = mlp().requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base[1:](self.base[0](x) + 0.5 * self.up(self.down(x)))


ARCHITECTURES = [
    _causal("gemma2", "Gemma2", _GEMMA),
    _causal("gemma3", "Gemma3", _GEMMA, "Gemma3Text"),
    _causal("phi3", "Phi3", {k: v for k, v in _GROUPED.items() if k != "head_dim"}),
    _causal("falcon", "Falcon", {k: _TINY[k] for k in list(_TINY)[:4]}, **_SPECIAL, initializer_range=0.3),
    _causal("qwen3", "Qwen3", _GROUPED),
    _causal("mamba", "Mamba", _STATES, initializer_range=0.3),
    _causal("mamba2", "Mamba2", _STATES, num_heads=2, head_dim=8, n_groups=1, chunk_size=4),
    _causal("rwkv", "Rwkv", {k: v for k, v in _STATES.items() if k != "state_size"}, context_length=16),
    _causal("mixtral", "Mixtral", _EXPERTS, num_local_experts=3),
    # a padding token's embedding is zero, where a first layer that normalises it has derivatives of a million
    _causal("gpt-oss", "GptOss", _EXPERTS, num_local_experts=3, pad_token_id=None, rope_parameters=_ROPE),
    _causal("qwen2-moe", "Qwen2Moe", _EXPERTS, num_experts=3, **_SHARED),
    Case("lstm", Recurrent, LanguageModeling(), sequences),
    Case("parametrized", parametrized, Classification(), vectors),
    Case("low-rank adapters", LowRank, Classification(), vectors),
    Case(
        "vit",
        _hugging_face(
            "ViTForImageClassification", "ViT", hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=12, image_size=12, patch_size=4, **_CLASSES,
        ),
        Classification(),
        pixel_values,
    ),
    Case(
        "swin",
        _hugging_face(
            "SwinForImageClassification", "Swin", image_size=12, patch_size=3, embed_dim=4, depths=[1, 1],
            num_heads=[1, 2], window_size=2, **_CLASSES,
        ),
        Classification(),
        pixel_values,
    ),
    Case(
        "convnext",
        _hugging_face(
            "ConvNextForImageClassification", "ConvNext", patch_size=3, num_stages=2, hidden_sizes=[4, 6],
            depths=[1, 1], layer_scale_init_value=0.5, **_CLASSES,
        ),
        Classification(),
        pixel_values,
    ),
    Case(
        "modernbert",
        _hugging_face(
            "ModernBertForSequenceClassification", "ModernBert", num_labels=3, global_attn_every_n_layers=2,
            local_attention=4, cls_token_id=0, sep_token_id=1, **_TINY, **_SPECIAL,
        ),
        Classification(),
        labelled_sequences,
    ),
    Case(
        "deberta-v2",
        _hugging_face(
            "DebertaV2ForSequenceClassification", "DebertaV2", num_labels=3, relative_attention=True,
            pos_att_type=["p2c", "c2p"], position_buckets=4, share_att_key=True, pad_token_id=2, **_TINY,
        ),
        Classification(),
        labelled_sequences,
    ),
    Case(
        "t5 classifier",
        _hugging_face("T5ForSequenceClassification", "T5", num_labels=3, **_T5),
        Classification(),
        ended_sequences,
    ),
    Case(
        "t5", _hugging_face("T5ForConditionalGeneration", "T5", **_T5), SequenceToSequence(), answered_sequences
    ),
    Case(
        "bart",
        _hugging_face(
            "BartForConditionalGeneration", "Bart", vocab_size=VOCABULARY, d_model=8, encoder_layers=1,
            decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=12,
            decoder_ffn_dim=12, max_position_embeddings=16, init_std=0.3, decoder_start_token_id=1, **_SPECIAL,
        ),
        SequenceToSequence(label_smoothing=0.1),
        answered_sequences,
    ),
    Case(
        "bert, masked",
        _hugging_face("BertForMaskedLM", "Bert", **_TINY),
        MaskedLanguageModeling(),
        masked_sequences,
    ),
    Case(
        "bert, tokens",
        _hugging_face("BertForTokenClassification", "Bert", num_labels=3, **_TINY),
        TokenClassification(),
        tagged_sequences,
    ),
]  # fmt: skip
