"""The walls around interpreters: what the zygote prepares once, and what each fork puts up before it runs code."""

import fcntl
import os
import shutil
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from openenv_core.sandbox.inside.frames import READY_NOTICE, ROOT_NOTICE, WORKSPACE_NOTICE
from openenv_core.sandbox.inside.runner import CONTROL, BranchingRunner, RequestRunner, arrange, furnish
from openenv_core.sandbox.kernel import cgroups, identity, landlock, libc, namespaces, seccomp
from openenv_core.sandbox.kernel.limits import Footprint, apply_rlimits, count_tasks, footprint, one_arena

BY_SIGNAL: Final = 128
"""Added to the signal that ended the interpreter."""

_OOM_SCORE: Final = 1000

_SPARE_TASKS: Final = 256
"""Threads and processes by which a server and what else its user runs may grow."""

_NICENESS: Final = 5
"""Code waits for the server, not the server for code."""


@dataclass(frozen=True)
class ZygoteSpec:
    """The supervisor's settings for the zygote, sent once.

    Attributes:
        isolation: The rung of the ladder, by its name.
        preload: Modules to import.
        shown: Files and folders that code may read.
        hidden: What it may not, below those.
        links: Names below the root that lead into the workspace.
        readable: The same as files and folders none of which holds a hidden one.
        scratch: A folder for what imports want to write; None where the zygote has a file system of its own.
        privileged: Name spaces are made with the machine's own privileges, not with those of a user name space.
    """

    isolation: str
    preload: list[str]
    shown: list[str]
    hidden: list[str]
    links: list[str]
    readable: list[str]
    scratch: str | None
    privileged: bool


@dataclass(frozen=True)
class ForkSpec:
    """The supervisor's settings for one interpreter.

    Attributes:
        limits: By the names of `sandbox.config.Limits`.
        uid: The user that it becomes; None leaves it as it is.
        workdir: Its folder; None: a file system of its own.
        snapshot: Each execution runs in a fork of the state before it.
    """

    limits: dict[str, Any]
    uid: int | None
    workdir: str | None
    snapshot: bool


@dataclass
class Prepared:
    """What a fork starts from.

    Attributes:
        spec: What the zygote was told.
        proc: A descriptor of /proc where that is out of sight; closed in every fork.
        readable: Descriptors of what may be read.
        rules: The same as Landlock's rules, by whether interpreters may execute.
        ids: User and group of the zygote.
        tasks: How many processes and threads of this user there were at the start.
        forks: How many interpreters live.
        base: What a fork occupies.
    """

    spec: ZygoteSpec
    proc: int | None = None
    readable: list[int] = field(default_factory=list)
    rules: dict[bool, tuple[bytes, ...]] = field(default_factory=dict)
    ids: tuple[int, int] = (0, 0)
    tasks: int = 0
    forks: int = 0
    base: Footprint | None = None

    @property
    def has_init(self) -> bool:
        """Whether sessions have name spaces of their own, with a first process that tells how the interpreter ended."""
        return self.spec.isolation == "namespaces"

    def settle(self) -> None:
        """Measure what forks start from, once everything is imported."""
        self.base = footprint(self.proc)
        self.ids = os.getuid(), os.getgid()
        if not self.has_init:
            self.tasks = count_tasks(os.getuid())


def prepare(spec: ZygoteSpec) -> Prepared:
    """Take the place on the ladder that the supervisor asks for.

    On the highest rung this returns in a child, which is the first process of a name space of its own.
    """
    prepared = Prepared(spec)
    # Where memory runs out, the kernel is to end an interpreter, however small, and not the server. Forks inherit it;
    # a process that is not dumpable could not open this.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    one_arena()
    libc.set_dumpable(False)
    libc.become_subreaper()
    if prepared.has_init:
        prepared.proc = _move_descriptor(namespaces.open_proc())
        namespaces.enter_outer(privileged=spec.privileged)
        _fork_init()
        namespaces.build_root(spec.shown, spec.hidden, spec.links)
    elif spec.privileged:
        # Sessions have users of their own, who may not enter root's home, where Python may be.
        namespaces.uncover(spec.shown)
    # Once here rather than in every fork: what is in the set is of use to programs alone, and none is executed.
    identity.drop_bounding()
    if spec.isolation in ("namespaces", "lsm"):
        version = landlock.abi()
        if version < landlock.SIGNALS_SINCE and not prepared.has_init:
            raise OSError(f"expected Landlock {landlock.SIGNALS_SINCE} or newer, got {version or 'none'}")
        if version:
            paths = [*spec.readable, *namespaces.PROC_FILES]
            prepared.readable = [
                _move_descriptor(landlock.open_path(path)) for path in paths if os.path.exists(path)
            ]
            prepared.rules = {
                execute: landlock.prepare_rules(prepared.readable, execute=execute)
                for execute in (False, True)
            }
    return prepared


def _fork_init() -> None:
    process = os.fork()
    if process == 0:
        libc.die_with_parent()
        return
    _, status = os.waitpid(process, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _move_descriptor(descriptor: int) -> int:
    # The low numbers are those that a fork gives to its streams.
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100)
    finally:
        os.close(descriptor)


