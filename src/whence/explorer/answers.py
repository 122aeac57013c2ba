"""`Kept`: the answers of a session, to go back to, to compare and to take along."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from whence.attribution.page import SHOWN, render
from whence.attribution.result import Attribution
from whence.cleaning.result import safe_cell
from whence.errors import OptionError
from whence.explorer.questions import Question
from whence.report.formatting import brief
from whence.report.untrusted import visible

__all__ = ["Kept", "KeptAnswer"]

_MOST = 100


@dataclass(frozen=True)
class KeptAnswer:
    """An answer with its question.

    Attributes:
        number: in the order of asking.
        stage: how good it is, in words.
        estimates, stderr: scores of all training examples; None where only those of the result are known.
    """

    number: int
    question: Question
    stage: str
    result: Attribution
    estimates: Tensor | None = None
    stderr: Tensor | None = None

    def about(self) -> dict[str, Any]:
        """What the page lists of it."""
        loss = float(self.result.query_losses.mean())
        seconds = sum(self.result.seconds.values())
        return {
            "number": self.number,
            "title": visible(self.question.title),
            "stage": self.stage,
            "loss": brief(loss, 3),
            "seconds": round(seconds, 2),
            "doubts": [visible(doubt) for doubt in self.result.doubts],
        }

    def page(self) -> str:
        """The page to send to a colleague."""
        return render(self.result)

    def table(self) -> str:
        """All scored examples as CSV, best first; cells that a spreadsheet would take for a formula are guarded."""
        text = io.StringIO(newline="")
        rows = [asdict(row) for row in self.result.top(len(self.result.indices))]
        ids = {index: shown.id for index, shown in self.result.exhibits.items()}
        table = csv.DictWriter(text, ["id", *rows[0]])
        table.writeheader()
        for row in rows:
            row["id"] = ids.get(row["index"])
            table.writerow({name: safe_cell(value) for name, value in row.items()})
        return text.getvalue()

    def viewer_lines(self) -> str:
        """JSONL that viewers of training-data attribution read: texts, ids and scores of both ends, a line a query."""
        return "".join(self._viewer_line(query) for query in range(len(self.result.query_losses)))

    def _viewer_line(self, query: int) -> str:
        asked = self.result.queries[query]
        said: dict[str, Any] = {
            "inputs_plaintext": asked.prompt or asked.id or self.question.title,
            "targets_plaintext": asked.text or "",
        }
        for name, harmful in (("proponent", False), ("opponent", True)):
            rows = self.result.top(SHOWN, query=query, harmful=harmful)
            shown = [self.result.exhibits.get(row.index) for row in rows]
            said[f"{name}s"] = ["" if x is None else f"{x.prompt or ''}{x.text or ''}" for x in shown]
            said[f"{name}_ids"] = [
                str(row.index) if x is None or x.id is None else x.id
                for row, x in zip(rows, shown, strict=True)
            ]
            said[f"{name}_scores"] = [row.score for row in rows]
        return json.dumps(said) + "\n"

    def of_example(self, index: int) -> list[dict[str, Any]]:
        """The scores that a training example has here, for every query; none where they are not known."""
        queries = range(len(self.result.query_losses))
        return [told for query in queries if (told := self._of_example(query, index)) is not None]

    def _of_example(self, query: int, index: int) -> dict[str, Any] | None:
        there = (self.result.indices == index).nonzero()
        if len(there):
            row = self.result.row(query, index)
            score, low, high = row.score, row.low, row.high
        elif self.estimates is not None and self.stderr is not None:
            score, error = float(self.estimates[query, index]), 1.96 * float(self.stderr[query, index])
            low, high = score - error, score + error
        else:
            return None
        asked = self.result.queries[query].id
        which = f" ({visible(asked)})" if asked and len(self.result.query_losses) > 1 else ""
        about = self.about()
        return {
            **about,
            "title": about["title"] + which,
            "score": brief(score, 3),
            "interval": f"{brief(low, 3)} to {brief(high, 3)}",
            "value": score,
            "estimated": not len(there),
        }


@dataclass
class Kept:
    """The answers of a session, the latest hundred of them."""

    answers: dict[int, KeptAnswer] = field(default_factory=dict)
    count: int = 0

    def number(self) -> int:
        """Of the next question."""
        self.count += 1
        return self.count

    def keep(self, answer: KeptAnswer) -> None:
        """In place of an earlier answer to the same question, if there is one."""
        self.answers[answer.number] = answer
        while len(self.answers) > _MOST:
            del self.answers[min(self.answers)]

    def of(self, number: int) -> KeptAnswer:
        """An answer.

        Raises:
            OptionError: there is none of this number.
        """
        if number not in self.answers:
            raise OptionError(f"there is no answer {number}; it was forgotten, or never given")
        return self.answers[number]

    def about(self) -> list[dict[str, Any]]:
        """All of them, the latest first."""
        return [self.answers[number].about() for number in sorted(self.answers, reverse=True)]

    def of_example(self, index: int) -> list[dict[str, Any]]:
        """What a training example did to every question, the strongest first."""
        found = [told for answer in self.answers.values() for told in answer.of_example(index)]
        return sorted(found, key=lambda told: -abs(told["value"]))
