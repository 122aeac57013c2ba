"""Tokenizers and models of the Hugging Face kind, small enough to be made in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = ["the cat sat on the mat and the dog sat on the log", "Paris is the capital of France"] * 5
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level(*, bos: bool = False, eos: bool = False, vocabulary: int = 320) -> Any:
    """A byte-level BPE tokenizer, as GPT-2's; adds BOS or EOS by itself if told to."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if bos or eos:
        single = f"{'<s> ' * bos}$A{' </s>' * eos}"
        special = [("<s>", 0), ("</s>", 1)]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def pieces_with_fallback() -> Any:
    """A SentencePiece-like tokenizer, as Llama's: ▁ for spaces, bytes for unknown characters, BOS."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def gpt2_directory(
    path: Path, *, rows: int | None = None, tokenizer: Any = None, seed: int = 0, **config: Any
) -> Path:
    """A saved GPT-2 with its tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = byte_level() if tokenizer is None else tokenizer
    torch.manual_seed(seed)
    settings = {
        "n_positions": 32,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    model = GPT2LMHeadModel(GPT2Config(vocab_size=rows or len(tokenizer), **(settings | config)))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def llama_directory(path: Path) -> Path:
    """A saved Llama with its tokenizer, its weights in several files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = pieces_with_fallback()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(path, max_shard_size="10KB")
    tokenizer.save_pretrained(path)
    return path


def classifier_directory(path: Path, **config: Any) -> Path:
    """A saved BERT classifier with a tokenizer."""
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = byte_level()
    torch.manual_seed(0)
    settings = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 24,
    }
    BertForSequenceClassification(
        BertConfig(vocab_size=len(tokenizer), **(settings | config))
    ).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def vit_directory(path: Path, **config: Any) -> Path:
    """A saved vision transformer for 8 × 8 pixels, with its image processor."""
    import json

    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    settings = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 8,
        "patch_size": 4,
        "num_labels": 2,
    }
    ViTForImageClassification(ViTConfig(**(settings | config))).save_pretrained(path)
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": 8, "width": 8},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path
