"""Name spaces: what is entered, mounted, hidden and uncovered in them."""

import ctypes
import errno
import os
import signal
import stat
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from . import libc

__all__ = [
    "WORKSPACE",
    "RootView",
    "build_root",
    "enter_outer",
    "fork_session",
    "open_proc",
    "settle_session",
]

READ_ONLY = 0x1
NO_SETUID = 0x2
NO_DEVICES = 0x4
NO_EXECUTION = 0x8

_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_MNT_DETACH = 2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None, step: str
) -> None:
    libc.call(
        "mount",
        None if source is None else os.fsencode(source),
        os.fsencode(target),
        None if kind is None else kind.encode(),
        flags,
        None if data is None else data.encode(),
        step=step,
    )


def make_private(target: str = "/") -> None:
    """Keep every later mount, here and elsewhere, on its own side."""
    _mount(None, target, None, _MS_REC | _MS_PRIVATE, None, f"making {target} private")


def tmpfs(target: str, flags: int, **options: int | str) -> None:
    """Mount an empty tmpfs."""
    data = ",".join(f"{name}={value}" for name, value in options.items())
    _mount("tmpfs", target, "tmpfs", flags, data, f"mounting a tmpfs on {target} ({data})")


def bind(source: str, target: str, flags: int) -> None:
    """Show a file or a tree, with what is mounted beneath it, at another place.

    The flags are added to whatever each mount has: one that came from a more privileged namespace keeps the
    flags that are locked there, which a remount would have to repeat one by one.
    """
    _mount(source, target, None, _MS_BIND | _MS_REC, None, f"binding {source}")
    set_flags(target, flags, recursive=True)


def set_flags(target: str, flags: int, *, recursive: bool = False) -> None:
    """Add flags to a mount, and to those beneath it."""
    # struct mount_attr: attr_set, attr_clr, propagation, userns_fd. The values of these four flags are those
    # of mount(2).
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", flags, 0, 0, 0), 32)
    libc.call(
        "mount_setattr",
        _AT_FDCWD,
        os.fsencode(target),
        _AT_RECURSIVE if recursive else 0,
        attributes,
        32,
        step=f"setting flags {flags:#x} on the mount of {target}",
    )


def pivot(new_root: str, put_old: str) -> None:
    """Make a mount the root of this namespace, with the old one beneath it."""
    step = f"pivoting into {new_root}"
    libc.call("pivot_root", os.fsencode(new_root), os.fsencode(put_old), step=step)
    os.chdir("/")


def detach(target: str) -> None:
    """Take a mount and all beneath it out of sight."""
    libc.call("umount2", os.fsencode(target), _MNT_DETACH, step=f"detaching {target}")


WORKSPACE = "/workspace"
DEVICES = ("null", "zero", "full", "random", "urandom")
PROC_FILES = ("/proc/cpuinfo", "/proc/meminfo")

_OLD = "/.old"
# The tree is built on a tmpfs, which needs some directory to be mounted on; it moves away from there.
_SCAFFOLDS = ("/tmp", "/mnt", "/dev", "/usr")
_MOST_LINKS = 40
_QUIET = NO_SETUID | NO_DEVICES
_SHUT = READ_ONLY | _QUIET


@dataclass(frozen=True)
class RootView:
    """What of the machine is in the new root.

    Attributes:
        paths: Files and directories that are shown, read-only, with all beneath. Those that do not exist,
            or that this user cannot reach, are left out. Symbolic links on the way are reproduced;
            directories above are fresh, and empty but for what else is shown.
        hidden: What is shown empty nevertheless, beneath one of the paths.
        files: Small files that are made up, by path: their directories must not lie beneath one of the paths.
    """

    paths: Sequence[str]
    hidden: Sequence[str] = ()
    files: Sequence[tuple[str, bytes]] = field(default=(), repr=False)


def build_root(view: RootView, workdir: str = WORKSPACE) -> None:
    """Replace the root of this mount namespace by a read-only one that holds the view alone.

    It has a few devices, two files of /proc and no more of it, an empty directory for a session's workspace,
    and /tmp as a link into that, unless something of the view lies beneath /tmp. Needs `enter_outer`; open
    what must be reached later (`namespaces.open_proc`) before.

    Raises:
        OSError: A step failed; the process is then in a half-built root and can only end.
    """
    # Every user that a session runs as walks through these directories.
    before = os.umask(0o022)
    try:
        _build(view, workdir)
    finally:
        os.umask(before)


