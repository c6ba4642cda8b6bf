"""The garbage collector of a process that makes many objects of which nearly none are cyclic: servers and workers."""

import gc
from typing import Final

GC_THRESHOLD: Final = 50_000
"""New objects between two runs of the garbage collector: a few MB at most."""


def tune_garbage_collector() -> None:
    """Make garbage collection rarer, and leave out what the process has loaded; call it when that has been done.

    By default the young generation is collected after every 700 new objects. With thousands of sessions, that finds
    only live objects, and takes as much time in all as the steps themselves; of a worker with hundreds of episodes it
    takes a quarter.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 10, 100)
