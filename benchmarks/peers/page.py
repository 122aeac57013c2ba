"""`benchmarks/PEERS.md`, its figure, and README's table, written from what was measured.

    python -m benchmarks.peers.page

From `peers_damping.json` (`benchmarks.peers`), `interleaved.json` and `mislabels_peers.json`, all below
``benchmarks/results``. Nothing is measured, and no figure is written by hand.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.mislabels import LESS
from benchmarks.peers.__main__ import earlier, rival, seconds, verdict
from benchmarks.peers.ours import NAME as OURS
from benchmarks.peers.roster import ROSTER
from benchmarks.timing import RESULTS
from benchmarks.works import WORKS

__all__ = ["page", "readme"]

ROOT = Path(__file__).parents[2]
PAGE, README, FIGURE = ROOT / "benchmarks" / "PEERS.md", ROOT / "README.md", "peers"
#: What stands between these in README is written here.
BEGIN, END = "<!-- peers -->\n", "<!-- /peers -->\n"
#: README's columns, by work.
COLUMNS = {
    "digits": "digits MLP", "mnist": "MNIST MLP", "mnist-cnn": "MNIST CNN", "diabetes": "diabetes",
    "diamonds": "diamonds", "cancer": "breast cancer", "llama": "Llama",
}  # fmt: skip
#: What README calls settings.
SETTINGS = {"quick": "quick answer", "default": "defaults", "training": "`training=`", "best": "best of ten"}
#: README's rows: who, and at which setting.
ROWS = (
    (OURS, "quick"), (OURS, "default"), (OURS, "training"),
    ("kronfluence", "default"), ("kronfluence", "best"), ("bergson", "default"), ("dattri", "default"),
    ("dattri", "best"), ("dattri-lissa", "best"), ("pydvl", "best"), ("dattri-trak", "best"), ("captum", "default"),
    ("dot", "default"),
)  # fmt: skip
#: The works of the figure.
PANELS = ("digits", "mnist", "diabetes", "diamonds", "cancer", "mnist-cnn", "cifar10-cnn", "llama")

Results = Mapping[str, Mapping[str, Any]]


def main() -> None:
    results = earlier()
    draw(results)
    PAGE.write_text(page(results), encoding="utf-8")
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    README.write_text(before + readme(results) + rest.split(END)[1], encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}, benchmarks/results/{FIGURE}.png, README.md")


def words(peer: str) -> str:
    """What tables call a contender."""
    return "whence" if peer == OURS else ROSTER[peer].words


def found(results: Results, peer: str, work: str, setting: str) -> dict[str, Any] | None:
    """What was measured at a setting, or at the "best" of the grid; None where nothing was."""
    result = results.get(peer, {}).get(work)
    if result is None:
        return None
    known: dict[str, Any] | None = result["best"] if setting == "best" else result["settings"].get(setting)
    return known


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def emphasised(values: Sequence[float | None], cells: Sequence[str]) -> list[str]:
    """Cells with the highest value in bold, and all that look like it."""
    top = max((round(value, 3) for value in values if value is not None), default=None)
    return [
        f"**{cell}**" if value is not None and round(value, 3) == top else cell
        for value, cell in zip(values, cells, strict=True)
    ]


# --- README ------------------------------------------------------------------------------------------------------


def readme(results: Results) -> str:
    """What stands in README, its markers included."""
    works = [work for work in COLUMNS if work in results[OURS]]
    values = [[_lds(found(results, peer, work, setting)) for work in works] for peer, setting in ROWS]
    cells = [["" if v is None else f"{v:.3f}" for v in row] for row in values]
    columns = [emphasised(*column) for column in zip(_turned(values), _turned(cells), strict=True)]
    rows = [
        (f"{words(peer)}, {SETTINGS[setting]}" if peer not in ("dot", "captum") else words(peer), *row)
        for (peer, setting), row in zip(ROWS, _turned(columns), strict=True)
        if any(row)
    ]
    spent = {
        said: statistics.median(
            seconds(results[peer][work], setting) for work in works if found(results, peer, work, setting)
        )
        for said, peer, setting in (
            ("whence's quick answer", OURS, "quick"),
            ("its defaults", OURS, "default"),
            ("Kronfluence", "kronfluence", "default"),
        )
    }
    costs = ", ".join(f"{said} {value:.2g} s" for said, value in spent.items())
    said = f"Seconds of one core, medians over these works: {costs}."
    return f"{BEGIN}{table(('', *(COLUMNS[work] for work in works)), rows)}\n{said}\n{END}"


def _lds(known: dict[str, Any] | None) -> float | None:
    return None if known is None else known["lds"]


def _turned(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


# --- the page ----------------------------------------------------------------------------------------------------

HOW = """\
Written by `python -m benchmarks.peers.page`. Every number comes from a file in `benchmarks/results`; `make peers`
asks the peers, each in an environment of its own, and judges their answers.

