"""A forked child that holds what a test gives it, until it is killed."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def forked_child(hold: Callable[[], object]) -> Iterator[int]:
    """Call `hold` in a forked child, which keeps its result and waits to be killed at the end of the block.

    Args:
        hold: Returns an object other than None.

    Yields:
        The child's process ID, once `hold` has returned.
    """
    ready, reports = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            held = hold()
            os.write(reports, b"!" if held is not None else b"?")
            signal.pause()
        finally:
            os._exit(1)
    os.close(reports)
    try:
        assert os.read(ready, 1) == b"!", "the child failed"
        yield pid
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
