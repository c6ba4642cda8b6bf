"""Where sessions' folders lie, on the levels that have no file system of their own for each session."""

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path
from typing import Final

from openenv_core.sandbox.removal import remove_below

PREFIX: Final = "ropewalk-sandbox-"
_LOCK: Final = ".lock"
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Scratch:
    """A folder of this process's own; its lock tells others that its owner lives."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Sessions with a user of their own come through, and see no other's name.
        self.path.chmod(0o711)
        self._lock = _locked(self.path)

    def make(self, name: str, owner: tuple[int, int] | None) -> tuple[int, Path]:
        """Make a session's folder; return a descriptor of it, and its path."""
        path = self.path / name
        path.mkdir(mode=0o700)
        if owner is not None:
            os.chown(path, *owner)
        return os.open(path, _FOLDER), path

    def close(self) -> None:
        """Remove it. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            remove(self.path)
            os.close(lock)


def sweep() -> None:
    """Remove the folders of owners that were killed before they could."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
            continue
        lock = _locked(path)
        if lock is not None:
            with contextlib.suppress(OSError):
                remove(path)
            os.close(lock)


def remove(path: Path) -> None:
    """Remove a folder with all that is in it."""
    with contextlib.suppress(FileNotFoundError):
        folder = os.open(path, _FOLDER)
        try:
            remove_below(folder, str(path))
        finally:
            os.close(folder)


def _locked(path: Path) -> int | None:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
