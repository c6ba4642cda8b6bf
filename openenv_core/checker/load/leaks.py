"""Whether a server holds more and more the longer it serves: memory, threads, open files.

Episodes are played in windows of equal size, and after each what the server holds is looked at, over all of its
processes, once they have thrown their garbage away: Python would do that now and then, so that memory would rise
for a thousand episodes and fall at the next. The first windows warm it up: caches and pools fill. What counts after
that is the slope over the windows (the median of the slopes between all pairs, which single jumps do not
move) and that it goes on: something that grows is looked at over as many episodes again, and has to grow there as
well. A cache that fills is level the second time; a leak is not.
"""

from typing import Final

from openenv_core.checker.check import CheckFailed, Level, NotApplicable, check
from openenv_core.checker.load.growth import Growth, leaks_memory, leaks_things
from openenv_core.checker.load.windows import measured
from openenv_core.checker.subject import Subject

DEADLINE_S: Final = 900.0


@check(Level.LOAD, deadline_s=DEADLINE_S)
def check_threads_stay_level(subject: Subject) -> None:
    """The server has no more threads and processes after a thousand episodes than after the first."""
    for name in ("processes", "threads"):
        growth = _growth(subject, name)
        if leaks_things(growth):
            raise _failed(
                name,
                growth,
                change="end in close() the threads, pools and processes that __init__ or reset starts, and start none "
                "that nobody ends",
            )


@check(Level.LOAD, deadline_s=DEADLINE_S)
def check_files_stay_level(subject: Subject) -> None:
    """The server has no more files and sockets open after a thousand episodes than after the first."""
    if any(leaks_things(_growth(subject, name)) for name in ("processes", "threads")):
        raise NotApplicable("what its threads hold grows with them: see threads_stay_level")
    growth = _growth(subject, "files")
    if leaks_things(growth):
        raise _failed(
            "open files",
            growth,
            change="open files and sockets in `with`, or close them in reset and in close()",
        )


@check(Level.LOAD, deadline_s=DEADLINE_S)
def check_memory_stays_level(subject: Subject) -> None:
    """The server has no more memory after a thousand episodes than after the first."""
    if any(leaks_things(_growth(subject, name)) for name in ("processes", "threads", "files")):
        raise NotApplicable(
            "what is left open grows, and memory with it: see threads_stay_level, files_stay_level"
        )
    growth = _growth(subject, "memory")
    if leaks_memory(growth):
        raise CheckFailed(
            f"expected level memory over {_count(growth)} episodes, got {growth.total / 2**20:.1f} MiB more, "
            f"{growth.slope:.0f} bytes each",
            change="keep nothing of an episode once it is over: look for lists, dicts and caches on the class or in "
            "the module that only ever grow, and bound them (functools.lru_cache(maxsize=), deque(maxlen=)). "
            "A bounded one that still fills is level once it is full: a higher --episodes tells",
        )


def _failed(what: str, growth: Growth, change: str) -> CheckFailed:
    return CheckFailed(
        f"expected as many {what} after {_count(growth)} episodes as before them, got {growth.values[0]} before "
        f"and {growth.values[-1]} after",
        change=change,
    )


def _count(growth: Growth) -> int:
    return growth.episodes * (len(growth.values) - 1)


def _growth(subject: Subject, name: str) -> Growth:
    episodes, windows = subject.once("windows", lambda: measured(subject))
    return Growth(tuple(getattr(held, name) for held in windows), episodes)
