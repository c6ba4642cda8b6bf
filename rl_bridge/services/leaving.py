"""The end of a process that has used Monarch, and calls that shall end with it."""

import atexit
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

FLUSH_TIMEOUT_S = 0.3
"""What Monarch itself gives its last messages."""

LEAVE_TIMEOUT_S = 5.0
"""What a busy machine gets for the rest, where Monarch gives it a second."""


@cache
def leave_quietly() -> None:
    """Have this process shut its client down at its exit, before Monarch does, which shows a traceback when late.

    To be called when there is a client: what is registered last is called first.
    """
    atexit.register(_leave)


def _leave() -> None:
    from monarch.actor import shutdown_context

    with suppress(Exception):  # there is nobody left to tell
        shutdown_context(host_timeout=FLUSH_TIMEOUT_S).get(timeout=LEAVE_TIMEOUT_S)


TOLD_TO_GO = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[None]:
    """Have SIGINT and SIGTERM raise KeyboardInterrupt within the block.

    An event loop hears of a signal in its next turn, and while something blocks it there is none. Signals reach the
    main thread alone: on another one the block is as it was.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in TOLD_TO_GO}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is one that was not Python's, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
