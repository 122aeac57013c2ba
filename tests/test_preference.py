"""Direct preference optimisation: the task against autograd in float64, and TRL's trainer against the task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import whence
from tests.dense import relative_error
from whence import Dense, GaussNewton, Preference
from whence.errors import DataError, ModelError, OptionError

TASK = Preference(beta=0.3)


class Tiny(nn.Module):
    """A causal model of one recurrent layer, with an embedding that both completions look up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        seen = x.cumsum(1) / torch.arange(1, x.shape[1] + 1).unsqueeze(1)
        return self.head(torch.tanh(self.mix(seen)) + x)


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny().double().eval()


def pairs(count: int = 6) -> list[dict[str, Tensor]]:
    """Of several lengths, with reference margins of their own."""
    generator = torch.Generator().manual_seed(3)

    def words(length: int) -> list[int]:
        return torch.randint(9, (length,), generator=generator).tolist()

    return [
        TASK.pair(words(2 + k % 2), words(1 + k % 3), words(3 - k % 2), reference=0.2 * k - 0.5)
        for k in range(count)
    ]


def margin(model: nn.Module, leaves: dict[str, Tensor], pair: dict[str, Tensor]) -> Tensor:
    """h, token by token."""
    total = -pair["reference"].double()
    for side, sign in (("chosen", 1), ("rejected", -1)):
        ids, labels = pair[f"{side}_ids"], pair[f"{side}_labels"]
        logits = functional_call(model, leaves, (ids.unsqueeze(0),))[0]
        for place in range(1, len(ids)):
            if labels[place] != -100:
                total = total + sign * F.log_softmax(logits[place - 1], 0)[ids[place]]
    return TASK.beta * total