def _build(view: RootView, workdir: str) -> None:
    base = next((path for path in _SCAFFOLDS if os.path.isdir(path)), None)
    if base is None:
        raise OSError(errno.ENOENT, f"building a root: expected one of {', '.join(_SCAFFOLDS)} to exist")
    tmpfs(base, _QUIET, mode="0755", size="1m")
    os.mkdir(base + _OLD, 0o700)
    pivot(base, base + _OLD)
    tree = _Tree()
    # A path comes after those above it, and is then there already.
    for path in sorted(set(view.paths), key=lambda path: (path.count("/"), path)):
        tree.show(path, _SHUT)
    for path in PROC_FILES:
        tree.show(path, _SHUT | NO_EXECUTION)
    for name in DEVICES:
        tree.show(f"/dev/{name}", NO_SETUID | NO_EXECUTION)
    for path in view.hidden:
        tree.hide(path)
    for path, content in view.files:
        tree.write(path, content)
    tree.directory(workdir)
    tree.link("/tmp", f"{workdir}/.tmp")
    detach(_OLD)
    os.rmdir(_OLD)
    set_flags("/", _SHUT)


class _Tree:
    """The new root while it is built, with the old one beneath `_OLD`."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def show(self, path: str, flags: int) -> None:
        """Bind a path of the old root at the same place."""
        try:
            here = self._walk(path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return
        if here == "/":
            raise OSError(errno.EINVAL, f"building a root: {path} is the whole machine")
        if self._is_shown(here):
            return
        if stat.S_ISDIR(os.stat(_OLD + here).st_mode):
            os.makedirs(here, 0o755, exist_ok=True)
        else:
            os.close(os.open(here, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        bind(_OLD + here, here, flags)
        self._shown.add(here)

    def _is_shown(self, path: str) -> bool:
        while path != "/":
            if path in self._shown:
                return True
            path = os.path.dirname(path)
        return False

    def _walk(self, path: str) -> str:
        """Where a path leads, with the directories above it made and the links on its way reproduced."""
        here, todo, links = "/", _parts(path), 0
        while todo:
            part = todo.pop(0)
            if part == "..":
                here = os.path.dirname(here)
                continue
            above, here = here, os.path.join(here, part)
            if stat.S_ISLNK(os.lstat(_OLD + here).st_mode):
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, f"building a root: {path} goes through too many links")
                target = os.readlink(_OLD + here)
                if not self._is_shown(here) and not os.path.lexists(here):
                    os.symlink(target, here)
                here = "/" if target.startswith("/") else above
                todo = _parts(target) + todo
            elif todo and not self._is_shown(here):
                os.makedirs(here, 0o755, exist_ok=True)
        return here

    def hide(self, path: str) -> None:
        """Put something empty on a path that the view shows."""
        real = os.path.realpath(path)
        if real == "/" or not os.path.lexists(real):
            return
        if os.path.isdir(real):
            tmpfs(real, _SHUT, mode="0555", size="4k", nr_inodes=2)
            return
        empty = "/.empty"
        os.close(os.open(empty, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))
        bind(empty, real, _SHUT)
        # Its mount keeps it; the name is not needed.
        os.unlink(empty)

    def write(self, path: str, content: bytes) -> None:
        """Make up a file, unless the view has one there."""
        if os.path.lexists(path):
            return
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
        try:
            os.write(descriptor, content)
        finally:
            os.close(descriptor)

    def directory(self, path: str) -> None:
        """Make an empty directory."""
        os.makedirs(path, 0o755, exist_ok=True)

    def link(self, path: str, target: str) -> None:
        """Make a symbolic link, unless the view has something there."""
        try:
            os.symlink(target, path)
        except FileExistsError:
            # Something of the view lies beneath: its parents are empty directories of a read-only root.
            return


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


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
    make_private()


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
    tmpfs(workdir, NO_SETUID | NO_DEVICES, size=size_bytes, nr_inodes=inodes, mode="0700", uid=uid, gid=gid)
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


_OTHERS_ENTER = stat.S_IXOTH


def covered(paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the paths that other users cannot reach, by the first folder on the way that keeps them out."""
    found: dict[str, list[str]] = {}
    for path in paths:
        real = os.path.realpath(path)
        parts = real.split("/")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth]) or "/"
            if not os.stat(above).st_mode & _OTHERS_ENTER:
                found.setdefault(above, []).append(real)
                break
    return found


def uncover(paths: Iterable[str]) -> None:
    """Show paths where they are, read-only, with fresh folders above them that hold nothing else.

    In a mount namespace of this process's own, which is made here; nobody else sees a difference.

    Raises:
        OSError: The process may not do that.
    """
    hidden = covered(paths)
    if not hidden:
        return
    libc.call("unshare", _NEW_MOUNTS, step=f"making {', '.join(hidden)} passable for other users")
    make_private()
    umask = os.umask(0o022)  # the folders made here are for others to pass
    try:
        _show(hidden)
    finally:
        os.umask(umask)


def _show(hidden: dict[str, list[str]]) -> None:
    for above, below in hidden.items():
        held = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in below}
        tmpfs(above, NO_SETUID | NO_DEVICES, mode="0755", size="1m")
        for path, descriptor in held.items():
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                os.makedirs(path, 0o755, exist_ok=True)
            else:
                os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
            bind(f"/proc/self/fd/{descriptor}", path, READ_ONLY | NO_SETUID | NO_DEVICES)
            os.close(descriptor)
        set_flags(above, READ_ONLY)
