"""What a user names on the command line, as models, data sets and queries.

::

    problem  = load_model("path/to/model")                                  # model, task, tokenizer, labels
    train    = Passages(open_records("train.jsonl"), problem.tokenizer, max_length=512)
    queries  = language_queries(open_records("queries.jsonl"), problem.tokenizer, problem.task)

Optional libraries are imported when they are needed, with an error that says what to install.
"""

from whence.sources.examples import Examples, ListedExamples
from whence.sources.formats import open_records
from whence.sources.images import open_images
from whence.sources.labels import Labels
from whence.sources.models import Problem, load_model
from whence.sources.queries import language_queries
from whence.sources.records import Records, RowList
from whence.sources.tables import hub_dataset
from whence.sources.text import ClassifiedTexts, Passages

__all__ = [
    "ClassifiedTexts",
    "Examples",
    "Labels",
    "ListedExamples",
    "Passages",
    "Problem",
    "Records",
    "RowList",
    "hub_dataset",
    "language_queries",
    "load_model",
    "open_images",
    "open_records",
]
