"""Sample reports: a language model's with scores per token, an image classifier's, and one with hostile data."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np

from whence.exhibit import Exhibit
from whence.report import Entry, Question, Report, Trust
from whence.report.checks import Check, Comparison, Validation

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


def entry(rank: int, index: int, score: float, error: float, total: int, **others: Any) -> Entry:
    """An entry whose interval is two errors wide on either side."""
    low, high = score - 2 * error, score + 2 * error
    return Entry(
        rank,
        index,
        score,
        low,
        high,
        score / total,
        low / total,
        high / total,
        **{"separated": True, **others},
    )


def paths(rng: np.random.Generator, start: float, end: float, steps: int = 900) -> np.ndarray:
    """Four chains that fall from ``start`` and wander about ``end``."""
    decay = np.exp(-np.arange(steps) / (steps / 9))
    noise = np.zeros((4, steps))
    for step in range(1, steps):
        noise[:, step] = 0.97 * noise[:, step - 1] + 0.02 * end * rng.normal(size=4)
    return end + (start - end) * decay + noise


def question(
    number: int,
    exhibit: Exhibit,
    exhibits: list[Exhibit],
    rng: np.random.Generator,
    *,
    total: int = 2000,
    top: int = 6,
    **others: Any,
) -> Question:
    """A question with heavy-tailed scores, whose ``2 * top`` extremes show ``exhibits`` in turn."""
    scores = rng.standard_t(3, size=total) * 2.0
    stderr = (0.3 + 0.06 * abs(scores)) * rng.uniform(0.7, 1.4, size=total)
    baseline = scores * rng.uniform(0.3, 3.0, size=total) + rng.normal(size=total)
    order, by_baseline = np.argsort(-scores), np.argsort(-baseline)
    place = np.empty(total, dtype=int)
    place[by_baseline] = np.arange(1, total + 1)

    def build(rank: int, index: int, follower: int) -> Entry:
        shown = exhibits[index % len(exhibits)]
        gap = abs(scores[index] - scores[follower])
        weights = None
        if shown.tokens:
            raw = rng.gamma(0.4, size=len(shown.tokens)) * rng.choice([1, 1, 1, -0.5], size=len(shown.tokens))
            weights = tuple((raw / max(raw.sum(), 0.3 * abs(raw).sum()) * scores[index]).tolist())
        return entry(
            rank,
            int(index),
            float(scores[index]),
            float(stderr[index]),
            total,
            separated=bool(gap > 2 * np.hypot(stderr[index], stderr[follower])),
            baseline=float(baseline[index]),
            baseline_rank=int(place[index]),
            exhibit=shown,
            token_scores=weights,
        )

    values: dict[str, Any] = {
        "helpful": tuple(build(r + 1, order[r], order[r + 1]) for r in range(top)),
        "harmful": tuple(build(r + 1, order[-r - 1], order[-r - 2]) for r in range(top)),
        "by_baseline": tuple(build(r + 1, by_baseline[r], by_baseline[r + 1]) for r in range(3)),
        "residual": 0.083,
        "residual_stderr": 0.011,
        "converged": True,
        "agreement": 0.987,
        "paths": paths(rng, 40.0, 4.2),
        "loss": 1.374,
        **others,
    }
    return Question(
        number=number, exhibit=exhibit, indices=np.arange(total), scores=scores, stderr=stderr, **values
    )


def trust(rng: np.random.Generator, *, term: str = "token", events: tuple[str, ...] = ()) -> Trust:
    return Trust(
        spectrum={
            "trace": (5231.4, 61.7),
            "frobenius": (412.0, 9.3),
            "lambda_max": (251.2, 3.1),
            "sampling_constant": (1.84, 0.12),
        },
        eigenvalues=250.0 * np.arange(1, 81) ** -1.1 * np.exp(0.05 * rng.normal(size=80)),
        plan={
            "damping": 2.51,
            "step_size": 0.00387,
            "batch_size": 46,
            "num_steps": 206,
            "chains": 4,
            "constant": 2.0,
        },
        events=events,
        term=term,
        num_products=832,
        num_term_products=39_376,
    )


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


def report(questions: tuple[Question, ...], evidence: Trust, **others: Any) -> Report:
    values: dict[str, Any] = {
        "title": "Which passages taught the model about context managers?",
        "confidence": 0.95,
        "num_examples": 2000,
        "num_scored": 2000,
        "not_scored": "",
        "score_method": "Products of every example's gradient with u, by central differences.",
        "settings": {
            "model": "a 6-layer transformer",
            "damping": "lambda_max / 100",
            "seed": "0",
            "queries": "3",
        },
        "versions": {"whence": "0.1.0", "torch": "2.6.0", "python": "3.11.7"},
        "seconds": {"spectrum": 41.2, "solve": 612.9, "scores": 7401.0},
        **others,
    }
    return Report(questions=questions, trust=evidence, **values)


def text_report(**others: Any) -> Report:
    """A language model's report: three questions, one of them not converged, texts shaded by token."""
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
    questions = tuple(question(k, query, exhibits, rng) for k, query in enumerate(queries[:2]))
    poor = question(
        2, queries[2], exhibits, rng, converged=False, residual=0.91, residual_stderr=0.2, agreement=0.31
    )
    event = "Chain 1 diverged after 12 steps: the batch was too small. Starting again with |B| = 46."
    values = {"validation": validation(rng, sign=-1.0, queries=3), **others}
    return report((*questions, poor), trust(rng, events=(event,)), **values)


