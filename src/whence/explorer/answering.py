"""`Answering`: a model with its training data, asked one question after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from whence.attribution import attribute
from whence.attribution.result import Attribution
from whence.errors import OptionError
from whence.explorer.answers import Kept, KeptAnswer
from whence.explorer.completing import complete
from whence.explorer.questions import Question
from whence.index import Index
from whence.options import Options
from whence.sources import RowList, language_queries
from whence.tasks import LanguageModeling, Task

__all__ = ["Answering", "Asked", "ByIndex", "BySolving", "Way"]


@dataclass(frozen=True)
class Asked:
    """An answer to one question, as good as its stage is.

    Attributes:
        stage: in a word or two, for the page.
        result: of one query.
        estimates, stderr: of all training examples, ``[1, train]``, where there are more than the result has.
    """

    stage: str
    result: Attribution
    estimates: Tensor | None = None
    stderr: Tensor | None = None


class Way(Protocol):
    """How questions are answered: each next answer is better than the one before."""

    def stages(self, queries: Any, title: str) -> Iterator[Asked]: ...


@dataclass(frozen=True)
class BySolving:
    """Without an index: the quick answer of `whence.attribute`, then what it gives by default.

    Attributes:
        model, train, task, params, class_names, training: as of `whence.attribute`.
        options: of every answer.
    """

    model: nn.Module
    train: Any
    task: Task
    options: Options
    params: Any = None
    class_names: Sequence[str] | None = None
    training: Any = None

    def stages(self, queries: Any, title: str) -> Iterator[Asked]:
        """A quick answer, and one as exact as pays; one alone where the first is exact already."""
        quick = self._attribute(queries, title, "quick")
        if quick.solve.solver != "ekfac":
            yield Asked("solved", quick)
            return
        yield Asked("quick answer", quick)
        better = self._attribute(queries, title, self.options.accuracy)
        if better.solve.solver != "ekfac":
            yield Asked("refined", better)

    def _attribute(self, queries: Any, title: str, accuracy: Any) -> Attribution:
        return attribute(
            self.model,
            self.train,
            queries,
            task=self.task,
            params=self.params,
            class_names=self.class_names,
            training=self.training,
            options=replace(self.options, accuracy=accuracy, title=title),
        )


@dataclass(frozen=True)
class ByIndex:
    """From an index: what its estimates and a few examples say at once, then with more of them scored again.

    Attributes:
        index: that was made of the model and its data.
        first, then: examples scored again for the first answer, and for the second.
    """

    index: Index
    first: int = 60
    then: int = 600

    def stages(self, queries: Any, title: str) -> Iterator[Asked]:
        """Two answers, or one where few examples are all there are."""
        for stage, rescored in (("first answer", self.first), ("refined", self.then)):
            found = self.index.ask(queries, rescored=rescored, title=title)
            yield Asked(stage, found.result, found.estimates, found.stderr)
            if rescored >= found.estimates.shape[1]:
                return


class Answering:
    """What the explorer's page asks of a model.

    Args:
        way: how questions are answered.
        model, task, train: what is asked about.
        queries: to choose from, as of a test set; none by default.
        tokenizer: of a language model: without one, texts cannot be asked about.
        context: tokens that the model reads at most.
    """

    def __init__(
        self,
        way: Way,
        *,
        model: nn.Module,
        task: Task,
        train: Any,
        queries: Any = (),
        tokenizer: Any = None,
        context: int | None = None,
    ) -> None:
        self.way, self.model, self.task, self.train = way, model, task, train
        self.queries, self.tokenizer, self.context = queries, tokenizer, context
        self.kept = Kept()

    @property
    def reads_text(self) -> bool:
        """Whether prompts and completions can be asked about."""
        return self.tokenizer is not None and isinstance(self.task, LanguageModeling)

    def question(self, said: Any) -> Question:
        """A question as it was sent."""
        return Question.read(said, queries=len(self.queries), examples=len(self.train))

    def complete(self, prompt: str, limit: int) -> Iterator[str]:
        """The model's own completion, piece by piece."""
        self._read_text()
        return complete(self.model, self.tokenizer, prompt, limit=limit, context=self.context)

    def ask(self, question: Question) -> Iterator[KeptAnswer]:
        """Answers, each better than the one before, kept under one number."""
        queries, number = self._queries(question), self.kept.number()
        for asked in self.way.stages(queries, question.title):
            answer = KeptAnswer(number, question, asked.stage, asked.result, asked.estimates, asked.stderr)
            self.kept.keep(answer)
            yield answer

    def _queries(self, question: Question) -> Any:
        if question.query is not None:
            return _One(self.queries, question.query)
        if question.example is not None:
            return _One(self.train, question.example)
        self._read_text()
        assert isinstance(self.task, LanguageModeling)
        rows = RowList([question.row()], name="question")
        return language_queries(rows, self.tokenizer, self.task, max_length=self.context)

    def _read_text(self) -> None:
        if not self.reads_text:
            raise OptionError(
                "texts can be asked about where there is a language model with a tokenizer, and this is "
                f"{type(self.task).__name__}; "
                "choose a query or a training example by its number"
            )


class _One(Sequence[Any]):
    """One example of a data set, shown as the data set shows it."""

    def __init__(self, data: Any, position: int) -> None:
        self._data, self._position = data, position
        if callable(getattr(data, "exhibit", None)):
            self.exhibit = self._exhibit

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        if index not in (0, -1):
            raise IndexError(index)
        return self._data[self._position]

    def _exhibit(self, index: int) -> Any:
        return self._data.exhibit(self._position)
