"""A root of its own for the sandbox: what sessions may see, read-only, at the places where it always was."""

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import mounts

WORKSPACE = "/workspace"
DEVICES = ("null", "zero", "full", "random", "urandom")
PROC_FILES = ("/proc/cpuinfo", "/proc/meminfo")

_OLD = "/.old"
# The tree is built on a tmpfs, which needs some directory to be mounted on; it moves away from there.
_SCAFFOLDS = ("/tmp", "/mnt", "/dev", "/usr")
_MOST_LINKS = 40
_QUIET = mounts.NO_SETUID | mounts.NO_DEVICES
_SHUT = mounts.READ_ONLY | _QUIET


@dataclass(frozen=True)
class View:
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


def build_root(view: View, workdir: str = WORKSPACE) -> None:
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


def _build(view: View, workdir: str) -> None:
    base = next((path for path in _SCAFFOLDS if os.path.isdir(path)), None)
    if base is None:
        raise OSError(errno.ENOENT, f"building a root: expected one of {', '.join(_SCAFFOLDS)} to exist")
    mounts.tmpfs(base, _QUIET, mode="0755", size="1m")
    os.mkdir(base + _OLD, 0o700)
    mounts.pivot(base, base + _OLD)
    tree = _Tree()
    # A path comes after those above it, and is then there already.
    for path in sorted(set(view.paths), key=lambda path: (path.count("/"), path)):
        tree.show(path, _SHUT)
    for path in PROC_FILES:
        tree.show(path, _SHUT | mounts.NO_EXECUTION)
    for name in DEVICES:
        tree.show(f"/dev/{name}", mounts.NO_SETUID | mounts.NO_EXECUTION)
    for path in view.hidden:
        tree.hide(path)
    for path, content in view.files:
        tree.write(path, content)
    tree.directory(workdir)
    tree.link("/tmp", f"{workdir}/.tmp")
    mounts.detach(_OLD)
    os.rmdir(_OLD)
    mounts.set_flags("/", _SHUT)


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
        mounts.bind(_OLD + here, here, flags)
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
            mounts.tmpfs(real, _SHUT, mode="0555", size="4k", nr_inodes=2)
            return
        empty = "/.empty"
        os.close(os.open(empty, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))
        mounts.bind(empty, real, _SHUT)
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
