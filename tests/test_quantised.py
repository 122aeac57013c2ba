"""Adapters over quantised weights, with the real libraries: the scores of the same weights in floating point."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.dense import relative_error
from tests.test_hf import QUERY, ROWS, llama, tokenizer
from whence import GaussNewton, LanguageModeling
from whence.errors import ModelError, ParameterSelectionError
from whence.model.quantised import is_quantised, parts
from whence.runs.fingerprint import of_model
from whence.sources import load_model

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
logging.getLogger("torchao").setLevel(logging.CRITICAL)  # which kernels for GPUs it did not find
ao = pytest.importorskip("torchao.quantization")
bnb = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.filterwarnings(
    "ignore:TorchaoLoraLinear was instantiated without"
)  # it is not merged

TASK = LanguageModeling()
KINDS: dict[str, Callable[[], Any]] = {
    "int8": ao.Int8WeightOnlyConfig,
    "int4": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(16)),
    "float8": ao.Float8WeightOnlyConfig,
}


def examples() -> list[dict[str, Tensor]]:
    made, reader = [], tokenizer()
    for row in ROWS:
        prompt, whole = (
            reader(text)["input_ids"] for text in (row["prompt"], row["prompt"] + row["completion"])
        )
        made.append(TASK.query(prompt, whole[len(prompt) :]))
    return made


def is_body(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "lm_head" not in name


def quantised(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    model = llama().to(dtype)
    ao.quantize_(model, config, filter_fn=is_body)
    return model


def four_bits() -> Any:
    """Every matrix of the body as bitsandbytes' NF4."""
    model = llama()
    for name, module in list(model.named_modules()):
        if is_body(module, name):
            layer = bnb.nn.Linear4bit(
                module.in_features,
                module.out_features,
                bias=False,
                compute_dtype=torch.float32,
                quant_type="nf4",
            )
            layer.support_avx512bf16_for_cpu = False  # or some CPUs would compute in bfloat16, and others not
            layer.weight = bnb.nn.Params4bit(
                module.weight.data, requires_grad=False, quant_type="nf4", module=layer
            ).to("cpu")
            model.set_submodule(name, layer)
    return model


def values(weight: Any) -> Tensor:
    if isinstance(weight, bnb.nn.Params4bit):
        return bnb.functional.dequantize_4bit(weight.data, weight.quant_state).float()
    return weight.dequantize().float()


def in_floating_point(model: Any) -> Any:
    """The same values in a plain model of float32."""
    plain = llama()
    weights = dict(model.named_modules())
    for name, module in plain.named_modules():
        if is_body(module, name):
            found = values(weights[name].weight).detach().clone()
            module.weight = nn.Parameter(found.reshape(module.weight.shape), requires_grad=False)
        elif isinstance(getattr(module, "weight", None), Tensor):
            module.weight.data.copy_(weights[name].weight.detach())
    return plain


def adapted(model: Any) -> Any:
    """With LoRA that says something, on matrices at every depth."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    found = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return found.eval()


MODELS: dict[str, Callable[[], Any]] = {
    **{name: lambda make=make: quantised(make()) for name, make in KINDS.items()},
    "int8 in bfloat16": lambda: quantised(KINDS["int8"](), torch.bfloat16),
    "int4 in bfloat16": lambda: quantised(KINDS["int4"](), torch.bfloat16),
    "nf4": four_bits,
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_as_of_the_values_in_floating_point(kind: str) -> None:
    base = MODELS[kind]()
    reference, model = adapted(in_floating_point(base)), adapted(base)
    held = next(p for name, p in model.named_parameters() if name.endswith("o_proj.weight"))
    assert is_quantised(held)
    rows = examples()
    found, expected = GaussNewton(model, TASK, rows), GaussNewton(reference, TASK, rows, product="exact")
    assert list(found.network.parameters) == list(expected.network.parameters)
    assert all("lora_" in name for name in found.network.parameters)
    assert found.product == ("finite-difference" if kind == "nf4" else "exact")
    close = 5e-4 if kind == "nf4" else 1e-5
    block = expected.zeros(2).randn_like(torch.Generator().manual_seed(0))
    assert relative_error(found.matvec(block), expected.matvec(block)) <= close
    differences = GaussNewton(model, TASK, rows, product="finite-difference")
    assert relative_error(differences.matvec(block), expected.matvec(block)) <= 5e-4


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_scores_are_those_of_the_values_in_floating_point(kind: str) -> None:
    base = MODELS[kind]()
    reference, model = adapted(in_floating_point(base)), adapted(base)
    rows = examples()[:6]
    ours, theirs = (
        whence.attribute(which, rows, rows[:2], task=TASK, damping=0.1, solver="cg").scores
        for which in (model, reference)
    )
    assert float((ours - theirs).norm() / theirs.norm()) <= (5e-4 if kind == "nf4" else 1e-5)


def test_weights_that_stay_quantised_are_not_copied() -> None:
    model = adapted(quantised(KINDS["int8"]()))
    network = GaussNewton(model, TASK, examples()).network
    assert not network.low_precision
    assert not network.constants()
    narrow = adapted(quantised(KINDS["int8"](), torch.bfloat16))
    assert GaussNewton(narrow, TASK, examples()).network.constants()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_round_their_inputs_are_refused(dtype: torch.dtype) -> None:
    """Adapters above such a layer would be seen, those below not."""
    model = adapted(quantised(ao.Int8DynamicActivationInt8WeightConfig(), dtype))
    with pytest.raises(ModelError, match=r"o_proj.*quantised in a way that has no derivatives"):
        GaussNewton(model, TASK, examples())


def test_inputs_that_are_rounded_behind_a_backward_pass_are_refused() -> None:
    """As bitsandbytes' 8 bits do: a backward pass as if nothing was rounded, of outputs that jump."""

    class Rounding(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            scale = x.abs().amax(-1, keepdim=True) / 127
            return (x / scale).round() * scale @ weight.float().T / 127

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return gradients[0] @ ctx.saved_tensors[0].float() / 127, None

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qweight: Tensor
            generator = torch.Generator().manual_seed(0)
            self.register_buffer(
                "qweight", torch.randint(-127, 128, (8, 8), generator=generator, dtype=torch.int8)
            )

        def forward(self, x: Tensor) -> Tensor:
            return Rounding.apply(x, self.qweight)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Packed(), nn.Tanh(), nn.Linear(8, 3)).eval()
    data = [(torch.randn(8), i % 3) for i in range(6)]
    with pytest.raises(ModelError, match="disagree by"):
        GaussNewton(model, whence.Classification(), data)


