"""The command line: ``whence spectrum | plan | attribute | resume | report | clean | validate | demo``."""

from whence.cli.app import app, main

__all__ = ["app", "main"]
