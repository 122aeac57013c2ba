"""What a user names on the command line, as models, data sets and queries.

::

    problem  = load_model("path/to/model")                                  # model, task, tokenizer, labels
    train    = Passages(open_records("train.jsonl"), problem.tokenizer, max_length=512)
    queries  = language_queries(open_records("queries.jsonl"), problem.tokenizer, problem.task)

Optional libraries are imported when they are needed, with an error that says what to install.
"""

from whence.sources.classified_text import ClassifiedTexts
from whence.sources.examples import Examples, ListedExamples
from whence.sources.images import ImageExamples, image_folder, image_records, open_images
from whence.sources.labels import Labels
from whence.sources.language import Passages
from whence.sources.models import Problem, context_length, load_model
from whence.sources.open_records import open_records
from whence.sources.queries import language_queries
from whence.sources.records import FirstRows, Records, RowList
from whence.sources.table_records import HubDataset

__all__ = [
    "ClassifiedTexts",
    "Examples",
    "FirstRows",
    "HubDataset",
    "ImageExamples",
    "Labels",
    "ListedExamples",
    "Passages",
    "Problem",
    "Records",
    "RowList",
    "context_length",
    "image_folder",
    "image_records",
    "language_queries",
    "load_model",
    "open_images",
    "open_records",
]
