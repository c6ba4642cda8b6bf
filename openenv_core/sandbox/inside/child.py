"""From a fork of the zygote to an interpreter that may run anything: one wall after the other, then the code."""

import os
import shutil
import socket
import sys
from contextlib import suppress
from typing import Any, Final, NoReturn

from openenv_core.sandbox.inside.frames import PLACE, READY, ROOT
from openenv_core.sandbox.inside.runner import CONTROL, BranchingRunner, RequestRunner, arrange, furnish
from openenv_core.sandbox.inside.standing import Spec, Standing
from openenv_core.sandbox.kernel import cgroups, identity, landlock, libc, namespaces, seccomp
from openenv_core.sandbox.kernel.limits import apply_rlimits

BY_SIGNAL: Final = 128
"""Added to the signal that ended the interpreter."""


def wait_for(interpreter: int, *, successors: bool) -> NoReturn:
    """Bury whatever ends, and end with the interpreter.

    Args:
        interpreter: Its process.
        successors: It may hand over to others; then the last one counts.
    """
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


COPIED: Final = ("copymode", "copystat")


def ease_copying() -> None:
    """Have `shutil` copy without what may not be set, rather than fail once the content is there."""
    for name in COPIED:
        _ease(name, getattr(shutil, name))


def _ease(name: str, copy: Any) -> None:
    def tolerant(*args: Any, **kwargs: Any) -> None:
        with suppress(PermissionError):
            copy(*args, **kwargs)

    tolerant.__name__, tolerant.__doc__ = name, copy.__doc__
    setattr(shutil, name, tolerant)


NICENESS: Final = 5
"""Code waits for the server, not the server for code."""

DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/random")


def become_first(spec: Spec, standing: Standing, control: int, stdout: int, stderr: int, *doors: int) -> None:
    """In the first process of a session's name spaces: wait for the interpreter; return in that, a child.

    It lives as long as the session, and every page that it writes to is one more: it does next to nothing.

    Args:
        spec: What for.
        standing: What was prepared.
        control: To the supervisor.
        stdout: To be descriptor 1 of the interpreter.
        stderr: Likewise, 2.
        doors: Into the control group.
    """
    if doors:
        cgroups.join(list(doors))
    os.write(control, ROOT)
    interpreter = os.fork()
    if interpreter:
        if spec.uid is not None:
            identity.drop_to(spec.uid, spec.uid)
        identity.drop_capabilities()
        wait_for(interpreter, successors=spec.snapshot)


def become(spec: Spec, standing: Standing, control: int, stdout: int, stderr: int, *doors: int) -> None:
    """Become an interpreter; return only when there is nothing left to do.

    Args:
        spec: What for.
        standing: What was prepared.
        control: To the supervisor.
        stdout: To be descriptor 1.
        stderr: To be descriptor 2.
        doors: Into the control group.
    """
    parent = os.getppid()
    os.setsid()
    arrange(control, stdout, stderr)
    connection = socket.socket(fileno=CONTROL)
    connection.setblocking(True)
    if standing.has_init:
        _settle(spec, standing, connection)
    else:
        cgroups.join(list(doors))
        if spec.uid is not None:
            identity.drop_to(spec.uid, spec.uid)
        connection.send(ROOT)
        if spec.snapshot:
            # Heads come and go; this one stays, and is what the zygote knows.
            libc.become_subreaper()
            if interpreter := os.fork():
                _die_with(parent)
                wait_for(interpreter, successors=True)
            os.setpgid(0, 0)  # it is paused with all that the code forks, and the one that stays is not
    workdir = spec.workdir or namespaces.WORKSPACE
    furnish(workdir)
    _confine(spec, standing, workdir)
    if not standing.has_init and not spec.snapshot:
        _die_with(parent)
    os.nice(NICENESS)
    _filter(spec, standing)
    kind = BranchingRunner if spec.snapshot else RequestRunner
    runner = kind(connection, spec.limits["outputs_bytes"])
    runner.heed()
    connection.send(READY)
    _seed()
    if _shares_user(spec, standing):
        ease_copying()
    runner.serve()


def _die_with(parent: int) -> None:
    libc.die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def _settle(spec: Spec, standing: Standing, connection: socket.socket) -> None:
    uid, gid = standing.ids if spec.uid is None else (spec.uid, spec.uid)
    limits = spec.limits
    proc = None if standing.privileged else standing.proc
    namespaces.settle_session(standing.privileged, uid, gid, limits["disk_bytes"], limits["files"], proc=proc)
    if standing.privileged:
        identity.drop_to(uid, gid)
    workspace = os.open(namespaces.WORKSPACE, os.O_RDONLY | os.O_DIRECTORY)
    socket.send_fds(connection, [PLACE], [workspace])
    os.close(workspace)


def _confine(spec: Spec, standing: Standing, workdir: str) -> None:
    limits = spec.limits
    apply_rlimits(
        memory_bytes=limits["memory_bytes"],
        file_bytes=limits["file_bytes"],
        open_files=limits["open_files"],
        processes=limits["processes"],
        existing_tasks=standing.others(limits["processes"]) if _shares_user(spec, standing) else 0,
        base=standing.base,
    )
    libc.set_dumpable(False)
    if standing.readable:
        writable = (workdir, *(path for path in DEVICES if os.path.exists(path)))
        execute = limits["allow_subprocess"]
        readable = landlock.prepare(standing.readable, execute=True) if execute else standing.prepared
        landlock.restrict(landlock.LandlockRules(read_only=readable, writable=writable, execute=execute))
    # Not up to the limit, which is below the numbers of what the zygote holds: its descriptor of /proc among them.
    libc.close_from(CONTROL + 1)
    identity.drop_capabilities()


def _filter(spec: Spec, standing: Standing) -> None:
    libc.no_new_privileges()
    if standing.isolation == "process":
        return
    forks = spec.snapshot or spec.limits["allow_subprocess"]
    seccomp.install(
        seccomp.assemble(
            seccomp.SeccompPolicy(
                pid=None if forks else os.getpid(),
                allow_subprocess=spec.limits["allow_subprocess"],
                allow_fork=spec.snapshot,
                shared_uid=_shares_user(spec, standing),
            )
        )
    )


def _shares_user(spec: Spec, standing: Standing) -> bool:
    return spec.uid is None and not standing.has_init


def _seed() -> None:
    """Draw nothing random that other interpreters draw too. Python's own generator sees to itself in every fork."""
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()
