"""A two-layer Llama that reads characters of Python's language reference, small enough for dense truth."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from dense import gram
from whence import GaussNewton, LanguageModeling

CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,()`'"
LENGTH = 24
PASSAGES = 120


@dataclass
class Text:
    model: nn.Module
    train: list[dict[str, Tensor]]
    queries: list[dict[str, Tensor]]
    hessian: Tensor  # float64
    query_gradients: Tensor  # [queries, N] float64
    train_gradients: Tensor  # [passages, N] float64

    def exact_scores(self, damping: float) -> Tensor:
        system = self.hessian + damping * torch.eye(len(self.hessian), dtype=torch.float64)
        solved = torch.cholesky_solve(self.query_gradients.T, torch.linalg.cholesky(system))
        return solved.T @ self.train_gradients.T


def encode(text: str) -> Tensor:
    return torch.tensor([CHARACTERS.index(c) for c in text.lower() if c in CHARACTERS])


def passages() -> list[dict[str, Tensor]]:
    """Passages of 14 to 24 characters from the start of many topics."""
    found = []
    for number, name in enumerate(sorted(topics)):
        ids = encode(topics[name])[60:]
        for k in range(2):
            length = LENGTH - (number + k) % 11
            found.append({"input_ids": ids[k * LENGTH : k * LENGTH + length]})
    return found[:PASSAGES]


def train_llama(train: list[dict[str, Tensor]], steps: int = 150) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS), hidden_size=12, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True,
        initializer_range=0.2, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    task = LanguageModeling()
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        picks = torch.randint(len(train), (24,), generator=generator).tolist()
        batch = task.collate([train[i] for i in picks])
        optimizer.zero_grad()
        losses = task.losses(task.outputs(model, batch), batch)
        (losses.sum() / task.num_terms(batch).sum()).backward()
        optimizer.step()
    return model.eval()


@functools.cache
def problem() -> Text:
    train = passages()
    model = train_llama(train)
    task = LanguageModeling()
    queries = [
        task.query(encode(p), encode(c)) for p, c in [("the with ", "statement"), ("a list of ", "names")]
    ]
    wide = copy.deepcopy(model).double()
    gnh = GaussNewton(wide, task, train)

    def roots(example: dict[str, Tensor]) -> Tensor:
        batch = task.collate([example])
        leaves = gnh.network.leaves()
        outputs = gnh.network.outputs(batch, leaves)[0, :-1]  # [L, K]
        rows = torch.autograd.grad(
            outputs.flatten(), list(leaves.values()), torch.eye(outputs.numel(), dtype=torch.float64),
            is_grads_batched=True,
        )  # fmt: skip
        jacobian = torch.cat([row.flatten(1) for row in rows], dim=1).reshape(*outputs.shape, -1)
        p = outputs.detach().softmax(-1).unsqueeze(2)
        return (p.sqrt() * (jacobian - (p * jacobian).sum(1, keepdim=True))).flatten(0, 1)  # S = RᵀR

    hessian = gram(map(roots, train)) / gnh.num_terms
    gradients = [
        torch.cat([t.flatten(1) for t in gnh.gradients(part).values()], 1) for part in (queries, train)
    ]
    return Text(model, train, queries, hessian, *gradients)
