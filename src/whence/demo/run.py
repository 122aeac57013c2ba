"""Running the demonstrations and telling what they found."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from whence.errors import OptionError
from whence.libraries import load_library
from whence.report.formatting import shorten

__all__ = ["run_demo"]

#: Columns of a terminal.
_WIDTH = 80


def run_demo(part: str, output: Path) -> None:
    """Run ``digits``, ``text`` or ``all``; write pages into ``output`` and print what was found."""
    if part not in ("digits", "text", "all"):
        raise OptionError(f"there is no demo {part!r}; say digits, text or all")
    for library in ("sklearn", "transformers"):
        load_library(library, "demo", "for the demonstrations")
    console = Console(highlight=False)
    parts = {"digits": _digits, "text": _text}
    pages = [show(console, output) for name, show in parts.items() if part in (name, "all")]
    console.rule("Pages")
    for page in pages:
        console.print(str(page.resolve()), soft_wrap=True)


def _digits(console: Console, output: Path) -> Path:
    from whence.demo.digits import attribute_digits

    console.rule("Digits: what made the model misread these, and which labels are wrong?")
    found = attribute_digits()
    flipped, result = found.digits.flipped, found.result
    page = result.to_html(output / "digits.html")
    console.print(
        f"A small network reads {found.accuracy:.1%} of {len(found.digits.test)} test digits. {int(flipped.sum())} of "
        f"its {len(flipped)} training labels were flipped, and it was not told which."
    )
    for q in range(min(3, len(result.queries))):
        exhibit = result.queries[q]
        console.print(
            f"\n[bold]{exhibit.id}[/]: a {exhibit.label}, read as {exhibit.prediction}. Most harmful:"
        )
        for row in result.top(3, query=q, harmful=True):
            shown = result.exhibits[row.index]
            note = f"  [red]{shown.note}[/]" if shown.note else ""
            console.print(
                f"  {shown.id:>10}, labelled {shown.label}: {row.score:7.1f} \\[{row.low:.1f}, {row.high:.1f}], "
                f"removal {row.effect:+.3f} nats{note}"
            )
    console.print(
        f"\nOver all {len(result.queries)} misread images together, the 10% most harmful training images hold "
        f"[bold]{found.found:.0%}[/] of the flipped labels (the 10% with the largest training loss: "
        f"{found.found_by_loss:.0%})."
    )
    return page


def _text(console: Console, output: Path) -> Path:
    from whence.demo.text import attribute_text

    console.rule("Text: where did this completion come from?")
    found = attribute_text()
    result = found.result
    page = result.to_html(output / "text.html")
    console.print(
        f"A two-layer Llama ({found.num_parameters:,} parameters) read Python's language reference: "
        f"{result.num_examples:,} passages of {found.num_topics} topics."
    )
    marks = {True: "[green]✓[/]", False: "[red]✗[/]"}
    for q, question in enumerate(found.questions):
        row = result.top(1, query=q)[0]
        passage = found.passages[row.index]
        console.print(f"\n{question.prompt}[bold]{question.completion}[/]")
        console.print(
            f"  {marks[found.right[q]]} influence    [bold]{passage.topic}[/]: {row.score:.3g} "
            f"\\[{row.low:.3g}, {row.high:.3g}], removal {row.effect:+.2g} nats"
        )
        console.print(f"    {shorten(passage.text, _WIDTH - 4)}", markup=False)
        best = int(result.gradient_dot_products[q].argmax())
        other = found.passages[best]
        console.print(f"  {marks[found.right_by_dot_product[q]]} dot product  {other.topic}")
        if best != row.index:
            console.print(f"    {shorten(other.text, _WIDTH - 4)}", markup=False)
    console.print(
        f"\nThe top passage is of the right topic for [bold]{sum(found.right)} of {len(found.right)}[/] questions; by "
        f"plain gradient dot product for {sum(found.right_by_dot_product)}."
    )
    return page
