"""A call that blocks the event loop for long, and shall end when the process is told to go."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

TOLD_TO_GO = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Have SIGINT and SIGTERM raise KeyboardInterrupt within the block.

    An event loop hears of a signal in its next turn, and while something blocks it there is none. Signals reach the
    main thread alone: on another one the block is as it was.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _raise) for number in TOLD_TO_GO}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is one that was not Python's, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
