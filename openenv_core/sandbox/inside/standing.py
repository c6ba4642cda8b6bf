"""What the zygote is told, and what it prepares once for all interpreters."""

import fcntl
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from openenv_core.sandbox.kernel import identity, landlock, libc, namespaces
from openenv_core.sandbox.kernel.limits import Footprint, count_tasks, footprint, one_arena
from openenv_core.sandbox.kernel.namespaces import uncover

FOR_THE_LOADER: Final = ("LD_LIBRARY_PATH",)
"""Variables without which this very Python may not start. Once it has, the zygote forgets them: code has no business
with where the machine keeps its libraries."""


@dataclass(frozen=True)
class Told:
    """The zygote, once.

    Attributes:
        isolation: The rung of the ladder, by its name.
        preload: Modules to import.
        shown: Files and folders that code may read.
        hidden: What it may not, below those.
        readable: The same as files and folders none of which holds a hidden one.
        scratch: A folder for what imports want to write; None where the zygote has a file system of its own.
        privileged: Name spaces are made with the machine's own privileges, not with those of a user name space.
    """

    isolation: str
    preload: list[str]
    shown: list[str]
    hidden: list[str]
    readable: list[str]
    scratch: str | None
    privileged: bool


@dataclass(frozen=True)
class Spec:
    """One interpreter.

    Attributes:
        limits: By the names of `sandbox.limits.Limits`.
        uid: The user that it becomes; None leaves it as it is.
        workdir: Its folder; None: a file system of its own.
        snapshot: Each execution runs in a fork of the state before it.
    """

    limits: dict[str, Any]
    uid: int | None
    workdir: str | None
    snapshot: bool


_FIRST_TO_GO: Final = 1000

_SLACK: Final = 256
"""Threads and processes by which a server and what else its user runs may grow."""


@dataclass
class Standing:
    """What a fork starts from.

    Attributes:
        isolation: The rung of the ladder, by its name.
        has_init: Sessions have name spaces of their own, with a first process that tells how the interpreter ended.
        privileged: These are made with the machine's own privileges, not with those of a user name space.
        proc: A descriptor of /proc where that is out of sight; closed in every fork.
        readable: Descriptors of what may be read.
        prepared: The same as rules, for interpreters that may not execute.
        ids: User and group of the zygote.
        tasks: How many processes and threads of this user there were at the start.
        forks: How many interpreters live.
        base: What a fork occupies.
        facts: Told to the supervisor.
    """

    isolation: str
    has_init: bool = False
    privileged: bool = False
    proc: int | None = None
    readable: list[int] = field(default_factory=list)
    prepared: landlock.Prepared = field(default_factory=lambda: landlock.Prepared(()))
    ids: tuple[int, int] = (0, 0)
    tasks: int = 0
    forks: int = 0
    base: Footprint | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def settle(self) -> None:
        """Measure what forks start from, once everything is imported."""
        self.base = footprint(self.proc)
        self.ids = os.getuid(), os.getgid()
        if not self.has_init:
            self.tasks = count_tasks(os.getuid())

    def others(self, each: int) -> int:
        """Return how many processes and threads an interpreter may have to share its user with.

        Args:
            each: What one interpreter may have.
        """
        return self.tasks + _SLACK + self.forks * each

    def leave(self, processes: Iterable[int]) -> None:
        """End what was forked; the supervisor is gone, or does not want it any more."""
        for process in processes:
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    kill(process, signal.SIGKILL)


def stand(told: Told) -> Standing:
    """Take the place on the ladder that the supervisor asks for.

    On the highest rung this returns in a child, which is the first process of a name space of its own.

    Raises:
        OSError: The kernel does not have, or does not allow, what it needs.
    """
    standing = Standing(told.isolation)
    _go_first()
    one_arena()
    libc.set_dumpable(False)
    libc.become_subreaper()
    if told.isolation == "namespaces":
        standing.has_init, standing.privileged = True, told.privileged
        standing.proc = _high(namespaces.open_proc())
        namespaces.enter_outer(privileged=told.privileged)
        _fork_first()
        namespaces.build_root(namespaces.RootView(paths=told.shown, hidden=told.hidden))
    elif told.privileged:
        # Sessions have users of their own, who may not enter root's home, where Python may be.
        uncover(told.shown)
    # Once here rather than in every fork: what is in the set is of use to programs alone, and none is executed.
    identity.drop_bounding()
    if told.isolation in ("namespaces", "lsm"):
        version = landlock.abi()
        if version < landlock.SIGNALS_SINCE and not standing.has_init:
            raise OSError(
                f"expected Landlock of version {landlock.SIGNALS_SINCE} or newer, got {version or 'none'}"
            )
        standing.facts["landlock"] = version
        if version:
            paths = [*told.readable, "/proc/cpuinfo", "/proc/meminfo"]
            standing.readable = [_high(landlock.open_path(path)) for path in paths if os.path.exists(path)]
            standing.prepared = landlock.prepare(standing.readable)
    return standing


def _go_first() -> None:
    """Where memory runs out, have the kernel end an interpreter, however small, and not the server."""
    # Forks inherit it. A process that is not dumpable could not open this.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_FIRST_TO_GO))


def _fork_first() -> None:
    process = os.fork()
    if process == 0:
        libc.die_with_parent()
        return
    _, status = os.waitpid(process, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _high(descriptor: int) -> int:
    # The low numbers are those that a fork gives to its streams.
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100)
    finally:
        os.close(descriptor)
