"""Tasks: what a model's outputs mean. See `whence.tasks.base.Task`."""

from whence.tasks.base import Batch, Task
from whence.tasks.binary import BinaryClassification
from whence.tasks.classification import Classification
from whence.tasks.convex import ConvexLoss
from whence.tasks.language_modeling import LanguageModeling
from whence.tasks.preference import Preference
from whence.tasks.questions import Questions
from whence.tasks.regression import Regression
from whence.tasks.sequence_to_sequence import SequenceToSequence
from whence.tasks.token_classification import MaskedLanguageModeling, TokenClassification

__all__ = [
    "Batch",
    "BinaryClassification",
    "Classification",
    "ConvexLoss",
    "LanguageModeling",
    "MaskedLanguageModeling",
    "Preference",
    "Questions",
    "Regression",
    "SequenceToSequence",
    "Task",
    "TokenClassification",
]
