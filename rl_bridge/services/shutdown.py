"""Shutdown of a process that has used Monarch, and interruption of its blocking calls."""

import atexit
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

FLUSH_TIMEOUT_S = 0.3
"""Time for Monarch's last messages, the same as Monarch's own."""

SHUTDOWN_TIMEOUT_S = 5.0
"""Time for the rest of the shutdown: on a busy machine Monarch's own second is too short."""


@cache
def shut_down_at_exit() -> None:
    """Shut down Monarch's client at exit, before Monarch does, which prints a traceback if that takes too long.

    Call it when there is a client: exit handlers run in reverse order of registration.
    """
    atexit.register(_shut_down)


def _shut_down() -> None:
    from monarch.actor import shutdown_context

    with suppress(Exception):  # the process is exiting
        shutdown_context(host_timeout=FLUSH_TIMEOUT_S).get(timeout=SHUTDOWN_TIMEOUT_S)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Have SIGINT and SIGTERM raise KeyboardInterrupt within the block.

    For calls that block the event loop, which handles a signal only in its next iteration. On another thread than the
    main one, which alone receives signals, the block runs unchanged.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {number: signal.signal(number, signal.default_int_handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            # None means a handler that was not installed by Python, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
