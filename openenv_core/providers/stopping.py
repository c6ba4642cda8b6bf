"""How a stop gets past a start that is under way in another thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

AGAIN_S: Final = 0.05


@contextmanager
def stopped(end: Callable[[], object], lock: threading.Lock) -> Iterator[None]:
    """Hold the lock, which a start holds until `end` makes it fail.

    It is called again and again: a start that has just begun may not have come to where it has an effect.
    """
    end()
    while not lock.acquire(timeout=AGAIN_S):
        end()
    try:
        yield
    finally:
        lock.release()
