"""The index: bytes beside recall, seconds for an answer, and whether its intervals hold.

    python -m benchmarks.index [NAME …]      measures what is missing, then shows the tables

Truth are the quick answer's own scores of all examples: EK-FAC solved for the queries, and every example scored along
that. *Recall* is of the ten largest of these. *Bytes*: one rotation into 65,536 places is cut to its first places,
which are a rotation of their own. CPU seconds are of one thread.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.timing import RESULTS, environment, report
from benchmarks.works import WORKS, Data, Work
from whence import Index, LanguageModeling, index
from whence.index.signs import Signs, estimates
from whence.scoring import Scorer

PATH = RESULTS / "index.json"
BYTES = (256, 512, 1024, 2048, 4096, 8192)
TOP, FIRST, TOKENS = 10, 100, 32


# --- enwik8 -----------------------------------------------------------------------------------------------------------


@cache
def _enwik8(passages: int) -> Data:
    """Passages of 32 tokens of the English Wikipedia, one after the other; a hundred more to ask about."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from reproduction.assets import enwik8

    text = enwik8(passages * TOKENS * 4).decode("utf-8", "ignore")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([text[:2_000_000]], trainer)
    pieces = (text[begin : begin + 100_000] for begin in range(0, len(text), 100_000))
    ids = torch.cat([torch.tensor(tokenizer.encode(piece).ids) for piece in pieces])
    rows = ids[: len(ids) // TOKENS * TOKENS].reshape(-1, TOKENS)
    if len(rows) < passages + 100:
        raise SystemExit(f"only {len(rows)} passages of {TOKENS} tokens")
    return Data((rows[:passages],), (rows[passages : passages + 100],))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000, hidden_size=48, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=TOKENS, tie_word_embeddings=True, attn_implementation="eager",
        bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def _wikipedia(passages: int) -> Work:
    return Work(
        f"enwik8-{passages}", f"enwik8, {passages:,} passages, Llama", LanguageModeling(), partial(_enwik8, passages),
        _llama, partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.01), epochs=1, batch=64, cosine=True, queries=20,
        clip=1.0,
    )  # fmt: skip


def work(name: str) -> Work:
    kind, _, count = name.partition("-")
    return _wikipedia(int(count)) if kind == "enwik8" else WORKS[name]


