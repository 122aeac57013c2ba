"""`Answering`: a model with its training data, asked one question after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from whence.attribution import attribute
from whence.attribution.exhibits import describer
from whence.attribution.result import Attribution
from whence.errors import OptionError
from whence.exhibit import Exhibit
from whence.explorer.answers import Kept, KeptAnswer
from whence.explorer.completing import complete
from whence.explorer.questions import Question
from whence.index import Index
from whence.options import Options
from whence.sources import RowList, language_queries
from whence.tasks import LanguageModeling, Questions, Task

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
        first = replace(self.options, accuracy="quick", solver="auto", until=None, budget="auto")
        quick = self._attribute(queries, title, first)
        if quick.solve.solver != "ekfac":
            yield Asked("solved", quick)
            return
        yield Asked("quick answer", quick)
        better = self._attribute(queries, title, self.options)
        if better.solve.solver != "ekfac":
            yield Asked("refined", better)

    def _attribute(self, queries: Any, title: str, options: Options) -> Attribution:
        return attribute(
            self.model,
            self.train,
            queries,
            task=self.task,
            params=self.params,
            class_names=self.class_names,
            training=self.training,
            options=replace(options, title=title),
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
        queries: to choose from, or `whence.Questions`; none by default.
        tokenizer: of a language model: without one, texts cannot be asked about.
        context: tokens that the model reads at most.
        class_names: labels in words.
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
        class_names: Sequence[str] | None = None,
    ) -> None:
        self.way, self.model, self.task, self.train = way, model, task, train
        self.queries, self.tokenizer, self.context = Questions.of(queries), tokenizer, context
        self.class_names = class_names
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
            return self._as_asked(question.query)
        if question.example is not None:
            return self._some(self.train, (question.example,))
        self._read_text()
        assert isinstance(self.task, LanguageModeling)
        rows = RowList([question.row()], name="question")
        return language_queries(rows, self.tokenizer, self.task, max_length=self.context)

    def _as_asked(self, number: int) -> Questions:
        """One of the queries, with all that is asked of it: its contrast, its group, its measure."""
        asked = self.queries
        members, group = asked.members[number], asked.group(number)
        return Questions(
            self._some(asked.queries, members),
            contrast=None if asked.contrast is None else [asked.contrast[position] for position in members],
            groups=None if group is None else [group] * len(members),
            measure=asked.measure,
            reduce=asked.reduce,
        )

    def _some(self, data: Any, positions: Sequence[int]) -> _Some:
        return _Some(data, positions, describer(data, None, self.tokenizer, self.class_names))

    def _read_text(self) -> None:
        if not self.reads_text:
            raise OptionError(
                "texts can be asked about where there is a language model with a tokenizer, and this is "
                f"{type(self.task).__name__}; "
                "choose a query or a training example by its number"
            )


class _Some(Sequence[Any]):
    """Some examples of a data set, under the names that they have there."""

    def __init__(self, data: Any, positions: Sequence[int], show: Callable[[int], Exhibit]) -> None:
        self._data, self._positions, self._show = data, positions, show

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: Any) -> Any:
        return self._data[self._positions[index]]

    def exhibit(self, index: int) -> Exhibit:
        """What is shown of an example."""
        shown = self._show(self._positions[index])
        return shown if shown.id is not None else replace(shown, id=str(self._positions[index]))
