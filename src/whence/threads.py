"""`one_at_a_time`: threads that call whence take turns.

A pass over a model changes it for a moment: hooks are added, and parameters stand in for others. So does a progress bar
change the terminal, and forward-mode differentiation a level that all threads share. What is decorated here waits until
the call of another thread has ended; calls inside a call go on.
"""

from __future__ import annotations

import contextlib
import threading

__all__ = ["one_at_a_time"]


class _Turns(contextlib.ContextDecorator):
    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


#: Decorates a function, or is entered by ``with``.
one_at_a_time = _Turns()