# --- measuring --------------------------------------------------------------------------------------------------------


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and CPU seconds."""
    begun = time.process_time()
    return function(), time.process_time() - begun


def measure(of: Work, directory: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    """Makes an index, asks it, and compares."""
    train, asked = of.train_set(), of.asked()[:20]
    n = len(train)
    model = of.fit(range(n), 0).model
    make = partial(index, model, train, task=of.task, directory=directory)
    made, building = timed(make)
    found: dict[str, Any] = {"about": of.about, "examples": n, "parameters": made.gnh.num_parameters}
    found["bytes_per_example"] = sum(f.stat().st_size for f in directory.glob("part-*.safetensors")) / n
    found["build"] = {"seconds": building, "forward_seconds": n * _forward(made)}
    keep(found)
    made, opening = timed(lambda: Index.open(directory, model, train, task=of.task))
    found["open_seconds"] = opening
    answer, asking = timed(lambda: made.ask(asked[:1]))
    rotated = made.whitened.of_gradients(made.gnh.gradients(asked[:1]))
    _, looking = timed(lambda: [estimates(part.signs, rotated) for part in made.parts])
    found["ask"] = {"seconds": asking, "estimates_seconds": looking, "phases": dict(answer.result.seconds)}
    keep(found)
    gradients = made.gnh.gradients(asked)
    solved = made.whitened.factors.solve(gradients).scale_(made.fit.scale)
    scorer = Scorer(made.gnh, solved)
    exact, scoring = timed(lambda: scorer.score(torch.arange(n)))
    found["exact_seconds"] = scoring
    answer = made.ask(asked)
    found["default"] = {**judge(answer.estimates, exact), "covered": covered(answer, exact)}
    largest = exact.topk(20, dim=1).indices
    low, high = answer.interval(0.95)
    inside = (low <= exact) & (exact <= high)
    found["default"]["covered_largest"] = float(inside.gather(1, largest).double().mean())
    found["default"]["calibration"] = made.calibration.error
    ids = answer.result.indices
    found["default"]["rescored"] = len(ids) / len(asked)
    top = exact.topk(TOP, dim=1).indices
    refined = answer.result.scores.nan_to_num(nan=-torch.inf).topk(TOP, dim=1).indices
    found["default"]["recall_rescored"] = _recall(top, refined)
    keep(found)
    if n <= 5000:
        found["bytes"] = by_bytes(made, asked, exact)
        keep(found)


def _forward(made: Index) -> float:
    """CPU seconds of a forward pass, per example, in the batches that are made here."""
    gnh = made.gnh
    batch = gnh.terms.fetch(torch.arange(min(gnh.micro_batch, len(gnh.terms))))
    with torch.no_grad():
        gnh.network.outputs(batch)
        times = [timed(lambda: gnh.network.outputs(batch))[1] for _ in range(5)]
    return sorted(times)[2] / batch.size


def by_bytes(made: Index, asked: list[Any], exact: Tensor) -> dict[str, Any]:
    """The same for other numbers of bytes."""
    from whence.index.whitened import Whitened

    most = 8 * max(BYTES)
    whitened = Whitened(made.gnh, made.whitened.factors, most, torch.Generator().manual_seed(1))
    queries = whitened.of_gradients(made.gnh.gradients(asked))
    parts = torch.arange(exact.shape[1]).split(256)
    rows: dict[int, list[Tensor]] = {count: [] for count in BYTES}
    for positions in parts:
        y = whitened.of_examples(positions)
        for count in BYTES:
            cut = (most / (8 * count)) ** 0.5
            signs = Signs.of(y[:, : 8 * count] * cut)
            rows[count].append(estimates(signs, queries[:, : 8 * count] * cut))
    return {
        str(count): judge(made.fit.scale * torch.cat(found, 1).double(), exact)
        for count, found in rows.items()
    }


def judge(estimated: Tensor, exact: Tensor) -> dict[str, float]:
    """Correlation, and recall of the top ten."""
    pairs = zip(estimated, exact, strict=True)
    correlation = torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in pairs]).mean()
    top = exact.topk(TOP, dim=1).indices
    first = estimated.topk(min(FIRST, exact.shape[1]), dim=1).indices
    return {
        "correlation": float(correlation),
        "recall_first_100": _recall(top, first),
        "recall_first_10": _recall(top, estimated.topk(TOP, dim=1).indices),
    }


def covered(answer: Any, exact: Tensor) -> float:
    low, high = answer.interval(0.95)
    return float(((low <= exact) & (exact <= high)).double().mean())


def _recall(top: Tensor, found: Tensor) -> float:
    return float(
        torch.stack([torch.isin(t, f).double().mean() for t, f in zip(top, found, strict=True)]).mean()
    )


def lookup(passages: int = 100_000, count: int = 4096) -> dict[str, float]:
    """CPU seconds of one query's estimates on random signs, beside a product with the signs as numbers."""
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (passages, count), dtype=torch.uint8, generator=random)
    signs, query = Signs(bits, torch.ones(passages)), torch.randn(1, 8 * count, generator=random)
    found, tables = timed(lambda: estimates(signs, query))

    def product(some: int = 2000) -> Tensor:
        rows = [np.unpackbits(part.numpy(), axis=1) for part in bits[:some].split(500)]
        return torch.cat([(torch.from_numpy(row).float() @ query[0]) for row in rows])

    by_hand, seconds = timed(product)
    assert torch.allclose(2 * by_hand - query.sum(), found[0, : len(by_hand)], rtol=1e-3, atol=0.05)
    return {
        "passages": passages,
        "bytes": count,
        "tables": tables,
        "product": seconds * passages / len(by_hand),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.index", description=__doc__.split("\n")[0])
    names = ("digits", "mnist", "llama", "enwik8-100000")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"works, or enwik8-PASSAGES; {', '.join(names)}"
    )
    parser.add_argument("--show", action="store_true", help="what is there, measuring nothing")
    parser.add_argument(
        "--keep", type=Path, default=Path("index-benchmark"), help="where the indices are kept"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)

    def read() -> dict[str, Any]:
        known = {"environment": environment(), "works": {}}
        return json.loads(PATH.read_text()) if PATH.exists() else known

    if "lookup" not in read() and not options.show:
        PATH.write_text(json.dumps({**read(), "lookup": lookup()}, indent=1) + "\n")
    for name in [] if options.show else options.names or names:
        if "default" in read()["works"].get(name, {}):
            continue

        def keep(measured: dict[str, Any], name: str = name) -> None:
            known = read()
            known["works"][name] = measured
            PATH.write_text(json.dumps(known, indent=1) + "\n")

        measure(work(name), options.keep / name, keep)
        shutil.rmtree(options.keep / name)
    show(read())


def show(found: dict[str, Any]) -> None:
    """The two tables."""
    works, one = found["works"], found["lookup"]
    print(
        f"one query, {one['passages']:,} random passages of {one['bytes']:,} bytes: {one['tables']:.2f} s by tables, "
        f"{one['product']:.1f} s by a matrix product"
    )
    report(
        "an index of 4,096 bytes",
        (
            "",
            "build, forwards",
            "first estimates, s",
            "correlation",
            "top 10 in 100",
            "scored again",
            "95% holds",
        ),
        [
            (
                row["about"],
                f"{row['build']['seconds']:.0f}",
                f"{row['build']['forward_seconds']:.1f}",
                f"{row['ask']['estimates_seconds']:.3f}",
                *(
                    f"{row['default'][each]:.3f}"
                    for each in ("correlation", "recall_first_100", "recall_rescored")
                ),
                f"{row['default']['covered']:.3f}",
            )
            for row in works.values()
            if "default" in row
        ],
    )
    report(
        "recall of the top 10 in the first 100 (correlation)",
        ("", *map(str, BYTES)),
        [
            (
                row["about"],
                *(
                    f"{each['recall_first_100']:.3f} ({each['correlation']:.3f})"
                    for each in (row["bytes"][str(count)] for count in BYTES)
                ),
            )
            for row in works.values()
            if "bytes" in row
        ],
    )


if __name__ == "__main__":
    main()