def by_definition(model: nn.Module, data: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """H, dense, and the gradients of the pairs' losses, ``[pairs, N]``."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    total, gradients = None, []
    for pair in data:
        h = margin(model, leaves, pair)
        parts = torch.autograd.grad(h, list(leaves.values()), allow_unused=True)
        flat = torch.cat(
            [
                torch.zeros_like(p).flatten() if g is None else g.flatten()
                for g, p in zip(parts, leaves.values(), strict=True)
            ]
        )
        chance = torch.sigmoid(h.detach())
        part = chance * (1 - chance) * torch.outer(flat, flat)
        total = part if total is None else total + part
        gradients.append((chance - 1) * flat)
    assert total is not None
    return total / len(data), torch.stack(gradients)


@pytest.mark.parametrize(("product", "close"), [("exact", 1e-12), ("finite-difference", 1e-5)])
def test_products_and_gradients_are_those_of_the_margin(product: Any, close: float) -> None:
    model, data = tiny(), pairs()
    H, gradients = by_definition(model, data)
    gnh = GaussNewton(model, TASK, data, product=product)
    block = gnh.zeros(3).randn_like(torch.Generator().manual_seed(1))
    assert relative_error(gnh.matvec(block), Dense(H, gnh.zeros()).matvec(block)) <= close
    found = gnh.gradients(data)
    flat = torch.cat([found[name].reshape(len(data), -1) for name in gnh.network.parameters], 1)
    torch.testing.assert_close(flat, gradients, rtol=1e-10, atol=1e-13)


def test_scores_are_those_of_the_dense_solve() -> None:
    """By examples' gradients, which both completions contribute to, and by EK-FAC's factors of them."""
    model, data = tiny(), pairs()
    H, gradients = by_definition(model, data)
    damping = 0.05
    solved = torch.linalg.solve(H + damping * torch.eye(len(H), dtype=torch.float64), gradients[:2].T)
    result = whence.attribute(
        model, data, data[:2], task=TASK, damping=damping, solver="cg", accuracy=0.99999
    )
    torch.testing.assert_close(result.scores, (gradients @ solved).T, rtol=1e-4, atol=1e-7)
    gnh = GaussNewton(model, TASK, data)
    assert gnh.example_gradients().missing == {}


def test_padding_and_company_change_nothing() -> None:
    data, model = pairs(), tiny()
    together = TASK.outputs(model, TASK.collate(data))
    alone = torch.cat([TASK.outputs(model, TASK.collate([pair])) for pair in data])
    torch.testing.assert_close(together, alone)
    leaves = dict(model.named_parameters())
    torch.testing.assert_close(together, torch.stack([margin(model, leaves, pair) for pair in data]))


def test_what_is_no_pair_is_refused() -> None:
    with pytest.raises(OptionError, match="beta is 0"):
        Preference(beta=0)
    with pytest.raises(DataError, match=r"Preference\.pair"):
        TASK.collate([{"input_ids": torch.ones(3)}])
    empty = TASK.pair([1, 2], [], [3], reference=0.0)
    with pytest.raises(DataError, match="the chosen completion of a pair has no token"):
        GaussNewton(tiny(), TASK, [*pairs(), empty])
    assert repr(TASK) == "Preference(beta=0.3)"


# --- TRL's trainer -------------------------------------------------------------------------------------------------

ROWS = [
    {"prompt": f"the {animal} sat on the", "chosen": f" {place}", "rejected": f" {other} and {place}"}
    for animal, place, other in zip(
        ["cat", "dog", "cat", "mat", "log", "dog"], ["mat", "log", "log"] * 2, ["dog", "cat"] * 3, strict=True
    )
]


def trained(place: Path, *, adapter: bool = False, **given: Any) -> Any:
    datasets, peft, trl = (pytest.importorskip(name) for name in ("datasets", "peft", "trl"))
    from tests.test_hf import arguments, llama, tokenizer

    config = (
        peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if adapter else None
    )
    trainer = trl.DPOTrainer(
        llama(),
        ref_model=None if adapter else llama(),
        args=arguments(trl.DPOConfig, place, max_length=48, beta=0.3, gradient_checkpointing=False, **given),
        train_dataset=datasets.Dataset.from_list(ROWS),
        processing_class=tokenizer(),
        peft_config=config,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("adapter", [False, True])
def test_a_trainer_of_preferences(tmp_path: Path, adapter: bool) -> None:
    from tests.test_hf import llama
    from whence import hf
    from whence.training import Training

    trainer = trained(tmp_path, adapter=adapter)
    result = hf.attribute(trainer, ROWS[:2], damping=0.1, solver="cg")
    reference, reader = llama().eval(), trainer.processing_class

    def log_probability(model: nn.Module, prompt: list[int], completion: list[int]) -> float:
        logits = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        return sum(float(logits[len(prompt) - 1 + k, token]) for k, token in enumerate(completion))

    data = []
    for row in ROWS:
        prompt = reader(row["prompt"])["input_ids"]
        chosen, rejected = (
            reader(row["prompt"] + row[side] + reader.eos_token)["input_ids"][len(prompt) :]
            for side in ("chosen", "rejected")
        )
        with torch.no_grad():
            r = log_probability(reference, prompt, chosen) - log_probability(reference, prompt, rejected)
        data.append(TASK.pair(prompt, chosen, rejected, reference=r))
    model = trainer.model.eval()
    recipe = Training.read(trainer.optimizer, trainer.model)
    direct = whence.attribute(model, data, data[:2], task=TASK, damping=0.1, solver="cg", training=recipe)
    assert float((result.scores - direct.scores).norm() / direct.scores.norm()) <= 1e-3
    assert (result.queries[0].text or "").startswith(" mat")
    assert "dog" in (result.queries[0].note or "")


def test_other_losses_of_preferences_are_refused(tmp_path: Path) -> None:
    from whence import hf

    with pytest.raises(ModelError, match=r"loss_type=\['ipo'\]"):
        hf.attribute(trained(tmp_path, loss_type=["ipo"]), ROWS[:1])
    trainer = trained(tmp_path)
    with pytest.raises(DataError, match="a query is a pair"):
        hf.attribute(trainer, [{"prompt": "the cat", "completion": " sat"}])
    trainer.beta = 0.1  # what the task reads, and the loss too: agreed
    assert hf._preference(trainer).beta == 0.1