**How.** Every work is a model trained on real data (`benchmarks/works.py`). All contenders get the same trained
model, training data and queries. LDS, the linear datamodeling score, is the rank correlation of what the scores
predict with what retraining on random halves of the data did (`benchmarks/results/truth`): 1 is best, and the
ceiling is what the noise of the retraining leaves. ± is half of a 95% interval from resampled halves and queries.
Seconds are of one core, from the trained model to the scores, imports apart; peers were asked while other jobs ran
beside, so a tenth more or less means nothing.

**What favours whom.** whence's damping and budget were chosen while looking at these works, the peers' defaults
were not. "Best of ten" is picked for every work by the retraining itself, which no user has: it favours the peer.
Captum is given five checkpoints of the training, all others the trained model. Adapters are in `benchmarks/peers`;
each says what settings it uses and why, and with `--check` compares its peer with dense algebra on a tiny problem.
"""


LEFT_OUT = """\
- **dattri's EK-FAC** is not EK-FAC: it multiplies by transposes of the matrices of eigenvectors and confuses the
  places of weights and biases. `python -m benchmarks.peers.dattri --check` prints how far it is from EK-FAC written
  out densely.
- **Bergson's LiSSA** takes one query after the other and, at its defaults, 25,000 products of 16 passages for each.
- **Averages over many models**, as TRAK is meant to be used: all contenders have one trained model.
"""


def page(results: Results) -> str:
    """The whole of `benchmarks/PEERS.md`."""
    peers = [peer for peer in ROSTER if peer in results]
    works = [work for work in WORKS if work in results[OURS]]
    parts = [
        "# Beside others, work by work\n",
        HOW,
        "## Is whence above?\n",
        _summary(results, peers, works),
        "## LDS at defaults\n",
        _all(
            results,
            [(OURS, "quick"), (OURS, "default"), (OURS, "training"), *_defaults(results, peers)],
            works,
        ),
        "## LDS at the best of ten dampings\n",
        _all(
            results, [(OURS, "default"), *((peer, "best") for peer in peers if _grid(results, peer))], works
        ),
        _grids(results, peers),
        "## Seconds\n",
        _seconds(results, [(OURS, "quick"), (OURS, "default"), *((peer, "first") for peer in peers)], works),
        f"![LDS against seconds of one core](results/{FIGURE}.png)\n",
        _interleaved(),
        _mislabels(),
        "## What each does better\n",
        "".join(f"- **{ROSTER[peer].words}.** {ROSTER[peer].better}\n" for peer in peers),
        "## Left out\n",
        _unasked(results) + LEFT_OUT,
    ]
    return "\n".join(part for part in parts if part)


def _unasked(results: Results) -> str:
    """Peers that have an adapter and no results."""
    unasked = [entry.words for peer, entry in ROSTER.items() if peer not in results]
    return (
        f"- **{', '.join(unasked)}**: the adapter is there, and no work was asked yet.\n" if unasked else ""
    )


def _grid(results: Results, peer: str) -> bool:
    return any(result["grid"] for result in results[peer].values())


def _defaults(results: Results, peers: Sequence[str]) -> list[tuple[str, str]]:
    return [(peer, "default") for peer in peers if any(each["settings"] for each in results[peer].values())]


def _summary(results: Results, peers: Sequence[str], works: Sequence[str]) -> str:
    """On how many works our defaults are above a peer, at its defaults and at its best."""
    rows = []
    for peer in peers:
        cells, below = [], []
        for setting in ("default", None):
            counts = Counter[str]()
            for work in works:
                result = results[peer].get(work)
                if result is None or not result.get("ours"):
                    continue
                at = setting or rival(result)
                if setting is None or setting in result["settings"]:
                    less = result["ours"]["default"]["less"].get(at)
                    counts[verdict(less)] += 1
                    if setting is None and verdict(less) == "BELOW":
                        assert less is not None
                        below.append(f"{work} ({less['by']:+.3f}, {less['low']:+.3f} to {less['high']:+.3f})")
            said = " / ".join(str(counts[each]) for each in ("above", "undecided", "BELOW"))
            cells.append(said if counts.total() else "")
        rows.append((words(peer), *cells, ", ".join(below)))
    return (
        "whence's defaults less the peer's LDS, on the same resamples of halves and queries. Works on which the 95% "
        "interval of the difference is above zero / undecided / below; a peer whose scores are no numbers counts as "
        "below us; its best is of its own settings and of the grid.\n\n"
        + table(("", "at its defaults", "at its best", "where whence is below its best"), rows)
    )


def _all(results: Results, contenders: Sequence[tuple[str, str]], works: Sequence[str]) -> str:
    rows = []
    for work in works:
        known = [found(results, peer, work, setting) for peer, setting in contenders]
        ceiling = next(each["ceiling"] for each in known if each is not None and each["ceiling"] is not None)
        cells = emphasised([_lds(each) for each in known], [_cell(each) for each in known])
        rows.append((WORKS[work].about, *cells, f"{ceiling:.2f}"))
    head = [f"whence, {SETTINGS[setting]}" if peer == OURS else words(peer) for peer, setting in contenders]
    return table(("", *head, "ceiling"), rows)


def _cell(known: dict[str, Any] | None) -> str:
    if known is None:
        return ""
    if known["lds"] is None:
        return "no number"
    return f"{known['lds']:.3f} ± {(known['high'] - known['low']) / 2:.2f}"


def _grids(results: Results, peers: Sequence[str]) -> str:
    said = []
    for peer in peers:
        grid = next((result["grid"] for result in results[peer].values() if result["grid"]), None)
        if grid is not None:
            unit = next(iter(results[peer].values()))["unit"]
            said.append(
                f"{words(peer)}: {grid[0]['multiple']:g} to {grid[-1]['multiple']:.4g} times the {unit}"
            )
    return "Ten dampings evenly spaced in their logarithm. " + "; ".join(said) + ".\n"


def _seconds(results: Results, contenders: Sequence[tuple[str, str]], works: Sequence[str]) -> str:
    rows = []
    for work in works:
        cells = []
        for peer, setting in contenders:
            result = results[peer].get(work)
            at = None if setting == "first" else setting
            cells.append("" if result is None else f"{seconds(result, at):.2g}")
        rows.append((WORKS[work].about, *cells))
    head = [f"whence, {SETTINGS[setting]}" if peer == OURS else words(peer) for peer, setting in contenders]
    return table(("", *head), rows)


def _interleaved() -> str:
    """Seconds and memory where contenders took turns."""
    path = RESULTS / "interleaved.json"
    if not path.exists():
        return ""
    measured = json.loads(path.read_text(encoding="utf-8"))["results"]
    rows = [
        (
            WORKS[work].about,
            who if who not in ROSTER else words(who),
            f"{each['lds']:.3f}",
            f"{each['cpu_seconds']['median']:.2g}",
            f"{each['memory_mb']['median']:.0f}",
        )
        for work, result in measured.items()
        for who, each in result["contenders"].items()
    ]
    return (
        "**In turn**, every job a fresh process (`python -m benchmarks.peers.interleaved`): medians over rounds. "
        "Memory is the peak above what the process held with everything imported, model and data loaded.\n\n"
        + table(("", "", "LDS", "CPU s", "MB"), rows)
    )


def _mislabels() -> str:
    """Flipped labels found by every contender's self-influence."""
    path = RESULTS / "mislabels_peers.json"
    if not path.exists():
        return ""
    measured = json.loads(path.read_text(encoding="utf-8"))["results"]
    columns = ("10% inspected", "20% inspected", LESS, "area", "CPU s")
    rows = [
        (name, *(f"{each[c]['value']:.3f} ± {each[c]['stderr']:.3f}" if c in each else "" for c in columns))
        for name, each in measured["found"].items()
    ]
    return (
        "## Wrong labels\n\n"
        "Digits with one label in ten flipped: the share of these among the examples that look most suspicious by "
        "their self-influence, peers at their defaults (pyDVL in the middle of its grid), loss and gradient norm; "
        f"means over {measured['seeds']} seeds with standard errors. The best possible area is 0.95; "
        f"“{LESS}” is of the same seeds, and positive where whence finds more. "
        "`python -m benchmarks.mislabels peers`.\n\n" + table(("", *columns), rows)
    )


