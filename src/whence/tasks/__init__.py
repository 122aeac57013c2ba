"""Tasks: what a model's outputs mean. See `whence.tasks.base.Task`."""

from whence.tasks.base import Batch, Task
from whence.tasks.classification import Classification
from whence.tasks.convex import ConvexLoss
from whence.tasks.language_modeling import LanguageModeling
from whence.tasks.regression import Regression

__all__ = ["Batch", "Classification", "ConvexLoss", "LanguageModeling", "Regression", "Task"]
