"""Sample results: a language model's with scores per token, an image classifier's, and one with hostile data."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from whence import Attribution, Classification, Exhibit, attribute
from whence.attribution import Row
from whence.attribution.checkpoint import Checkpoint
from whence.attribution.page import SHOWN
from whence.report.checks import Check, Comparison, Validation
from whence.spectrum import Estimate

SCRIPT = "<script>document.title = 'broken in'</script>"
BREAKOUT = f"</style></script></textarea>--><img src=x onerror=\"document.title='broken in'\">{SCRIPT}"
HEBREW = "שלום עולם, זה טקסט מימין לשמאל"
ARABIC = "مرحبا بالعالم"
LONG_WORD = "pneumono" * 60

PASSAGES = [
    "The with statement is used to wrap the execution of a block with methods defined by a context manager.",
    "An object that defines the runtime context to be established when executing a with statement.",
    "If the suite was exited due to an exception, and the return value was false, the exception is reraised.",
    "A context manager's __exit__() method receives the exception type,\nvalue and traceback as arguments.",
    "The try statement specifies exception handlers and/or cleanup code for a group of statements.",
    "Decorators are applied in nested fashion; the decorator expression is evaluated at definition time.",
    "The for statement is used to iterate over the elements of a sequence such as a string or a tuple.",
    "An assignment expression assigns an expression to an identifier, while also returning the value.",
]


def tokens(text: str) -> tuple[str, ...]:
    """Words with the space before them, as byte-pair tokenizers cut English."""
    pieces, word = [], ""
    for character in text:
        if character in " \n" and word.strip():
            pieces.append(word)
            word = ""
        word += character
    return (*pieces, word)


def png(pixels: np.ndarray) -> bytes:
    """A grey image as a PNG file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels.astype(np.uint8))
    file = io.BytesIO()
    file.write(b"\x89PNG\r\n\x1a\n")
    file.write(chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)))
    file.write(chunk(b"IDAT", zlib.compress(rows)))
    file.write(chunk(b"IEND", b""))
    return file.getvalue()


def digit(kind: int, rng: np.random.Generator) -> bytes:
    """Something like a handwritten digit: a ring, a stroke or two rings on 8 by 8 pixels."""
    y, x = np.mgrid[0:8, 0:8]
    ring = np.exp(-((np.hypot(x - 3.5, y - 3.5) - 2.4) ** 2) / 0.8)
    stroke = np.exp(-((x - 3.5 + 0.3 * (y - 3.5)) ** 2) / 0.9)
    eight = np.exp(-((np.hypot(x - 3.5, y - 2) - 1.4) ** 2) / 0.5) + np.exp(
        -((np.hypot(x - 3.5, y - 5.4) - 1.5) ** 2) / 0.5
    )
    image = np.clip((ring, stroke, eight)[kind] + 0.15 * rng.normal(size=(8, 8)), 0, 1)
    return png(255 - 255 * image)


def paths(rng: np.random.Generator, start: float = 40.0, end: float = 4.2, steps: int = 900) -> np.ndarray:
    """Four chains that fall from ``start`` and wander about ``end``."""
    decay = np.exp(-np.arange(steps) / (steps / 9))
    noise = np.zeros((4, steps))
    for step in range(1, steps):
        noise[:, step] = 0.97 * noise[:, step - 1] + 0.02 * end * rng.normal(size=4)
    return end + (start - end) * decay + noise


@functools.cache
def solved(queries: int) -> Attribution:
    """A real result, whose numbers the samples replace by their own."""
    torch.manual_seed(0)
    model = nn.Linear(2, 3).eval()
    train = [(torch.randn(2), i % 3) for i in range(30)]
    return attribute(model, train, train[:queries], task=Classification(), solver="lissa", damping=1.0)


