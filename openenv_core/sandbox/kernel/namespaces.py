"""Namespaces: entering them, and the mounts that build a session's view of the file system."""

import errno
import os
import signal
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePath

from . import libc

READ_ONLY = 0x1
NO_SETUID = 0x2
NO_DEVICES = 0x4
NO_EXECUTION = 0x8
_QUIET = NO_SETUID | NO_DEVICES
_SHUT = READ_ONLY | _QUIET

_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_MNT_DETACH = 2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000

WORKSPACE = "/workspace"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
PROC_FILES = ("/proc/cpuinfo", "/proc/meminfo")

OWN_PROC = "/.proc"
"""The mount point of each session's own procfs, which has the session's processes and no other file."""

_LINKS = {
    "/proc/self": f"{OWN_PROC}/self",
    "/proc/thread-self": f"{OWN_PROC}/thread-self",
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}
"""Links that need a procfs. Shells open `/dev/fd/63` for `<(...)`."""

_OLD = "/.old"
# The root is built on a tmpfs, which needs an existing directory as mount point until it is moved to /.
_SCAFFOLDS = ("/tmp", "/mnt", "/dev", "/usr")


def _make_private() -> None:
    """Stop mount propagation in both directions."""
    libc.call("mount", None, "/", None, _MS_REC | _MS_PRIVATE, None, step="making / private")


def tmpfs(target: str, flags: int, **options: int | str) -> None:
    """Mount an empty tmpfs."""
    data = ",".join(f"{name}={value}" for name, value in options.items())
    libc.call("mount", "tmpfs", target, "tmpfs", flags, data, step=f"mounting a tmpfs on {target} ({data})")


def _bind(source: str, target: str, flags: int) -> None:
    """Bind a file or a tree, including mounts below it, to another path.

    The flags are added to those of each mount: a mount from a more privileged namespace has locked flags, which a
    remount would have to repeat one by one.
    """
    libc.call("mount", source, target, None, _MS_BIND | _MS_REC, None, step=f"binding {source}")
    _set_flags(target, flags, recursive=True)


def _set_flags(target: str, flags: int, *, recursive: bool = False) -> None:
    # struct mount_attr: attr_set, attr_clr, propagation, userns_fd. These four flags have the same values as in
    # mount(2).
    attributes = struct.pack("=QQQQ", flags, 0, 0, 0)
    depth = _AT_RECURSIVE if recursive else 0
    step = f"setting flags {flags:#x} on the mount of {target}"
    libc.call("mount_setattr", _AT_FDCWD, target, depth, attributes, 32, step=step)


def detach(target: str) -> None:
    """Detach a mount and all mounts below it."""
    libc.call("umount2", target, _MNT_DETACH, step=f"detaching {target}")


def _make_mount_point(path: str, mode: int) -> None:
    """Make a mount point for binding a file or folder of a mode, and its parent folders."""
    if stat.S_ISDIR(mode):
        os.makedirs(path, 0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))


@contextmanager
def _passable_folders() -> Iterator[None]:
    # Every session's user has to be able to enter the folders made here.
    before = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(before)


