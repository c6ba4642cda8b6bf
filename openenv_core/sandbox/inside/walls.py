"""Confinement of interpreters: what the zygote prepares once, and what each fork applies before it runs code."""

import fcntl
import os
import shutil
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Final, NoReturn

from openenv_core.sandbox.inside.frames import READY_NOTICE, RESUME, ROOT_NOTICE, WORKSPACE_NOTICE
from openenv_core.sandbox.inside.runner import CONTROL, BranchingRunner, RequestRunner, arrange, furnish
from openenv_core.sandbox.kernel import cgroups, identity, landlock, libc, namespaces, seccomp
from openenv_core.sandbox.kernel.limits import Footprint, apply_rlimits, count_tasks, footprint, one_arena

BY_SIGNAL: Final = 128
"""Added to the signal that ended the interpreter."""

_OOM_SCORE: Final = 1000

_SPARE_TASKS: Final = 256
"""Threads and processes that the server, and everything else its user runs, may add."""

_NICENESS: Final = 5
"""Gives the server priority over code."""


@dataclass(frozen=True)
class ZygoteSpec:
    """The supervisor's settings for the zygote, sent once.

    Attributes:
        isolation: The isolation level's name.
        preload: Modules to import.
        shown: Files and folders that code may read.
        hidden: Paths below those that code may not read.
        links: Paths, without the leading slash, that link into the workspace.
        readable: The same as `shown`, as paths none of which contains a hidden one.
        scratch: A folder for files that imports write; None if the zygote has its own file system.
        privileged: Whether namespaces are made with root's privileges rather than those of a user namespace.
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
        limits: The fields of `sandbox.config.Limits`.
        uid: The user to become; None: no change.
        workdir: The workspace folder; None: the session has its own file system.
        snapshot: Whether each execution runs in a fork of the state before it.
        paced: Whether the session's init process stops and resumes its processes, which may leave their group.
    """

    limits: dict[str, Any]
    uid: int | None
    workdir: str | None
    snapshot: bool
    paced: bool


@dataclass
class Prepared:
    """The zygote's state that forks start from.

    Attributes:
        spec: The zygote's settings.
        proc: A descriptor of /proc, if that is not visible any more; closed in every fork.
        readable: Descriptors of the readable paths.
        rules: Landlock rules for them, by whether interpreters may execute programs.
        ids: User and group of the zygote.
        tasks: Number of processes and threads of this user at the start.
        forks: Number of live interpreters.
        base: Memory that a fork occupies at its start.
    """

    spec: ZygoteSpec
    proc: int | None = None
    readable: list[int] = field(default_factory=list)
    rules: dict[bool, list[bytes]] = field(default_factory=dict)
    ids: tuple[int, int] = (0, 0)
    tasks: int = 0
    forks: int = 0
    base: Footprint | None = None

    @property
    def has_init(self) -> bool:
        """Whether sessions have their own namespaces, with an init process that reports how the interpreter ended."""
        return self.spec.isolation == "namespaces"

    def settle(self) -> None:
        """Measure memory, ids and tasks, once everything is imported."""
        self.base = footprint(self.proc)
        self.ids = os.getuid(), os.getgid()
        if not self.has_init:
            self.tasks = count_tasks(os.getuid())


def prepare(spec: ZygoteSpec) -> Prepared:
    """Apply the zygote's part of the isolation level.

    At the level `namespaces` this returns in a child, which is the first process of its own pid namespace.
    """
    prepared = Prepared(spec)
    # When memory runs out, the kernel is to kill an interpreter, however small, and not the server. Forks inherit the
    # score. Written now, because a process that is not dumpable cannot open the file.
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
        # Sessions have their own users, which may not enter root's home, where Python may be installed.
        namespaces.uncover(spec.shown)
    # Once here rather than in every fork: the set only matters to executed programs, and the zygote executes none.
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
            # Programs expect to list all folders. In a root of our own only what is shown exists.
            listable = [_move_descriptor(landlock.open_path("/"))] if prepared.has_init else []
            prepared.rules = {
                False: landlock.prepare_rules(prepared.readable),
                True: landlock.prepare_rules(prepared.readable, listable, execute=True),
            }
    return prepared


def _fork_init() -> None:
    if process := os.fork():
        _wait_for(process, successors=False)
    libc.die_with_parent()


def _move_descriptor(descriptor: int) -> int:
    # A fork uses the low numbers for its streams.
    with libc.closing(descriptor):
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100)


def become_init(
    spec: ForkSpec, prepared: Prepared, control: int, stdout: int, stderr: int, *doors: int
) -> None:
    """Become the init process of a session's namespaces, and wait for the interpreter; return in the interpreter only.

    The init process lives as long as the session, and each page that it writes to costs memory, so it does as little as
    possible. The descriptors are those of `become_interpreter`; if the session is paced, the socket for that is the
    first of `doors`.
    """
    pacer = doors[0] if spec.paced else None
    cgroups.join(list(doors[spec.paced :]))
    os.write(control, ROOT_NOTICE)
    interpreter = os.fork()
    if interpreter:
        if spec.uid is not None:
            identity.drop_to(spec.uid, spec.uid)
        identity.drop_capabilities()
        if pacer is not None:
            _pace_and_wait(interpreter, pacer, successors=spec.snapshot)
        _wait_for(interpreter, successors=spec.snapshot)