def sample(
    queries: Sequence[Exhibit], shown: Sequence[Exhibit], rng: np.random.Generator, **others: Any
) -> Attribution:
    """A result with heavy-tailed scores, whose examples show these exhibits in turn. The last question is noisier."""
    count, total = len(queries), others.pop("total", 2000)
    scores = 2.0 * rng.standard_t(3, size=(count, total))
    errors = (0.1 + 0.02 * abs(scores)) * rng.uniform(0.7, 1.4, size=(count, total))
    errors[-1] *= others.pop("noise", 1.0)
    baseline = scores * rng.uniform(0.3, 3.0, size=scores.shape) + rng.normal(size=scores.shape)
    result = solved(count)
    curvature: dict[str, Any] = {
        "trace": Estimate(5231.4, 61.7),
        "lambda_max": Estimate(251.2, 3.1),
        "eigenvalues": torch.tensor(250.0 * np.arange(1, 81) ** -1.1 * np.exp(0.05 * rng.normal(size=80))),
        **others.pop("spectrum", {}),
    }
    spectrum = replace(result.solve.plan.spectrum, **curvature)
    plan = replace(result.solve.plan, damping=2.51, step_size=0.00387, batch_size=46, spectrum=spectrum)
    solve: dict[str, Any] = {
        "residual": torch.full((count,), 0.083),
        "residual_stderr": torch.full((count,), 0.011),
        "converged": torch.ones(count, dtype=torch.bool),
        "paths": torch.tensor(np.stack([paths(rng) for _ in queries], axis=-1)),
        "events": (),
        **others.pop("solve", {}),
    }
    values: dict[str, Any] = {
        "title": "Which passages taught the model about context managers?",
        "chain_scores": torch.tensor(scores + 2 * errors * rng.normal(size=(4, count, total))),
        "indices": torch.arange(total),
        "terms": torch.ones(total, dtype=torch.long),
        "num_examples": total,
        "num_terms": total,
        "dot_products": torch.tensor(baseline),
        "query_losses": torch.full((count,), 1.374),
        "solve": replace(result.solve, plan=plan, **solve),
        "queries": tuple(queries),
        "exhibits": {index: shown[index % len(shown)] for index in range(total)},
        "settings": {"model": "a 6-layer transformer", "damping": "lambda_max / 100", "seed": "0"},
        "versions": {"whence": "0.1.0", "torch": "2.6.0", "python": "3.11.7"},
        "seconds": {"spectrum": 41.2, "solve": 612.9, "scores": 7401.0},
        **others,
    }
    made = replace(result, **values)
    shares = {}
    for q in range(count):
        for row in (*made.top(SHOWN, query=q), *made.top(SHOWN, query=q, harmful=True)):
            pieces = len(made.exhibits.get(row.index, Exhibit()).tokens or ())
            if pieces:
                raw = rng.gamma(0.4, size=pieces) * rng.choice([1, 1, 1, -0.5], size=pieces)
                shares[q, row.index] = tuple(
                    (raw / max(raw.sum(), 0.3 * abs(raw).sum()) * row.score).tolist()
                )
    return replace(made, token_scores={**shares, **made.token_scores})


def ends(result: Attribution, q: int) -> tuple[list[Row], list[Row]]:
    """The rows that a question's page has, helpful and harmful."""
    helpful, harmful = (result.top(SHOWN, query=q, harmful=harmful) for harmful in (False, True))
    return [row for row in helpful if row.score > 0], [row for row in harmful if row.score < 0]