# --- the figure --------------------------------------------------------------------------------------------------


def draw(results: Results) -> None:
    """LDS against seconds, a panel for each work."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    works = [work for work in PANELS if work in results[OURS]]
    lines = -(-len(works) // 4)
    figure, axes = plt.subplots(lines, 4, figsize=(14, 3.2 * lines + 0.7), squeeze=False)
    handles: dict[str, Any] = {}
    for axis in axes.flat[len(works) :]:
        axis.set_axis_off()
    for axis, work in zip(axes.flat, works, strict=False):
        for number, peer in enumerate((OURS, *(peer for peer in ROSTER if peer in results))):
            result = results[peer].get(work)
            if result is None:
                continue
            shown = ("quick", "default") if peer == OURS else (*list(result["settings"])[:1], "best")
            for setting in shown:
                known = found(results, peer, work, setting)
                if known is None or known["lds"] is None:
                    continue
                spent = seconds(
                    {**result, "settings": {**result["settings"], "best": result["best"]}}, setting
                )
                best = setting == "best"
                label = f"{words(peer)}, {SETTINGS[setting]}" if peer == OURS else words(peer)
                colour = ("0.5", "black")[setting == "default"] if peer == OURS else f"C{number % 10}"
                handles[label] = axis.errorbar(
                    spent,
                    known["lds"],
                    yerr=[[known["lds"] - known["low"]], [known["high"] - known["lds"]]],
                    fmt="*" if peer == OURS else "osD^v<>pPXhd"[number - 1],
                    ms=9 if peer == OURS else 5,
                    mfc="none" if best else colour,
                    color=colour,
                    elinewidth=0.8,
                    label=label,
                )
        axis.set_xscale("log")
        axis.set_title(WORKS[work].about, fontsize=8)
        axis.tick_params(labelsize=7)
    figure.legend(handles.values(), handles.keys(), fontsize=7, ncol=5, loc="lower center")
    figure.supxlabel(
        "seconds of one core, from the trained model to the scores (open: at the best of ten dampings)",
        fontsize=8,
        y=0.09,
    )
    figure.supylabel("LDS", fontsize=9)
    figure.tight_layout(rect=(0.01, 0.11, 1, 1))
    for ending in ("png", "svg"):
        figure.savefig(RESULTS / f"{FIGURE}.{ending}", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
