"""What objects show of themselves in a notebook, their figures and their tables."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import whence
from whence import Exhibit
from whence.attribution.result import Attribution
from whence.errors import OptionError
from whence.report.checks import Check, Validation

HOSTILE = "<script>alert(1)</script>$\\frac{$"


@pytest.fixture(scope="module")
def result() -> Attribution:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
    train = [(torch.randn(4), i % 3) for i in range(40)]
    return whence.attribute(
        model,
        train,
        train[:2],
        task=whence.Classification(),
        solver="cg",
        damping=0.1,
        describe=lambda example, index: Exhibit(id=f"{index} {HOSTILE}"),
    )


class _Bigrams(nn.Module):
    """Every token predicts the next alone."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Embedding(12, 6), nn.Linear(6, 12)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.write(self.read(input_ids))


@pytest.fixture(scope="module")
def texts() -> Attribution:
    torch.manual_seed(0)
    task, model = whence.LanguageModeling(), _Bigrams().eval()
    rows = [{"input_ids": torch.randint(3, 12, (9,))} for _ in range(12)]
    return whence.attribute(
        model,
        rows,
        [task.query([3, 4, 5], [6, 7])],
        task=task,
        solver="lissa",
        damping="lambda_max/5",
        describe=lambda example, index: Exhibit(
            tokens=tuple(f" {HOSTILE}{i}" for i in example["input_ids"].tolist())
        ),
    )


def test_a_ranking_is_drawn_with_every_score_and_interval(result: Attribution) -> None:
    rows = [*result.top(3, query=1), *list(result.top(3, query=1, harmful=True))[::-1]]
    (axes,) = result.plot.ranking(query=1, k=3).axes
    dots = [float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "o"]
    assert dots == pytest.approx([row.score for row in rows])
    bars = [list(line.get_xdata()) for line in axes.lines if line.get_linewidth() == 1.2]
    assert bars == [[row.low, row.high] for row in rows]
    assert [label.get_text().split()[0] for label in axes.get_yticklabels()] == [
        str(row.index) for row in rows
    ]
    result.plot.ranking().canvas.draw()  # what is in the data is no formula


def test_the_path_of_every_chain_is_drawn(texts: Attribution) -> None:
    (axes,) = texts.plot.convergence().axes
    drawn = np.stack([line.get_ydata() for line in axes.lines])
    np.testing.assert_array_equal(drawn, texts.solve.paths[..., 0].numpy())


def test_tokens_are_shaded_by_their_share(texts: Attribution) -> None:
    best = texts.top(1)[0].index
    shares = [share if math.isfinite(share) else 0.0 for share in texts.token_scores[0, best]]
    figure = texts.plot.tokens()
    figure.canvas.draw()
    (axes,) = figure.axes
    depth = [patch.get_facecolor()[3] for patch in axes.patches]
    largest = max(map(abs, shares))
    np.testing.assert_allclose(depth, [abs(share) / largest * 200 / 255 for share in shares], atol=1 / 255)
    assert HOSTILE in axes.texts[0].get_text()
    with pytest.raises(OptionError, match="no shares of tokens were kept of example 99"):
        texts.plot.tokens(index=99)


def test_other_dampings_are_drawn(result: Attribution, texts: Attribution) -> None:
    over = result.over_damping()
    line = result.plot.damping().axes[0].lines[0]
    np.testing.assert_allclose(line.get_xdata(), over.dampings[over.settled])
    np.testing.assert_allclose(line.get_ydata(), over.shared()[over.settled].mean(1))
    with pytest.raises(OptionError, match="kept nothing of other λ"):
        texts.plot.damping()


def test_a_missing_matplotlib_is_named_with_its_extra(
    result: Attribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionError, match=r'pip install "whence\[plot\]"'):
        result.plot.ranking()


def test_cards_say_what_prints_say() -> None:
    A = whence.FiniteSum([torch.diag(torch.tensor([1.0, 0.1 * k])) for k in range(8)])
    g = torch.Generator().manual_seed(0)
    spectrum = whence.estimate_spectrum(A, generator=g)
    plan = whence.Plan.tuned(spectrum, 0.1, num_terms=8)
    rhs = whence.ParamVector({"x": torch.ones(2)})
    solution = whence.Lissa(plan).solve(whence.Damped(A, 0.1), rhs, generator=g)
    for shown in (spectrum, plan, solution):
        card, printed = shown._repr_html_(), str(shown)
        assert card.startswith("<div")
        for line in printed.splitlines():
            assert line.split()[-1].strip("().") in card
    unstable = plan.replace(step_size=10.0)
    assert "expect divergence" in unstable._repr_html_()


def test_a_cleaning_shows_its_page() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 3).eval()
    train = [(torch.randn(2), i % 3) for i in range(30)]
    cleaning = whence.clean(model, train, task=whence.Classification(), rank=4, exact_solves=2)
    assert cleaning._repr_html_().startswith("<iframe")
    assert len(cleaning.to_pandas()) == 30


def test_tables_are_data_frames(result: Attribution) -> None:
    over = result.over_damping()
    frame = over.to_pandas()
    first = frame[(frame["damping"] == float(over.dampings[3])) & (frame["query"] == 1)]
    np.testing.assert_array_equal(first["score"].to_numpy(), over.scores[3, 1].numpy())
    assert first.loc[first["rank"] == 1, "index"].item() == int(over.top(1)[3, 1, 0])
    checks = Validation("", (Check("solver", "trust", "It converged."),)).to_pandas()
    assert checks.to_dict("records")[0]["verdict"] == "trust"


_NOTEBOOK = """
import nbformat
from nbclient import NotebookClient

cells = [
    "import torch, whence; from whence import progress; progress._CELL_EVERY = 0.0",
    "with progress.ticker('<b>solving', 3) as tick:\\n    for _ in range(3): tick()",
    "whence.Plan.from_spectrum(whence.Spectrum(whence.Estimate(9.0), whence.Estimate(9.0), whence.Estimate(8.0)), 1.0)",
]
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
updates = []

class Client(NotebookClient):
    def process_message(self, message, cell, index):
        if message["msg_type"] == "update_display_data":
            updates.append(message["content"]["data"]["text/html"])
        return super().process_message(message, cell, index)

Client(notebook, kernel_name="python3", timeout=120).execute()
_, bar, plan = notebook.cells
assert updates[0].startswith('&lt;b&gt;solving <progress max="3" value="1"></progress> 1 of 3, about'), updates
assert updates[-1] == ""
assert [output.data.get("text/html") for output in bar.outputs] == [""], bar.outputs
assert "LiSSA's plan" in plan.outputs[0].data["text/html"].replace("&#39;", "'")
"""


def test_a_notebook_shows_a_bar_and_a_card() -> None:
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", _NOTEBOOK], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