def validation(rng: np.random.Generator, *, sign: float = 1.0, queries: int = 2) -> Validation:
    """Four checks, one of them not run; fine-tuning agrees with the scores, or (``sign=-1``) contradicts them."""
    verdict = "trust" if sign > 0 else "doubt"
    checks = (
        Check(
            "solver",
            "trust",
            "It converged for all questions.",
            {"converged solves": (3.0, 0.0), "of": (3.0, 0.0)},
        ),
        Check("batch", "cannot tell", "A few unusual batches dominate.", {"noise of batches": (3.1, 1.2)}),
        Check(
            "fine-tuning",
            verdict,
            f"The model was fine-tuned on 9 training examples: correlation {sign}.",
            {"correlation": (0.9987 * sign, 0.0011), "slope": (1.02 * sign, 0.04)},
        ),
        Check("damping", "cannot tell", "Not run: it would take about 3.1 h.", ran=False),
    )
    comparisons = []
    for k, kind in enumerate(("most helpful", "most harmful", "random") * 3):
        truth = rng.uniform(2, 30, size=queries) * {"most helpful": 1, "most harmful": -1}.get(kind, 0.02)
        scores, errors = sign * truth * rng.normal(1, 0.05, size=queries), 0.4 + 0.05 * abs(truth)
        comparisons.append(
            Comparison(
                index=k,
                kind=kind,
                converged=k != 8,
                full_batch=False,
                influence=tuple(scores.tolist()),
                influence_error=tuple(errors.tolist()),
                fine_tuned=tuple(truth.tolist()),
                fine_tuned_error=tuple((0.5 * errors).tolist()),
            )
        )
    return Validation("0123456789abcdef", checks, tuple(comparisons))


def text_report(**others: Any) -> Attribution:
    """A language model's result: three questions, one of them not converged, texts shaded by token."""
    rng = np.random.default_rng(0)
    exhibits = [
        Exhibit(
            id=f"reference/section-{k}",
            text=text,
            tokens=tokens(text),
            label=("compound statements", "data model", "expressions")[k % 3],
            note="also in the tutorial" if k % 4 == 1 else None,
            link=f"https://example.org/reference/{k}.html",
        )
        for k, text in enumerate(PASSAGES)
    ]
    long = "\n".join(f"{line + 1:3d}  {PASSAGES[line % 8]}" for line in range(40))
    exhibits.append(Exhibit(id="tutorial/all-of-it", text=long, tokens=tokens(long)))
    queries = [
        Exhibit(
            id="open a file", prompt="To close a file even if an error occurs, use", text=" a with statement."
        ),
        Exhibit(
            prompt="The method that is called when the block is left is",
            text=" __exit__, with three arguments.",
        ),
        Exhibit(prompt="Loops over a sequence are written with", text=" the while keyword."),
    ]
    event = "Chain 1 diverged after 12 steps: the batch was too small. Starting again with |B| = 46."
    fared = {
        "residual": torch.tensor([0.083, 0.083, 0.91]),
        "converged": torch.tensor([True, True, False]),
        "events": (event,),
    }
    checked = validation(np.random.default_rng(2), sign=-1.0, queries=3)
    values = {"num_terms": 2000 * 20, "noise": 20.0, "solve": fared, "validation": checked, **others}
    return sample(queries, exhibits, rng, **values)


def image_report(**others: Any) -> Attribution:
    """An image classifier's result: two questions over small grey images, without events."""
    rng = np.random.default_rng(1)
    names = ("zero", "one", "eight")
    exhibits = [
        Exhibit(
            id=f"train/{k:04d}.png",
            image=digit(k % 3, rng),
            label=names[(k + (k % 7 == 0)) % 3],
            note="label was flipped" if k % 7 == 0 else None,
            link=f"train/{k:04d}.png",
        )
        for k in range(60)
    ]
    queries = [
        Exhibit(id="test/0017.png", image=digit(2, rng), label="eight", prediction="zero (61%)"),
        Exhibit(id="test/0101.png", image=digit(1, rng), label="one", prediction="one (98%)"),
    ]
    values = {
        "total": 1200,
        "title": "What made the model read this eight as a zero?",
        "num_examples": 1500,
        "num_terms": 1500,
        "not_scored": "The 300 validation images were left out: the model was not trained on them.",
        "validation": validation(np.random.default_rng(3)),
        **others,
    }
    return sample(queries, exhibits, rng, **values)


