"""What all interpreters of a zygote have in common, prepared once: where it stands, and what they may read."""

import fcntl
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from openenv_core.sandbox.inside.told import Told
from openenv_core.sandbox.kernel import landlock, libc
from openenv_core.sandbox.kernel.limits import Footprint, count_tasks, footprint, one_arena


@dataclass
class Standing:
    """What a fork starts from.

    Attributes:
        isolation: The rung of the ladder, by its name.
        has_init: Sessions have a first process of their own, which tells how the interpreter ended.
        privileged: Name spaces are made with the machine's own privileges, not with those of a user name space.
        readable: Descriptors of what may be read.
        tasks: How many processes and threads of this user there are beside.
        base: What a fork occupies.
        facts: Told to the supervisor.
    """

    isolation: str
    has_init: bool = False
    privileged: bool = False
    readable: list[int] = field(default_factory=list)
    tasks: int = 0
    base: Footprint | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def leave(self, processes: Iterable[int]) -> None:
        """End what was forked; the supervisor is gone, or does not want it any more."""
        for process in processes:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue


def stand(told: Told) -> Standing:
    """Take the place on the ladder that the supervisor asks for.

    Raises:
        OSError: The kernel does not have, or does not allow, what it needs.
    """
    standing = Standing(told.isolation)
    one_arena()
    libc.set_dumpable(False)
    libc.become_subreaper()
    if told.isolation in ("namespaces", "lsm"):
        version = landlock.abi()
        if version < landlock.SIGNALS_SINCE:
            raise OSError(
                f"expected Landlock of version {landlock.SIGNALS_SINCE} or newer, got {version or 'none'}"
            )
        standing.facts["landlock"] = version
        paths = [*told.readable, "/proc/cpuinfo", "/proc/meminfo"]
        standing.readable = [_opened(path) for path in paths if os.path.exists(path)]
    return standing


def _opened(path: str) -> int:
    descriptor = landlock.open_path(path)
    try:
        # The low numbers are those that a fork gives to its streams.
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100)
    finally:
        os.close(descriptor)


def settle(standing: Standing) -> None:
    """Measure what forks start from, once everything is imported."""
    standing.base = footprint()
    standing.tasks = count_tasks(os.getuid())
