"""Memory of a complete attribution of OPT from its configuration, with random weights, in copies of the parameters.

    python -m benchmarks.opt [--model 125m|1.3b|2.7b] [--queries 2] [--sequences 16] [--tokens 128]

Float32, embeddings frozen, LiSSA by finite differences with a fixed small number of steps: what is asked is memory, not
accuracy. The peak is that of the process (resident memory), less what it was before the model was made. It refuses to
begin where the machine has not the memory that it foretells.

Results go to ``benchmarks/results/opt.json``, by model.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

import psutil
import torch

from benchmarks.growth import sequences
from benchmarks.timing import RESULTS, environment
from whence import Estimate, LanguageModeling, Lissa, Plan, Spectrum, attribute

PATH = RESULTS / "opt.json"
#: name -> width, layers, heads, as published. (OPT-350m is built otherwise.)
SIZES = {"125m": (768, 12, 12), "1.3b": (2048, 24, 32), "2.7b": (2560, 32, 32)}
VOCABULARY, DAMPING, STEPS = 50272, 1.0, 2
#: Copies of the selected parameters: the model, and right-hand side, iterate and solution of every query.
BASE, EACH = 1.5, 3.0


def opt(name: str) -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    width, layers, heads = SIZES[name]
    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=width, word_embed_proj_dim=width, ffn_dim=4 * width,
        num_hidden_layers=layers, num_attention_heads=heads, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    model = OPTForCausalLM(config).eval()
    for parameter in (
        *model.get_input_embeddings().parameters(),
        *model.model.decoder.embed_positions.parameters(),
    ):
        parameter.requires_grad_(False)
    return model


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.opt", description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=list(SIZES), default="125m")
    parser.add_argument("--queries", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    width, layers, _ = SIZES[options.model]
    foretold = 4 * 12 * width**2 * layers * (BASE + EACH * options.queries) + 4 * VOCABULARY * width
    if psutil.virtual_memory().available < foretold:
        raise SystemExit(
            f"about {foretold / 2**30:.1f} GiB are needed, {psutil.virtual_memory().available / 2**30:.1f} are there"
        )
    data, queries = (
        sequences(options.sequences, options.tokens, 1),
        sequences(options.queries, options.tokens, 2),
    )
    before = resident()
    model = opt(options.model)
    selected = sum(p.numel() for p in model.parameters() if p.requires_grad) * 4
    everything = sum(p.numel() for p in model.parameters()) * 4
    one = Estimate(1.0)
    plan = Plan.from_spectrum(Spectrum(trace=one, frobenius=one, lambda_max=one), DAMPING, chains=2)
    plan = plan.replace(batch_size=options.tokens, num_steps=STEPS)
    begun = time.perf_counter()
    attribute(
        model, data, queries, task=LanguageModeling(), damping=DAMPING, product="finite-difference", micro_batch=1,
        solver=Lissa(plan, average="last", recover=False, residual_batches=2), baseline=False,
        spectrum_terms=options.tokens,
    )  # fmt: skip
    peak = resident() - before
    found = json.loads(PATH.read_text()) if PATH.exists() else {}
    found[f"{options.model}, {options.queries} queries"] = {
        "bytes of the parameters": everything,
        "bytes of the selected": selected,
        "peak": peak,
        "copies": peak / everything,
        "steps": STEPS,
        "sequences": options.sequences,
        "tokens": options.tokens,
        "seconds": time.perf_counter() - begun,
        "environment": environment(),
    }
    PATH.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{options.model}: peak {peak / 1e9:.2f} GB, {peak / everything:.2f} times the parameters' bytes")


if __name__ == "__main__":
    main()