def hostile_report() -> Attribution:
    """Data that try to break the page: markup, scripts, controls, both directions of writing, missing values."""
    hostile = Exhibit(
        id=f"{BREAKOUT}\0",
        text=BREAKOUT,
        tokens=("<script>", "alert(1)", "</script>", "\n", '"quoted"', "\ud800", "\x1b[31m"),
        label="'\"><svg onload=alert(1)>",
        note="{{ 7 * 7 }} {% raw %}",
        link="javascript:alert(1)",
    )
    mixed = Exhibit(id=HEBREW, text=f"{HEBREW}\n{ARABIC} \u202eoverride", label=ARABIC, note="right to left")
    wide = Exhibit(id=LONG_WORD, text=f"{LONG_WORD}\0\x1b\x07\x9b", label="long", image=b"no image at all")
    scores = torch.tensor([3.0, 2.5, 2.0, 1e-9, torch.nan, -torch.inf], dtype=torch.float64)
    fared = {
        "residual": torch.tensor([torch.nan]),
        "residual_stderr": torch.tensor([torch.nan]),
        "converged": torch.tensor([False]),
        "paths": torch.tensor([[[1.0], [torch.nan], [2.0]], [[torch.inf], [1.0], [1.0]]]),
        "events": (BREAKOUT,),
        "choice": BREAKOUT,
    }
    odd = Comparison(4, SCRIPT, True, True, (float("nan"),), (1.0,), (float("inf"),), (float("inf"),))
    checks = Validation(
        SCRIPT,
        (
            Check(
                SCRIPT,
                "doubt",
                f"{BREAKOUT} {HEBREW} {LONG_WORD}",
                {BREAKOUT: (1e30, 1e29), LONG_WORD: (0.0, 0.0)},
            ),
        ),
        (odd, Comparison(5, SCRIPT, True, True, (1e-9,), (0.0,), (0.0,), (0.0,))),
    )
    return sample(
        [Exhibit(id=SCRIPT, prompt=HEBREW, text=BREAKOUT, label=SCRIPT, link="data:text/html,x")],
        [hostile],
        np.random.default_rng(0),
        total=6,
        title=BREAKOUT,
        chain_scores=torch.stack([0.9 * scores, 1.1 * scores]).unsqueeze(1),
        dot_products=None,
        query_losses=torch.tensor([torch.inf]),
        exhibits={0: hostile, 1: mixed, 2: wide, 4: Exhibit(id="not a number")},
        token_scores={(0, 0): (1.0, -2.0, float("nan"), 0.5, 0.1, 0.2, 0.3)},
        solve=fared,
        spectrum={"eigenvalues": torch.tensor([1.0, -1e-9, torch.nan, 0.0])},
        not_scored=BREAKOUT,
        settings={SCRIPT: BREAKOUT, "lone": "\ud800"},
        validation=checks,
    )


def checkpoints_report() -> Attribution:
    """The text report as a mean over four checkpoints, one of them with a name that tries to break the page."""
    result = text_report(validation=None)
    queries, scored = result.chain_scores.shape[1:]
    names = ("seeds/0", "seeds/1", SCRIPT, HEBREW)
    each = [
        Checkpoint(
            name=name,
            model=f"Transformer {k}",
            solver="cg",
            damping=2.51 * (k + 1),
            damping_words="λ was found.",
            converged=torch.tensor([True, True, k > 0]),
            residual=torch.full((queries,), 0.01 * (k + 1)),
            losses=torch.full((queries,), 1.3 + 0.1 * k),
        )
        for k, name in enumerate(names)
    ]
    solve = replace(result.solve, solver="cg", paths=torch.zeros(0, 0, queries))
    errors = torch.full((queries, scored), 0.01, dtype=torch.float64)
    return replace(result, solve=solve, checkpoints=tuple(each), solver_errors=errors)


#: Name -> how to make it.
REPORTS = {
    "text": text_report,
    "image": image_report,
    "hostile": hostile_report,
    "checkpoints": checkpoints_report,
}
