"""An index of the training examples: made once, and every later question is answered from it in a moment."""

from whence.index.answer import Answer
from whence.index.index import Index
from whence.index.pipeline import index

__all__ = ["Answer", "Index", "index"]