def image_report(**others: Any) -> Report:
    """An image classifier's report: two questions over small grey images, without events."""
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
    questions = tuple(question(k, query, exhibits, rng, total=1200, top=8) for k, query in enumerate(queries))
    values = {
        "title": "What made the model read this eight as a zero?",
        "num_examples": 1500,
        "num_scored": 1200,
        "not_scored": "The 300 validation images were left out: the model was not trained on them.",
        "validation": validation(rng),
        **others,
    }
    return report(questions, trust(rng, term="example"), **values)


def hostile_report() -> Report:
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
    entries = (
        entry(
            1, 0, 3.0, 0.1, 10, exhibit=hostile, token_scores=(1.0, -2.0, float("nan"), 0.5, 0.1, 0.2, 0.3)
        ),
        entry(2, 1, 2.5, 0.1, 10, exhibit=mixed, separated=False),
        entry(3, 2, 2.0, 0.0, 10, exhibit=wide),
        entry(4, 3, 1.0e-9, 1e-10, 10),
        entry(5, 4, float("nan"), float("nan"), 10, exhibit=Exhibit(id="not a number")),
    )
    scores = np.array([3.0, 2.5, 2.0, 1e-9, np.nan, -np.inf])
    one = Question(
        number=0,
        exhibit=Exhibit(id=SCRIPT, prompt=HEBREW, text=BREAKOUT, label=SCRIPT, link="data:text/html,x"),
        loss=float("inf"),
        helpful=entries,
        harmful=(entry(1, 0, 3.0, float("inf"), 10, exhibit=hostile),),
        by_baseline=(),
        indices=np.arange(6),
        scores=scores,
        stderr=np.full(6, np.nan),
        residual=float("nan"),
        residual_stderr=float("nan"),
        converged=False,
        agreement=float("nan"),
        paths=np.array([[1.0, np.nan, 2.0], [np.inf, 1.0, 1.0]]),
    )
    evidence = Trust(
        spectrum={"trace": (float("nan"), float("inf")), SCRIPT: (1.0, 0.0)},
        eigenvalues=np.array([1.0, -1e-9, np.nan, 0.0]),
        plan={"damping": float("nan"), SCRIPT: 2.0},
        events=(BREAKOUT,),
        term=SCRIPT,
        num_products=0,
        num_term_products=0,
    )
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
    return report(
        (one,),
        evidence,
        title=BREAKOUT,
        not_scored=BREAKOUT,
        settings={SCRIPT: BREAKOUT, "lone": "\ud800"},
        validation=checks,
    )


#: Name -> how to make it.
REPORTS = {"text": text_report, "image": image_report, "hostile": hostile_report}
