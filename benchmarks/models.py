"""Models, data and losses that products are timed on: one batch each, random weights, evaluation mode.

Time does not depend on what the weights were trained to, so nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whence import Classification, LanguageModeling
from whence.tasks import Task
from whence.tasks.categorical import IGNORED

VOCABULARY = 8000
WIDTH = 384
LAYERS = 6
HEADS = 6
SEQUENCES, TOKENS = 4, 128
IMAGES, CLASSES = 64, 10


@dataclass(frozen=True)
class Workload:
    """A model and one batch, as whence reads them and as plain tensors for everybody else.

    Attributes:
        name: what to call it in tables.
        model: the model, in evaluation mode.
        task: what its outputs mean to whence.
        data: the examples of the batch.
        logits: a module around the model that maps ``inputs`` to logits ``[N, K]``.
        inputs: the same examples, stacked.
        targets: a class per row of the logits, `IGNORED` where there is none.
    """

    name: str
    model: nn.Module
    task: Task
    data: Sequence[Any]
    logits: nn.Module
    inputs: Tensor
    targets: Tensor

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name; tied ones once, as in ``model.parameters()``."""
        return dict(self.model.named_parameters())

    def gradient(self) -> tuple[Tensor, ...]:
        """The gradient of the mean training loss on the batch: one forward and one backward."""
        loss = F.cross_entropy(self.logits(self.inputs), self.targets, ignore_index=IGNORED)
        return torch.autograd.grad(loss, list(self.model.parameters()))


class TokenLogits(nn.Module):
    """A Hugging Face causal language model as a map from token ids to logits ``[tokens, vocabulary]``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits.flatten(0, 1)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which subsamples and pads channels where shapes change."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.stride = 1 if channels_in == channels_out else 2
        self.padding = channels_out - channels_in
        self.first = nn.Conv2d(channels_in, channels_out, 3, stride=self.stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels_out)
        self.second = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return F.relu(y + F.pad(shortcut, (0, 0, 0, 0, 0, self.padding)))


class ResNet20(nn.Module):
    """The 20-layer residual network for 32×32 images: three stages of 16, 32 and 64 channels."""

    def __init__(self, classes: int = CLASSES, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(16)
        widths = [16] * (blocks + 1) + [32] * blocks + [64] * blocks
        self.blocks = nn.Sequential(*(ResidualBlock(before, after) for before, after in pairwise(widths)))
        self.head = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.stem_norm(self.stem(images)))
        return self.head(self.blocks(x).mean((-2, -1)))


def gpt2() -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=TOKENS,
        bos_token_id=0, eos_token_id=1, attn_implementation="eager",
    )  # fmt: skip
    return _language_model("GPT-2", GPT2LMHeadModel(config))


def llama() -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=1024, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, max_position_embeddings=TOKENS, bos_token_id=0, eos_token_id=1,
        attn_implementation="eager",
    )  # fmt: skip
    return _language_model("Llama", LlamaForCausalLM(config))


def resnet() -> Workload:
    torch.manual_seed(0)
    model = ResNet20().eval()
    images = torch.randn(IMAGES, 3, 32, 32)
    labels = torch.randint(CLASSES, (IMAGES,))
    data = list(zip(images, labels, strict=True))
    return Workload("ResNet-20", model, Classification(), data, model, images, labels)


def _language_model(name: str, model: nn.Module) -> Workload:
    tokens = torch.randint(VOCABULARY, (SEQUENCES, TOKENS))
    targets = torch.full_like(tokens, IGNORED)
    targets[:, :-1] = tokens[:, 1:]
    data = [{"input_ids": row} for row in tokens]
    model.eval()
    return Workload(name, model, LanguageModeling(), data, TokenLogits(model), tokens, targets.flatten())


#: Name on the command line -> how to build it.
WORKLOADS: dict[str, Callable[[], Workload]] = {"gpt2": gpt2, "llama": llama, "resnet": resnet}
