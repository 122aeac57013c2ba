"""Figures in one style, drawn the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from whence.libraries import load_library

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "figure", "save_figure"]

#: Distinguishable to colour-blind readers, and in this order also by lightness (Okabe and Ito's palette).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")

_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 10,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "figure.titlesize": 12,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters on every machine
    "font.size": 10,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.framealpha": 0.85,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "savefig.dpi": 150,
    "svg.fonttype": "path",
    "svg.hashsalt": "whence",  # the ids inside an SVG are random without it
}


@contextmanager
def figure(
    rows: int = 1, columns: int = 1, *, width: float = 5.0, height: float = 3.8
) -> Iterator[tuple[Figure, list[Axes]]]:
    """An empty figure in the one style of all figures, and its panels row by row, each so many inches large.

    What is drawn inside the ``with`` has the style, too. No window, no global state: the figure is drawn by Agg,
    whatever the machine has.
    """
    matplotlib = load_library("matplotlib", "plot", "to draw the figures")
    figures = load_library("matplotlib.figure", "plot", "to draw the figures")
    agg = load_library("matplotlib.backends.backend_agg", "plot", "to draw the figures")
    with matplotlib.rc_context({**_STYLE, "axes.prop_cycle": matplotlib.cycler(color=COLOURS)}):
        drawn = figures.Figure(figsize=(width * columns, height * rows))
        agg.FigureCanvasAgg(drawn)
        yield drawn, list(drawn.subplots(rows, columns, squeeze=False).flat)


def save_figure(path: Path, drawn: Figure, *, kind: Literal["svg", "png"]) -> None:
    """Write a figure. The same one is the same file: no date, and ids that depend on what is drawn alone."""
    matplotlib = load_library("matplotlib", "plot", "to draw the figures")
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context(_STYLE):
        drawn.savefig(path, format=kind, metadata=metadata)
