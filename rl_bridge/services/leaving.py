"""The end of a process that has used Monarch."""

import atexit
from contextlib import suppress
from functools import cache

FLUSH_S = 0.3
"""What Monarch itself gives its last messages."""

LEAVE_S = 5.0
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
        shutdown_context(host_timeout=FLUSH_S).get(timeout=LEAVE_S)