def build_root(paths: Iterable[str], hidden: Iterable[str], links: Iterable[str] = ()) -> None:
    """Replace the root of this mount namespace by a read-only one that contains only these paths.

    It also has a few devices, two files of /proc, an empty directory for a session's workspace, and /tmp as a link into
    that, unless one of the paths is below /tmp. It has /dev/fd and its like if the kernel permits a procfs here: in a
    container that hides parts of /proc, only real root may mount one. Call `enter_outer` first, and `open_proc` if
    /proc is needed later.

    Args:
        paths: Files and directories to show read-only, with everything below them. Those that do not exist, or that
            this user cannot reach, are left out. Symbolic links on the way are reproduced; parent directories are new
            and contain only what is shown.
        hidden: Paths below these that are shown empty.
        links: Paths, without the leading slash, that become links to the same paths in the workspace, unless `paths`
            has them.
    """
    wanted = [(path, _SHUT) for path in paths]
    wanted += [(path, _SHUT | NO_EXECUTION) for path in PROC_FILES]
    wanted += [(path, NO_SETUID | NO_EXECUTION) for path in DEVICES]
    crossed: dict[str, str] = {}
    shown: dict[str, tuple[int, int]] = {}
    for path, flags in wanted:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            mode = os.stat(path).st_mode
            shown.setdefault(_resolve(path, crossed), (mode, flags))
    if "/" in shown:
        raise OSError(errno.EINVAL, "building a root: one of the paths is the root itself")
    with _passable_folders():
        base = next((path for path in _SCAFFOLDS if os.path.isdir(path)), None)
        if base is None:
            raise OSError(errno.ENOENT, f"building a root: expected one of {', '.join(_SCAFFOLDS)} to exist")
        tmpfs(base, _QUIET, mode="0755", size="1m")
        os.mkdir(base + _OLD, 0o700)
        libc.call("pivot_root", base, base + _OLD, step=f"pivoting into {base}")
        os.chdir("/")
        for path, (mode, flags) in shown.items():
            # A bind shows everything below it too.
            if shown.keys().isdisjoint(map(str, PurePath(path).parents)):
                _make_mount_point(path, mode)
                _bind(_OLD + path, path, flags)
        os.makedirs(WORKSPACE, 0o755, exist_ok=True)
        crossed.setdefault("/tmp", f"{WORKSPACE}/.tmp")
        if _mount_outer_proc():
            crossed |= _LINKS
        crossed = {f"/{name}": f"{WORKSPACE}/{name}" for name in links} | crossed
        for path, target in crossed.items():
            if not os.path.lexists(path):
                os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
                os.symlink(target, path)
        for path in hidden:
            _hide(path)
        detach(_OLD)
        os.rmdir(_OLD)
        _set_flags("/", _SHUT)


def _resolve(path: str, crossed: dict[str, str]) -> str:
    """Return an existing path without links, and add each link on the way with its target."""
    real = "/"
    for name in path.split("/"):
        if name == "..":
            real = os.path.dirname(real)
        elif name not in ("", "."):
            above, real = real, os.path.join(real, name)
            if os.path.islink(real):
                crossed[real] = os.readlink(real)
                real = _resolve(os.path.join(above, crossed[real]), crossed)
    return real


def _mount_own_proc() -> None:
    # Processes that the caller may not trace are hidden, such as a session's init. Since Linux 5.8.
    options = "subset=pid,hidepid=ptraceable"
    flags, step = _SHUT | NO_EXECUTION, f"mounting a procfs on {OWN_PROC}"
    libc.call("mount", "proc", OWN_PROC, "proc", flags, options, step=step)


def _mount_outer_proc() -> bool:
    """Mount a procfs for sessions to mount theirs over: a user namespace may mount one only if it sees another."""
    os.mkdir(OWN_PROC, 0o555)
    try:
        _mount_own_proc()
    except OSError:
        os.rmdir(OWN_PROC)
        return False
    return True


def _hide(path: str) -> None:
    """Mount an empty file or folder over a path that is shown."""
    real = os.path.realpath(path)
    if real == "/" or not os.path.lexists(real):
        return
    if os.path.isdir(real):
        tmpfs(real, _SHUT, mode="0555", size="4k", nr_inodes=2)
        return
    empty = "/.empty"
    os.close(os.open(empty, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))
    _bind(empty, real, _SHUT)
    # The mount keeps the file; its name is not needed.
    os.unlink(empty)


_NEW_MOUNTS = 0x0002_0000
_NEW_UTS = 0x0400_0000
_NEW_IPC = 0x0800_0000
_NEW_USERS = 0x1000_0000
_NEW_PIDS = 0x2000_0000
_NEW_NETWORK = 0x4000_0000
_ALL_BUT_USERS = _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_PIDS | _NEW_NETWORK