def test_packed_layers_of_torch_itself_are_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
    data = [(torch.randn(8), i % 3) for i in range(6)]

    class Detaching(nn.Module):
        """What a quantised layer does to a graph."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("packed", torch.ones(8, 8, dtype=torch.int8))

        def forward(self, x: Tensor) -> Tensor:
            return x.detach() @ self.get_buffer("packed").float()

    model[2] = nn.Sequential(nn.Identity(), Detaching())
    with pytest.raises(ModelError, match=r"'2\.1' \(Detaching\)"):
        GaussNewton(model, whence.Classification(), data)


def test_quantised_weights_are_not_attributed_to() -> None:
    model, rows = quantised(KINDS["int8"]()), examples()
    with pytest.raises(ParameterSelectionError, match="it has no adapters"):
        GaussNewton(model.eval(), TASK, rows)
    only = GaussNewton(model, TASK, rows, params=["lm_head.*"])
    assert list(only.network.parameters) == ["lm_head.weight"]
    with pytest.raises(ParameterSelectionError, match=r"these parameters are quantised: .*o_proj"):
        GaussNewton(model, TASK, rows, params=["*o_proj*"])
    model.requires_grad_(True)
    for params in (None, ["*"], lambda name: True):
        with pytest.raises(ParameterSelectionError, match="are quantised"):
            GaussNewton(model, TASK, rows, params=params)


def test_fingerprints_see_quantised_numbers() -> None:
    model = quantised(KINDS["int8"]())
    other = copy.deepcopy(model)
    assert of_model(model) == of_model(other)
    numbers, scales = parts(other.model.layers[0].mlp.down_proj.weight)[:2]
    numbers[0, 0] += 1
    changed = of_model(other)
    assert changed != of_model(model)
    scales.mul_(2)
    assert of_model(other) not in (changed, of_model(model))


def test_runs_over_a_quantised_base_are_resumed(tmp_path: Path) -> None:
    rows = examples()[:6]
    model = adapted(quantised(KINDS["int8"]()))
    first = whence.attribute(
        model, rows, rows[:1], task=TASK, damping=0.1, solver="cg", run_dir=tmp_path / "run"
    )
    again = whence.attribute(
        model, rows, rows[:1], task=TASK, damping=0.1, solver="cg", run_dir=tmp_path / "run"
    )
    torch.testing.assert_close(again.scores, first.scores, rtol=0, atol=0)


def test_from_the_command_line(tmp_path: Path) -> None:
    """An adapter's directory whose base was saved quantised; the base alone is refused."""
    llama().save_pretrained(tmp_path / "plain")
    config = transformers.TorchAoConfig(ao.Int8WeightOnlyConfig(version=2))
    base = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config, dtype=torch.float32
    )
    base.save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match="holds quantised weights"):
        load_model(tmp_path / "base")
    model = adapted(base)
    model.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "../base"}))
    problem = load_model(tmp_path / "adapter")
    rows = examples()
    query = [
        TASK.query(*(problem.tokenizer(QUERY[0][part])["input_ids"] for part in ("prompt", "completion")))
    ]
    named, own = (
        whence.attribute(which, rows, query, task=TASK, damping=0.1).scores
        for which in (problem.model, model)
    )
    torch.testing.assert_close(named, own, rtol=1e-4, atol=1e-6)
