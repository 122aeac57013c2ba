"""SmolLM2-135M with its real weights, LoRA on real text as chats, and attribution in three lines.

    python -m benchmarks.chat [--examples 500] [--tokens 128] [--place runs/chat]

The chats are paragraphs of Python's language reference (`pydoc_data.topics`, in every CPython): a question that names
the paragraph's topic and its first words, and the paragraph as the answer. One epoch of TRL's `SFTTrainer`, then
`whence.hf.attribute` with default settings. The weights are those of 4 bits that a package carries, dequantised. The
trained adapter, and the attribution on its way, are kept in the directory, and the same command goes on from there.

Results go to ``benchmarks/results/chat.json``: seconds, peak memory, and what helped most.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import resource
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import whence.hf
from benchmarks.timing import save
from reproduction.assets import smollm2_directory

QUERIES = [
    (
        "What does a with statement do?",
        "The with statement is used to wrap the execution of a block with methods",
    ),
    ("What is a lambda expression?", "Lambda expressions are used to create anonymous functions."),
    (
        "How does the del statement work?",
        "Deletion is recursively defined very similar to the way assignment is",
    ),
]
_FIRST_WORDS = 4


def chats(count: int) -> list[dict[str, Any]]:
    """Paragraphs of the manual of a few lines, spread over its topics, each as one exchange."""
    found = []
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        for paragraph in text.split("\n\n"):
            answer = " ".join(paragraph.split())
            words = answer.split()
            if 50 <= len(answer) <= 240 and answer[0].isupper() and answer.endswith("."):
                start = " ".join(words[:_FIRST_WORDS])
                question = f'In the topic "{topic}", what of "{start} …"?'
                found.append(
                    {
                        "prompt": [{"role": "user", "content": question}],
                        "completion": [{"role": "assistant", "content": answer}],
                    }
                )
    if len(found) < count:
        raise SystemExit(f"this Python's manual has {len(found)} such paragraphs; ask for at most so many")
    return [found[k * len(found) // count] for k in range(count)]


def trained(rows: list[dict[str, Any]], tokens: int, place: Path) -> tuple[Any, dict[str, Any]]:
    """A trainer after one epoch of LoRA, and what is to be said of that; of an earlier call, where it got so far."""
    import datasets
    import peft
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = smollm2_directory()
    settings: dict[str, Any] = {
        "output_dir": str(place / "training"), "num_train_epochs": 1,
        "per_device_train_batch_size": 4, "learning_rate": 5e-4,
        "report_to": [], "use_cpu": True, "logging_steps": 1, "save_strategy": "epoch", "bf16": False, "seed": 0,
        "gradient_checkpointing": False, "max_length": tokens,
    }  # fmt: skip
    told = place / "training.json"
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    adapted: dict[str, Any] = {
        "model": base,
        "peft_config": peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    }
    if told.exists():
        known = json.loads(told.read_text())
        adapted = {"model": peft.PeftModel.from_pretrained(base, known["checkpoint"], is_trainable=True)}
    trainer = trl.SFTTrainer(
        args=trl.SFTConfig(**settings),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(directory),
        callbacks=[whence.hf.KeepTraining()],
        **adapted,
    )
    if len(trainer.train_dataset) != len(rows):
        raise SystemExit(f"{tokens} tokens are not enough: some answers are cut off whole")
    if not told.exists():
        begun = perf_counter()
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        known = {
            "checkpoint": str(place / "training" / f"checkpoint-{trainer.state.global_step}"),
            "training seconds": perf_counter() - begun,
            "training losses": [sum(part) / len(part) for part in (losses[:10], losses[-10:])],
            "peak gigabytes of training": _gigabytes(),
        }
        told.write_text(json.dumps(known))
    return trainer, known


def _gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chat", description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--place", type=Path, default=Path("runs/chat"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = chats(options.examples)
    place = options.place / f"{options.examples}-{options.tokens}"
    place.mkdir(parents=True, exist_ok=True)
    trainer, known = trained(rows, options.tokens, place)
    checkpoint = known.pop("checkpoint")
    found: dict[str, Any] = {
        "examples": len(rows),
        "tokens": options.tokens,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "selected": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        **known,
    }
    print(found, flush=True)
    queries = [{"prompt": [{"role": "user", "content": question}],
                "completion": [{"role": "assistant", "content": answer}]} for question, answer in QUERIES]  # fmt: skip
    result = whence.hf.attribute(trainer, queries, training=checkpoint, run_dir=place / "attribution")
    found["attribution seconds since the last start"] = sum(result.seconds.values())
    found["seconds by phase"] = dict(result.seconds)
    found["peak gigabytes"] = _gigabytes()
    found["solver"] = result.solve.solver
    found["top"] = []
    for number, (question, _) in enumerate(QUERIES):
        values, low, high = result.scores[number], *(side[number] for side in result.interval(0.95))
        best = values.argsort(descending=True)[:5].tolist()
        found["top"].append(
            {
                "question": question,
                "passages": [
                    {
                        "score": float(values[k]),
                        "interval": [float(low[k]), float(high[k])],
                        "question": rows[k]["prompt"][0]["content"],
                        "answer": rows[k]["completion"][0]["content"],
                    }
                    for k in best
                ],
            }
        )
    save("chat", found)
    for entry in found["top"]:
        print(entry["question"])
        for passage in entry["passages"]:
            print(f"  {passage['score']:10.3g}  {passage['question'][:100]}")


if __name__ == "__main__":
    main()
