"""`Inputs`: the model, the data and the queries that a command line names, loaded and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from whence.distributed import shard
from whence.errors import OptionError, RunDirectoryError
from whence.model.gauss_newton import GaussNewton
from whence.options import MeasureOptions, Options, option
from whence.runs import holds, read
from whence.sources import (
    ClassifiedTexts,
    Examples,
    Labels,
    ListedExamples,
    Passages,
    Problem,
    Records,
    RowList,
    language_queries,
    load_model,
    open_images,
    open_records,
)
from whence.sources.candidates import Shortlist, bm25, from_ids, tfidf
from whence.sources.images import Images
from whence.tasks import (
    BinaryClassification,
    Classification,
    LanguageModeling,
    MaskedLanguageModeling,
    Questions,
    Regression,
    SequenceToSequence,
    Task,
    TokenClassification,
)
from whence.training import Training

__all__ = ["Command", "InputOptions", "Inputs", "TrustRun", "check_trusted"]

_DEFAULT_PASSAGE = 512
#: What --task may be.
_TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "language-modeling": LanguageModeling,
    "binary-classification": BinaryClassification,
    "regression": Regression,
    "token-classification": TokenClassification,
    "masked-language-modeling": MaskedLanguageModeling,
    "sequence-to-sequence": SequenceToSequence,
}
#: Options that name what is loaded, or imported and run.
_LOADED = ("model", "train", "queries", "candidates", "training", "tokenizer", "transform", "allow_download")

TrustRun = Annotated[
    bool,
    typer.Option(
        "--trust-run",
        help="Load the model, data and functions that the directory names, which can run code: for runs of your own.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """What the command line says about model and data."""

    model: str = field(
        metadata={
            "help": "A Hugging Face model directory, or package.module:function (or file.py:function) that returns a "
            "torch module or a whence.sources.Problem."
        }
    )
    train: str | None = option(
        None,
        "Training data: .jsonl, .json, .csv, .tsv, .parquet, .txt, a directory of text files, of shards or of images "
        "in class folders, or a directory saved by the datasets library (path:split).",
    )
    queries: str | None = option(
        None, "Questions: rows with prompt and completion (or text), or labelled images or texts."
    )
    prompt: str | None = option(None, "One question, typed here: what the model was given…")
    completion: str | None = option(None, "…and what it said.")
    contrast: str | None = option(
        None,
        "…and what it might have said instead: why the one rather than the other? (In --queries, a field 'contrast' "
        "with the other completion, or the other label.)",
    )
    measure: str = option("loss", "What is asked of a query: loss, or margin, the log-odds of its label.")
    reduce: str = option("mean", "Over a query's tokens: mean or sum.")
    query_groups: str | None = option(
        None, "A field of --queries: one question about the mean over each group that it names."
    )
    groups: str | None = option(
        None,
        "A field of --train that names groups, such as a source ('id': a document): they are ranked, too.",
    )
    candidates: str | None = option(
        None, "Score only a shortlist: bm25:K or tfidf:K (the K nearest to each query), or a file of ids."
    )
    task: str | None = option(
        None,
        "Where the model does not tell: classification or language-modeling; of a function that brings its data also "
        "binary-classification, regression, token-classification, masked-language-modeling, sequence-to-sequence.",
    )
    params: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Glob pattern of parameter names to use (repeatable), as 'model.layers.*'; default all."
        },
    )
    training: list[str] = field(
        default_factory=list,
        metadata={
            "help": "How the model was trained, which tells how much damping is right: a checkpoint of Trainer, its "
            "trainer_state.json, or optimizer=adamw,rate=5e-5,steps=1000,schedule=linear. Of several models, once for "
            "all, or once for each in their order."
        },
    )
    dtype: str = option("float32", "Of a Hugging Face model's parameters.")
    tokenizer: str | None = option(None, "Its directory, where it is not beside the model.")
    max_length: int | None = option(None, "Tokens of a passage at most (512).")
    truncate: bool = option(False, "Cut long rows instead of refusing them.")
    skip_empty: bool = option(False, "Leave out rows without text.")
    text_field: str | None = option(None, "Field with the text ('text').")
    label_field: str = option("label", "Field with the label.")
    split: str | None = option(None, "Split of a saved data set.")
    encoding: str = option("utf-8", "Of text files.")
    image_mode: str | None = option(None, "Convert images to RGB or L.")
    transform: str | None = option(
        None, "From image to tensor: module:function, or an image processor's directory."
    )
    allow_download: bool = option(False, "MODEL may be fetched by its name on the hub.")
    shard: bool = option(
        False, "Started by torchrun: part the model over the processes, instead of a whole one on each."
    )
    check_vocabulary: bool = option(True, "Refuse a tokenizer whose vocabulary does not fit the model.")


@dataclass(frozen=True)
class Command:
    """A `whence attribute` to repeat: kept in the run directory.

    Attributes:
        more: further checkpoints, beside the model of the inputs.
    """

    inputs: InputOptions
    options: Options
    more: tuple[str, ...] = ()

    @property
    def models(self) -> set[str]:
        """The names of all."""
        return {self.inputs.model, *self.more}

    @classmethod
    def of_run(cls, run_dir: Path, *, trusted: bool, otherwise: str) -> Command:
        """The command that a run directory says it was begun with.

        A directory may be a stranger's, and what it names would be imported and run; so its word is taken only where
        the user says so.

        Raises:
            RunDirectoryError: it has none, or is not trusted; ``otherwise`` says what to do instead.
        """
        if not holds(run_dir, "command"):
            raise RunDirectoryError(
                f"{run_dir} holds no command to repeat: its run was begun from Python. {otherwise}"
            )
        command = read(run_dir, "command", cls)
        check_trusted(run_dir, command.inputs, command.more, trusted=trusted, otherwise=otherwise)
        return command


def check_trusted(
    run_dir: Path, inputs: InputOptions, more: Sequence[str] = (), *, trusted: bool, otherwise: str
) -> None:
    """Refuse to load what a directory names, unless the user trusts it."""
    if trusted:
        return
    said = [(name, getattr(inputs, name)) for name in _LOADED]
    said[1:1] = [("model", name) for name in more]
    named = ", ".join(f"{name} {value!r:.100}" for name, value in said if value)
    raise RunDirectoryError(
        f"{run_dir} says what to load ({named}), and loading it can run code. If the run is your own, or of "
        f"someone you trust, say --trust-run. {otherwise}"
    )


class Inputs:
    """Loads what the options name, when it is asked for.

    Args:
        options: of the command line.
        more: further checkpoints of the same model.
    """

    def __init__(self, options: InputOptions, more: Sequence[str] = ()) -> None:
        self.options, self.more = options, tuple(more)
        names = (options.model, *self.more)
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise OptionError(f"the model {twice[0]!r} is named twice; several checkpoints must be different")

    @cached_property
    def problem(self) -> Problem:
        """The model and what comes with it."""
        problem = self._load(self.options.model)
        if self.options.shard:
            shard(problem.model)
        return problem

    def _load(self, model: str) -> Problem:
        options = self.options
        return load_model(
            model,
            dtype=options.dtype,
            tokenizer=options.tokenizer,
            allow_download=options.allow_download,
            check_vocabulary=options.check_vocabulary,
        )

    @property
    def model(self) -> nn.Module | dict[str, Callable[[], nn.Module]]:
        """The model; or, of several, functions that load one each, by their names."""
        if not self.more:
            return self.problem.model
        return {self.options.model: lambda: self.problem.model} | {
            name: partial(self._further, name) for name in self.more
        }

    def _further(self, name: str) -> nn.Module:
        """Another checkpoint, if it reads the data as the first one does."""
        first, other = self.problem, self._load(name)
        for what, one, two in (
            ("task", repr(first.task), repr(other.task)),
            ("tokenizer", _vocabulary(first.tokenizer), _vocabulary(other.tokenizer)),
            ("labels", _names(first.labels), _names(other.labels)),
        ):
            if one != two:
                raise OptionError(
                    f"the models {self.options.model!r} and {name!r} have another {what}, and would read the same data "
                    "differently; several checkpoints must be of one training"
                )
        return other.model

    @cached_property
    def task(self) -> Task:
        """What the outputs mean: from the model, or as the options say."""
        if self.options.task is not None:
            if self.options.task not in _TASKS:
                raise OptionError(f"--task is {self.options.task!r}; it must be one of {', '.join(_TASKS)}")
            return _TASKS[self.options.task]()
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
            missing = "there are no training data; name them with --train"
            return _listed(problem.train, problem.train_exhibits, "train", missing)
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
        typed = self._typed_query()
        if typed is None and options.queries is None:
            missing = "there is no question; name a file with --queries, or give --prompt and --completion"
            return _listed(problem.queries, problem.query_exhibits, "queries", missing)
        if isinstance(self.task, LanguageModeling):
            return language_queries(
                typed or self._records(str(options.queries)),
                self._tokenizer(),
                self.task,
                max_length=problem.context,
                text_field=options.text_field if typed is None else None,
                skip_empty=options.skip_empty and typed is None,
            )
        return self._classified(str(options.queries), getattr(self.train, "labels", None) or problem.labels)

    @cached_property
    def questions(self) -> Questions:
        """What is asked of the queries."""
        options, queries = self.options, self.queries
        groups = None if options.query_groups is None else names_of(queries, options.query_groups)
        named = {} if groups is None else {"groups": groups}
        return Questions.of(queries, measure=options.measure, reduce=options.reduce, **named)

    @property
    def groups(self) -> list[str | None] | None:
        """The group of every training example, where a field was named."""
        return None if self.options.groups is None else names_of(self.train, self.options.groups)

    def operator(self, options: MeasureOptions) -> GaussNewton:
        """The Gauss-Newton Hessian over the training data."""
        return GaussNewton(
            self.problem.model,
            self.task,
            self.train,
            params=self.params,
            product=options.product,  # type: ignore[arg-type]  # checked
            micro_batch=options.micro_batch,
        )

    @cached_property
    def training(self) -> Training | None:
        """How the model was trained, where that was said."""
        given = self.options.training
        if len(given) > 1:
            raise OptionError(f"--training is given {len(given)} times, for one model; give it once")
        return Training.read(given[0], self.problem.model) if given else None

    @property
    def trainings(self) -> Any:
        """How each of several models was trained: as `whence.attribute` takes it."""
        given = self.options.training
        if not self.more:
            return self.training
        return given if len(given) > 1 else given[0] if given else None

    @property
    def params(self) -> list[str] | None:
        """Patterns of parameter names; None for all."""
        return self.options.params or None

    @property
    def has_queries(self) -> bool:
        """Whether there is a question."""
        options = self.options
        return any(each is not None for each in (options.queries, options.prompt, options.completion))

    @property
    def class_names(self) -> Sequence[str] | None:
        """Labels in words."""
        labels = getattr(self.train, "labels", None) or self.problem.labels
        return None if labels is None else labels.names

    @property
    def candidates(self) -> Shortlist | None:
        """``bm25:K``, ``tfidf:K``, or a file of ids."""
        spec = self.options.candidates
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

    def _records(self, path: str) -> Records:
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

    def _typed_query(self) -> Records | None:
        options = self.options
        if options.prompt is None and options.completion is None:
            if options.contrast is not None:
                raise OptionError(
                    "--contrast goes with --prompt and --completion; in --queries, give rows a field 'contrast'"
                )
            return None
        if options.queries is not None:
            raise OptionError("give either --queries or --prompt and --completion, not both")
        if options.prompt is None or options.completion is None:
            raise OptionError("a question needs both --prompt and --completion")
        if not isinstance(self.task, LanguageModeling):
            raise OptionError("--prompt and --completion are for language models; use --queries")
        said = {"prompt": options.prompt, "completion": options.completion}
        other = {} if options.contrast is None else {"contrast": options.contrast}
        return RowList([said | other], name="question")

    def _classified(self, path: str, labels: Labels | None) -> Examples:
        options, problem = self.options, self.problem
        if not isinstance(self.task, Classification):
            raise OptionError(
                f"files are read for classification and language modelling, not for {type(self.task).__name__}; have "
                "the function return a whence.sources.Problem with train and queries"
            )
        found: ClassifiedTexts | Images
        if problem.kind == "text-classifier":
            found = ClassifiedTexts(
                self._records(path),
                self._tokenizer(),
                labels=labels,
                text_field=options.text_field or "text",
                label_field=options.label_field,
                max_length=self._length(),
                truncate=options.truncate,
                skip_empty=options.skip_empty,
            )
        else:
            processor = problem.directory if problem.kind == "image-classifier" else None
            found = open_images(
                path,
                transform=options.transform or processor,
                mode=options.image_mode,
                labels=labels,
                split=options.split,
                label_field=options.label_field,
                encoding=options.encoding,
            )
        if problem.num_labels is not None:
            found.labels.check_outputs(problem.num_labels, found.name)
        return found


def _vocabulary(tokenizer: Any) -> Any:
    return None if tokenizer is None else tokenizer.get_vocab()


def _names(labels: Labels | None) -> Any:
    return None if labels is None else labels.names


def names_of(data: Examples, field: str) -> list[str | None]:
    """What a field says of every example, as the name of a group."""
    return [None if value is None else str(value) for value in data.column(field)]


def _listed(data: Any, exhibits: Any, name: str, missing: str) -> Examples:
    """The data that came with the model."""
    if data is None:
        raise OptionError(missing)
    return data if isinstance(data, Examples) else ListedExamples(data, name=name, exhibits=exhibits)
