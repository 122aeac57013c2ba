"""Two demonstrations on real data that need no download: digits with wrong labels, and Python's own manual."""

from whence.demo.run import run_demo

__all__ = ["run_demo"]
