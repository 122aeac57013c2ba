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
        loss = float(self.result.query_losses[0])
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
        rows = [asdict(row) for row in self.result.top(len(self.result.indices), query=0)]
        ids = {index: shown.id for index, shown in self.result.exhibits.items()}
        table = csv.DictWriter(text, ["id", *rows[0]])
        table.writeheader()
        for row in rows:
            row["id"] = ids.get(row["index"])
            table.writerow({name: safe_cell(value) for name, value in row.items()})
        return text.getvalue()

    def viewer_line(self) -> str:
        """One line of the JSONL that viewers of training-data attribution read: texts, ids and scores of both ends."""
        said: dict[str, Any] = {
            "inputs_plaintext": self.question.prompt if self.question.of_text else self.question.title,
            "targets_plaintext": self.question.completion,
        }
        for name, harmful in (("proponent", False), ("opponent", True)):
            rows = self.result.top(SHOWN, query=0, harmful=harmful)
            shown = [self.result.exhibits.get(row.index) for row in rows]
            said[f"{name}s"] = ["" if x is None else f"{x.prompt or ''}{x.text or ''}" for x in shown]
            said[f"{name}_ids"] = [
                str(row.index) if x is None or x.id is None else x.id
                for row, x in zip(rows, shown, strict=True)
            ]
            said[f"{name}_scores"] = [row.score for row in rows]
        return json.dumps(said) + "\n"

    def of_example(self, index: int) -> dict[str, Any] | None:
        """The score that a training example has here; None where it is not known."""
        there = (self.result.indices == index).nonzero()
        if len(there):
            row = self.result.row(0, index)
            score, low, high = row.score, row.low, row.high
        elif self.estimates is not None and self.stderr is not None:
            score, error = float(self.estimates[0, index]), 1.96 * float(self.stderr[0, index])
            low, high = score - error, score + error
        else:
            return None
        return {
            **self.about(),
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
        found = [told for answer in self.answers.values() if (told := answer.of_example(index)) is not None]
        return sorted(found, key=lambda told: -abs(told["value"]))