def become_interpreter(
    spec: ForkSpec, prepared: Prepared, control: int, stdout: int, stderr: int, *doors: int
) -> None:
    """Become an interpreter, and serve requests.

    Args:
        spec: The interpreter's settings.
        prepared: The zygote's state.
        control: The control socket.
        stdout: The pipe for stdout.
        stderr: The pipe for stderr.
        doors: Descriptors to join the control group by, if any (`kernel.cgroups.join`).
    """
    parent = os.getppid()
    os.setsid()
    connection = arrange(control, stdout, stderr)
    connection.setblocking(True)
    if prepared.has_init:
        _settle(spec, prepared, connection)
    else:
        cgroups.join(list(doors))
        if spec.uid is not None:
            identity.drop_to(spec.uid, spec.uid)
        connection.send(ROOT_NOTICE)
        if spec.snapshot:
            # Forks replace the process that runs requests; this one stays, and is the one that the zygote waits for.
            libc.become_subreaper()
            if interpreter := os.fork():
                signal.signal(signal.SIGTERM, lambda *_: _end_group(interpreter))
                _die_with(parent, signal.SIGTERM)
                _wait_for(interpreter, successors=True)
            os.setpgid(0, 0)  # paused together with the code's processes, but not with the one that stays
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
            groups=spec.paced,
            shared_uid=shares_user,
        )
        seccomp.install(seccomp.assemble(policy))
    kind = BranchingRunner if spec.snapshot else RequestRunner
    runner = kind(connection, spec.limits["outputs_bytes"])
    runner.interrupts.install()
    connection.send(READY_NOTICE)
    # Interpreters must not share random numbers. Python's own generator reseeds in every fork.
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()
    if shares_user:
        tolerate_copy_errors()
    runner.serve()


def _wait_for(interpreter: int, *, successors: bool) -> NoReturn:
    """Reap children, and exit with the interpreter's code; if forks may replace it, with that of the last one."""
    libc.close_from(0)
    code = 0
    while True:
        code = _reap_one(interpreter, code, 0, successors=successors)


def _reap_one(interpreter: int, code: int, options: int, *, successors: bool) -> int:
    """Wait for a child and return its exit code; exit after the last one. ``code`` is that of the child before."""
    try:
        process, status = os.waitpid(-1, options)
    except ChildProcessError:
        os._exit(code)
    if process == 0:
        return -1
    ended = os.waitstatus_to_exitcode(status)
    code = BY_SIGNAL - ended if ended < 0 else ended
    if process == interpreter and not successors:
        os._exit(code)
    return code


def _pace_and_wait(interpreter: int, pacer: int, *, successors: bool) -> NoReturn:
    """Do as `_wait_for`, and stop or resume all processes of the namespace on request; confirm each request."""
    code = 0

    def reap(*_: object) -> None:
        nonlocal code
        while (ended := _reap_one(interpreter, code, os.WNOHANG, successors=successors)) >= 0:
            code = ended

    os.dup2(pacer, 0)
    libc.close_from(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, reap)
    libc.receive_only_sigchld()
    reap()
    while requests := os.read(0, 4096):  # a signal interrupts it for as long as the handler runs
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGCONT if requests.endswith(RESUME) else signal.SIGSTOP)
        os.write(0, requests)
    os._exit(code)  # the supervisor is gone


def _end_group(group: int) -> NoReturn:
    """Kill the interpreter's group, which a signal to this process's own does not reach, and exit."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    os._exit(1)


def _die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    libc.die_with_parent(number)
    if os.getppid() != parent:
        os._exit(1)


def _settle(spec: ForkSpec, prepared: Prepared, connection: socket.socket) -> None:
    uid, gid = prepared.ids if spec.uid is None else (spec.uid, spec.uid)
    privileged, limits = prepared.spec.privileged, spec.limits
    proc = None if privileged else prepared.proc
    namespaces.settle_session(privileged, uid, gid, limits["disk_bytes"], limits["files"], proc=proc)
    if privileged:
        identity.drop_to(uid, gid)
    with libc.closing(os.open(namespaces.WORKSPACE, os.O_RDONLY | os.O_DIRECTORY)) as workspace:
        socket.send_fds(connection, [WORKSPACE_NOTICE], [workspace])


def _confine(spec: ForkSpec, prepared: Prepared, workdir: str, *, shares_user: bool) -> None:
    limits = spec.limits
    apply_rlimits(
        **{name: limits[name] for name in ("memory_bytes", "file_bytes", "open_files", "processes")},
        # Tasks that the user's other processes have, or may come to have.
        existing_tasks=prepared.tasks + _SPARE_TASKS + prepared.forks * limits["processes"]
        if shares_user
        else 0,
        base=prepared.base,
    )
    libc.set_dumpable(False)
    if prepared.readable:
        writable = (workdir, *(path for path in namespaces.DEVICES if os.path.exists(path)))
        execute = limits["allow_subprocess"]
        landlock.restrict(prepared.rules[execute], writable, execute=execute)
    # Beyond the limit of open files too: the zygote's descriptors, that of /proc among them, have higher numbers.
    libc.close_from(CONTROL + 1)
    identity.drop_capabilities()


def tolerate_copy_errors() -> None:
    """Make `shutil` ignore modes and times that may not be set, rather than fail after copying the content."""
    for name in ("copymode", "copystat"):
        setattr(shutil, name, _tolerant(getattr(shutil, name)))


def _tolerant(copy: Any) -> Any:
    @wraps(copy)
    def tolerant(*args: Any, **kwargs: Any) -> None:
        with suppress(PermissionError):
            copy(*args, **kwargs)

    return tolerant
