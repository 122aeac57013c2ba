"""`Job`: the model, the data and the queries that a command line names, loaded and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from whence.errors import OptionError
from whence.model.gauss_newton import GaussNewton
from whence.sources import (
    ClassifiedTexts,
    Examples,
    Labels,
    ListedExamples,
    Passages,
    Problem,
    RowList,
    language_queries,
    load_model,
    open_images,
    open_records,
)
from whence.sources.candidates import Shortlist, bm25, from_ids, tfidf
from whence.tasks import Classification, LanguageModeling, Task

__all__ = ["Job", "JobOptions"]

_DEFAULT_PASSAGE = 512


@dataclass(frozen=True)
class JobOptions:
    """What the command line says about model and data; the options' help explains each."""

    model: str
    train: str | None = None
    queries: str | None = None
    prompt: str | None = None
    completion: str | None = None
    task: str | None = None
    params: list[str] = field(default_factory=list)
    product: str = "auto"
    micro_batch: int | None = None
    dtype: str = "float32"
    tokenizer: str | None = None
    max_length: int | None = None
    truncate: bool = False
    skip_empty: bool = False
    text_field: str | None = None
    label_field: str = "label"
    split: str | None = None
    encoding: str = "utf-8"
    image_mode: str | None = None
    transform: str | None = None
    allow_download: bool = False
    check_vocabulary: bool = True
    seed: int = 0

    def as_json(self) -> dict[str, Any]:
        """For repeating the command."""
        return asdict(self)


class Job:
    """Loads what the options name, when it is asked for."""

    def __init__(self, options: JobOptions) -> None:
        self.options = options

    @cached_property
    def problem(self) -> Problem:
        """The model and what comes with it."""
        options = self.options
        return load_model(
            options.model,
            dtype=options.dtype,
            tokenizer=options.tokenizer,
            allow_download=options.allow_download,
            check_vocabulary=options.check_vocabulary,
        )

    @cached_property
    def task(self) -> Task:
        """What the outputs mean: from the model, or as the options say."""
        named = {"classification": Classification, "language-modeling": LanguageModeling}
        if self.options.task is not None:
            if self.options.task not in named:
                raise OptionError(f"--task is {self.options.task!r}; it must be one of {', '.join(named)}")
            return named[self.options.task]()
        if self.problem.task is None:
            raise OptionError(
                "what the model's outputs mean cannot be told; say --task classification or language-modeling, or "
                "have the function return a whence.sources.Problem with a task"
            )
        return self.problem.task

    @cached_property
    def train(self) -> Examples:
        """The training data."""
        options, problem = self.options, self.problem
        if options.train is None:
            if problem.train is None:
                raise OptionError("there are no training data; name them with --train")
            return _listed(problem.train, problem.train_exhibits, "train")
        if isinstance(self.task, LanguageModeling):
            return Passages(
                self._records(options.train),
                self._tokenizer(),
                max_length=self._length(),
                text_field=options.text_field,
                truncate=options.truncate,
                skip_empty=options.skip_empty,
            )
        return self._classified(options.train, problem.labels)

    @cached_property
    def queries(self) -> Examples:
        """The queries."""
        options, problem = self.options, self.problem
        if options.prompt is not None or options.completion is not None:
            return self._typed_query()
        if options.queries is None:
            if problem.queries is None:
                raise OptionError(
                    "there is no question; name a file with --queries, or give --prompt and --completion"
                )
            return _listed(problem.queries, problem.query_exhibits, "queries")
        if isinstance(self.task, LanguageModeling):
            records = self._records(options.queries)
            return language_queries(
                records,
                self._tokenizer(),
                self.task,
                max_length=problem.context,
                text_field=options.text_field,
            )
        return self._classified(options.queries, getattr(self.train, "labels", None) or problem.labels)

    def operator(self) -> GaussNewton:
        """The Gauss-Newton Hessian over the training data."""
        options = self.options
        return GaussNewton(
            self.problem.model,
            self.task,
            self.train,
            params=options.params or None,
            product=options.product,  # type: ignore[arg-type]  # checked there
            micro_batch=options.micro_batch,
        )

    @property
    def class_names(self) -> Sequence[str] | None:
        """Labels in words."""
        labels = getattr(self.train, "labels", None) or self.problem.labels
        return None if labels is None else labels.names

    def candidates(self, spec: str | None) -> Shortlist | None:
        """``bm25:K``, ``tfidf:K``, or a file of ids."""
        if spec is None:
            return None
        method, _, number = spec.partition(":")
        if method not in ("bm25", "tfidf"):
            return from_ids(Path(spec), self.train)
        if not number.isdigit() or int(number) < 1:
            raise OptionError(f"--candidates is {spec!r}; say how many for each query, as in {method}:1000")
        queries = [
            " ".join(filter(None, (exhibit.prompt, exhibit.text)))
            for exhibit in map(self.queries.exhibit, range(len(self.queries)))
        ]
        search = bm25 if method == "bm25" else tfidf
        return search(self.train.texts(), queries, int(number))

    # --- helpers -----------------------------------------------------------------------------------------

    def _records(self, path: str) -> Any:
        return open_records(path, split=self.options.split, encoding=self.options.encoding)

    def _tokenizer(self) -> Any:
        if self.problem.tokenizer is None:
            raise OptionError("reading text needs a tokenizer; name its directory with --tokenizer")
        return self.problem.tokenizer

    def _length(self) -> int:
        asked, context = self.options.max_length, self.problem.context
        if asked is not None and context is not None and asked > context:
            raise OptionError(f"--max-length is {asked}, the model's context holds {context} tokens")
        return asked or min(context or _DEFAULT_PASSAGE, _DEFAULT_PASSAGE)

    def _typed_query(self) -> Examples:
        options = self.options
        if options.queries is not None:
            raise OptionError("give either --queries or --prompt and --completion, not both")
        if options.prompt is None or options.completion is None:
            raise OptionError("a question needs both --prompt and --completion")
        if not isinstance(self.task, LanguageModeling):
            raise OptionError("--prompt and --completion are for language models; use --queries")
        rows = RowList([{"prompt": options.prompt, "completion": options.completion}], name="question")
        return language_queries(rows, self._tokenizer(), self.task, max_length=self.problem.context)

    def _classified(self, path: str, labels: Labels | None) -> Examples:
        options, problem = self.options, self.problem
        if problem.kind == "text-classifier":
            found: Any = ClassifiedTexts(
                self._records(path),
                self._tokenizer(),
                labels=labels,
                text_field=options.text_field or "text",
                label_field=options.label_field,
                max_length=self._length(),
                truncate=options.truncate,
            )
        else:
            transform = options.transform or (
                problem.directory if problem.kind == "image-classifier" else None
            )
            found = open_images(
                path,
                transform=transform,
                mode=options.image_mode,
                labels=labels,
                split=options.split,
                label_field=options.label_field,
            )
        if problem.num_labels is not None:
            found.labels.check_outputs(problem.num_labels, found.name)
        return found  # type: ignore[no-any-return]


def _listed(data: Any, exhibits: Any, name: str) -> Examples:
    return data if isinstance(data, Examples) else ListedExamples(data, name=name, exhibits=exhibits)
