"""Namespaces: one set for the zygote and all of its sessions, one more for each session."""

import os
import signal

from . import libc, mounts
from .root import WORKSPACE, View, build_root

__all__ = ["WORKSPACE", "View", "build_root", "enter_outer", "fork_session", "open_proc", "settle_session"]

_NEW_MOUNTS = 0x0002_0000
_NEW_UTS = 0x0400_0000
_NEW_IPC = 0x0800_0000
_NEW_USERS = 0x1000_0000
_NEW_PIDS = 0x2000_0000
_NEW_NETWORK = 0x4000_0000
_ALL_BUT_USERS = _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_PIDS | _NEW_NETWORK


def open_proc() -> int:
    """A descriptor of /proc, for `settle_session` and `limits.footprint` once the root is another.

    It leads to the machine's processes: it must not reach a session's code. `settle_session` closes it.
    """
    return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def enter_outer(*, privileged: bool) -> None:
    """Leave the machine's namespaces: once, in the process that starts the zygote.

    Children, not the caller, are in the new pid namespace: the first one forked is its init, and the
    namespace ends with it. The process must have one thread.

    Args:
        privileged: True unshares as root, without a user namespace. False makes one in which the caller's
            own uid and gid are the only ones.

    Raises:
        OSError: The kernel refused; nothing has changed when the message says that unshare was refused.
    """
    if privileged:
        libc.call("unshare", _ALL_BUT_USERS, step="unshare of mounts, pids, network, ipc, uts")
    else:
        proc = open_proc()
        try:
            _enter_users(proc)
        finally:
            os.close(proc)
    mounts.make_private()


def fork_session(*, privileged: bool) -> int:
    """Fork a process into namespaces of its own, as the first one of its pid namespace.

    The kernel does it in one step, and Python does nothing of what it does around os.fork(): the child is to fork the
    process that does the work, with os.fork(), and to wait for it. The caller must have one thread.

    Args:
        privileged: As for `enter_outer`.

    Returns:
        The child's pid; 0 in the child.

    Raises:
        OSError: The kernel refused.
    """
    flags = _ALL_BUT_USERS if privileged else _ALL_BUT_USERS | _NEW_USERS
    return libc.call("clone", flags | signal.SIGCHLD, 0, 0, 0, 0, step="a process in namespaces of its own")


def settle_session(
    privileged: bool,
    uid: int,
    gid: int,
    size_bytes: int,
    inodes: int,
    *,
    proc: int | None = None,
    workdir: str = WORKSPACE,
) -> None:
    """Give a session a workspace of its own, in a child of the process that `fork_session` made.

    The workspace is an empty tmpfs that belongs to the session, with a directory .tmp; it goes with the last process of
    the session.

    Args:
        privileged: As for `enter_outer`.
        uid: Whose the workspace is; without privileges that of the process that forked, which has no number yet.
        gid: Likewise.
        size_bytes: The most that all files together may hold.
        inodes: The most files and directories.
        proc: From `open_proc`; needed without privileges. Closed here.
        workdir: Where the root has the directory for it.

    Raises:
        OSError: A step failed.
    """
    try:
        if not privileged:
            _map_ids(open_proc() if proc is None else proc, uid, gid)
    finally:
        if proc is not None:
            os.close(proc)
    mounts.tmpfs(
        workdir,
        mounts.NO_SETUID | mounts.NO_DEVICES,
        size=size_bytes,
        nr_inodes=inodes,
        mode="0700",
        uid=uid,
        gid=gid,
    )
    temporary = os.path.join(workdir, ".tmp")
    os.mkdir(temporary, 0o700)
    if privileged:
        os.chown(temporary, uid, gid)


def _enter_users(proc: int) -> None:
    """Unshare with a user namespace in which this uid and gid are themselves, and no other exists."""
    uid, gid = os.getuid(), os.getgid()
    libc.call("unshare", _NEW_USERS | _ALL_BUT_USERS, step="unshare with a user namespace")
    _map_ids(proc, uid, gid)


def _map_ids(proc: int, uid: int, gid: int) -> None:
    """Give this process's user namespace the uid and gid that its maker has outside, and no other."""
    # The files below belong to root while the process is not dumpable, and could not be opened.
    dumpable = libc.is_dumpable()
    if not dumpable:
        libc.set_dumpable(True)
    try:
        for name, content in (
            ("setgroups", "deny"),  # asked for before a group may be mapped
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            _write(proc, f"self/{name}", content)
    finally:
        if not dumpable:
            libc.set_dumpable(False)


def _write(proc: int, name: str, content: str) -> None:
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            os.write(descriptor, content.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, f"writing {content!r} to /proc/{name}: {error.strerror}") from None