def open_proc() -> int:
    """Return a descriptor of /proc, for `settle_session` and `limits.footprint` after the root is replaced.

    It shows the machine's processes, so it must not be passed on to a session's code. `settle_session` closes it.
    """
    return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def enter_outer(*, privileged: bool) -> None:
    """Leave the machine's namespaces; called once, in the zygote's first process, which must have one thread.

    The caller's children, not the caller, are in the new pid namespace. The first child is its init process, and the
    namespace ends with it.

    Args:
        privileged: Whether to unshare as root, without a user namespace. Otherwise a user namespace is made, with the
            caller's uid and gid only.
    """
    if privileged:
        libc.call("unshare", _ALL_BUT_USERS, step="unshare of mounts, pids, network, ipc, uts")
    else:
        with libc.closing(open_proc()) as proc:
            uid, gid = os.getuid(), os.getgid()
            libc.call("unshare", _NEW_USERS | _ALL_BUT_USERS, step="unshare with a user namespace")
            _map_ids(proc, uid, gid)
    _make_private()


def fork_session(*, privileged: bool) -> int:
    """Fork a process into its own namespaces, as the init process of its pid namespace.

    This is one system call, without the work that Python does around os.fork(), so the child must fork the actual
    process by os.fork() and wait for it. The caller must have one thread.
    """
    flags = _ALL_BUT_USERS if privileged else _ALL_BUT_USERS | _NEW_USERS
    return libc.call("clone", flags | signal.SIGCHLD, 0, 0, 0, 0, step="clone into new namespaces")


def settle_session(
    privileged: bool,
    uid: int,
    gid: int,
    size_bytes: int,
    inodes: int,
    *,
    proc: int | None = None,
) -> None:
    """Mount a session's workspace and procfs, in a child of the process that `fork_session` made.

    The workspace is an empty tmpfs owned by the session, with a directory .tmp, and goes with its last process. The
    procfs covers the outer one, which shows other sessions.

    Args:
        privileged: As for `enter_outer`.
        uid: Owner of the workspace; if not privileged, the uid of the process that forked, which is not mapped yet.
        gid: Group of the workspace, as `uid`.
        size_bytes: Maximum size of all files together.
        inodes: Maximum number of files and directories.
        proc: From `open_proc`; required unless privileged. Closed here.
    """
    try:
        if not privileged:
            _map_ids(open_proc() if proc is None else proc, uid, gid)
    finally:
        if proc is not None:
            os.close(proc)
    if os.path.isdir(OWN_PROC):
        _mount_own_proc()
    tmpfs(WORKSPACE, NO_SETUID | NO_DEVICES, size=size_bytes, nr_inodes=inodes, mode="0700", uid=uid, gid=gid)
    temporary = f"{WORKSPACE}/.tmp"
    os.mkdir(temporary, 0o700)
    if privileged:
        os.chown(temporary, uid, gid)


def _map_ids(proc: int, uid: int, gid: int) -> None:
    """Map only its creator's outer uid and gid into this process's user namespace."""
    # While the process is not dumpable, the files below belong to root and cannot be opened.
    dumpable = libc.is_dumpable()
    if not dumpable:
        libc.set_dumpable(True)
    try:
        for name, content in (
            ("setgroups", "deny"),  # required before a group may be mapped
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            libc.write_file(f"self/{name}", content, dir_fd=proc)
    finally:
        if not dumpable:
            libc.set_dumpable(False)


def uncover(paths: Iterable[str]) -> None:
    """Make paths reachable for other users, read-only, by replacing closed parent folders by ones with nothing else.

    This happens in a new mount namespace, so that only this process and its children see it.
    """
    covered = _find_unreachable(paths)
    if not covered:
        return
    libc.call("unshare", _NEW_MOUNTS, step=f"making {', '.join(covered)} passable for other users")
    _make_private()
    with _passable_folders():
        for above, below in covered.items():
            descriptors = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in below}
            tmpfs(above, _QUIET, mode="0755", size="1m")
            for path, descriptor in descriptors.items():
                _make_mount_point(path, os.fstat(descriptor).st_mode)
                _bind(f"/proc/self/fd/{descriptor}", path, _SHUT)
                os.close(descriptor)
            _set_flags(above, READ_ONLY)


def _find_unreachable(paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the paths that other users cannot reach, by the first parent folder that they cannot enter."""
    covered: dict[str, list[str]] = {}
    for path in paths:
        real = os.path.realpath(path)
        parts = real.split("/")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth]) or "/"
            if not os.stat(above).st_mode & stat.S_IXOTH:
                covered.setdefault(above, []).append(real)
                break
    return covered
