"""A page that answers: `serve`, on this machine alone."""

from whence.explorer.answering import Answering
from whence.explorer.server import application, serve

__all__ = ["Answering", "application", "serve"]