def become_init(
    spec: ForkSpec, prepared: Prepared, control: int, stdout: int, stderr: int, *doors: int
) -> None:
    """In the first process of a session's name spaces: wait for the interpreter; return in that, a child.

    It lives as long as the session, and every page that it writes to is one more: it does next to nothing. The
    descriptors are those of `become_interpreter`.
    """
    if doors:
        cgroups.join(list(doors))
    os.write(control, ROOT_NOTICE)
    interpreter = os.fork()
    if interpreter:
        if spec.uid is not None:
            identity.drop_to(spec.uid, spec.uid)
        identity.drop_capabilities()
        _wait_for(interpreter, successors=spec.snapshot)


def become_interpreter(
    spec: ForkSpec, prepared: Prepared, control: int, stdout: int, stderr: int, *doors: int
) -> None:
    """Become an interpreter; return only when there is nothing left to do."""
    parent = os.getppid()
    os.setsid()
    arrange(control, stdout, stderr)
    connection = socket.socket(fileno=CONTROL)
    connection.setblocking(True)
    if prepared.has_init:
        _settle(spec, prepared, connection)
    else:
        cgroups.join(list(doors))
        if spec.uid is not None:
            identity.drop_to(spec.uid, spec.uid)
        connection.send(ROOT_NOTICE)
        if spec.snapshot:
            # Heads come and go; this one stays, and is what the zygote knows.
            libc.become_subreaper()
            if interpreter := os.fork():
                _die_with(parent)
                _wait_for(interpreter, successors=True)
            os.setpgid(0, 0)  # it is paused with all that the code forks, and the one that stays is not
    shares_user = spec.uid is None and not prepared.has_init
    workdir = spec.workdir or namespaces.WORKSPACE
    furnish(workdir)
    _confine(spec, prepared, workdir, shares_user=shares_user)
    if not prepared.has_init and not spec.snapshot:
        _die_with(parent)
    os.nice(_NICENESS)
    libc.no_new_privileges()
    if prepared.spec.isolation != "process":
        subprocesses = spec.limits["allow_subprocess"]
        policy = seccomp.SeccompPolicy(
            pid=None if spec.snapshot or subprocesses else os.getpid(),
            allow_subprocess=subprocesses,
            allow_fork=spec.snapshot,
            shared_uid=shares_user,
        )
        seccomp.install(seccomp.assemble(policy))
    kind = BranchingRunner if spec.snapshot else RequestRunner
    runner = kind(connection, spec.limits["outputs_bytes"])
    runner.interrupts.install()
    connection.send(READY_NOTICE)
    # Nothing random is to be what other interpreters draw. Python's own generator sees to itself in every fork.
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()
    if shares_user:
        tolerate_copy_errors()
    runner.serve()


def _wait_for(interpreter: int, *, successors: bool) -> NoReturn:
    """Reap whatever ends, and end with the interpreter; where it may hand over to successors, with the last one."""
    libc.close_from(0)
    code = 0
    while True:
        try:
            process, status = os.wait()
        except ChildProcessError:
            os._exit(code)
        ended = os.waitstatus_to_exitcode(status)
        code = BY_SIGNAL - ended if ended < 0 else ended
        if process == interpreter and not successors:
            os._exit(code)


def _die_with(parent: int) -> None:
    libc.die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def _settle(spec: ForkSpec, prepared: Prepared, connection: socket.socket) -> None:
    uid, gid = prepared.ids if spec.uid is None else (spec.uid, spec.uid)
    privileged, limits = prepared.spec.privileged, spec.limits
    proc = None if privileged else prepared.proc
    namespaces.settle_session(privileged, uid, gid, limits["disk_bytes"], limits["files"], proc=proc)
    if privileged:
        identity.drop_to(uid, gid)
    workspace = os.open(namespaces.WORKSPACE, os.O_RDONLY | os.O_DIRECTORY)
    socket.send_fds(connection, [WORKSPACE_NOTICE], [workspace])
    os.close(workspace)


def _confine(spec: ForkSpec, prepared: Prepared, workdir: str, *, shares_user: bool) -> None:
    limits = spec.limits
    processes = limits["processes"]
    apply_rlimits(
        memory_bytes=limits["memory_bytes"],
        file_bytes=limits["file_bytes"],
        open_files=limits["open_files"],
        processes=processes,
        # What others of the user have, and may come to have.
        existing_tasks=prepared.tasks + _SPARE_TASKS + prepared.forks * processes if shares_user else 0,
        base=prepared.base,
    )
    libc.set_dumpable(False)
    if prepared.readable:
        writable = (workdir, *(path for path in namespaces.DEVICES if os.path.exists(path)))
        execute = limits["allow_subprocess"]
        landlock.restrict(prepared.rules[execute], writable, execute=execute)
    # Not up to the limit, which is below the numbers of what the zygote holds: its descriptor of /proc among them.
    libc.close_from(CONTROL + 1)
    identity.drop_capabilities()


def tolerate_copy_errors() -> None:
    """Have `shutil` copy without what may not be set, rather than fail once the content is there."""
    for name in ("copymode", "copystat"):
        _wrap_copy(name, getattr(shutil, name))


def _wrap_copy(name: str, copy: Any) -> None:
    def tolerant(*args: Any, **kwargs: Any) -> None:
        with suppress(PermissionError):
            copy(*args, **kwargs)

    tolerant.__name__, tolerant.__doc__ = name, copy.__doc__
    setattr(shutil, name, tolerant)
