"""Making what lies below a private folder reachable for other users, without opening that folder."""

import os
import stat
from collections.abc import Iterable

from . import libc, mounts

_NEW_MOUNTS = 0x0002_0000
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
    mounts.make_private()
    umask = os.umask(0o022)  # the folders made here are for others to pass
    try:
        _show(hidden)
    finally:
        os.umask(umask)


def _show(hidden: dict[str, list[str]]) -> None:
    for above, below in hidden.items():
        held = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in below}
        mounts.tmpfs(above, mounts.NO_SETUID | mounts.NO_DEVICES, mode="0755", size="1m")
        for path, descriptor in held.items():
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                os.makedirs(path, 0o755, exist_ok=True)
            else:
                os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
            mounts.bind(
                f"/proc/self/fd/{descriptor}", path, mounts.READ_ONLY | mounts.NO_SETUID | mounts.NO_DEVICES
            )
            os.close(descriptor)
        mounts.set_flags(above, mounts.READ_ONLY)
