"""Sessions' folders: where they lie, how large they may become, how they are removed."""

import contextlib
import fcntl
import itertools
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_MOST_ROUNDS: Final = 1 << 20
"""How deep folders may be nested: each round brings the content of one level up."""

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Where there is no O_PATH, no code runs here either: but hosted backends import this package too.
_PLACE: Final = getattr(os, "O_PATH", 0) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_AT_ONCE: Final = 100_000
"""Entries that are looked at before they are removed; a folder that grows meanwhile could be listed for ever."""

_REFUSALS: Final = 100
"""Rounds in which something may have refused to go: whoever changes a folder meanwhile causes that too."""


def remove_below(folder: int, name: str | None, rounds: int = _MOST_ROUNDS) -> None:
    """Remove everything in a folder, and the folder. Blocks.

    Folders in it are moved up to it one by one, so that neither their depth nor the length of their paths matters.

    Args:
        folder: A descriptor of it.
        name: Its path; None leaves the folder itself.
        rounds: After so many it is given up, where somebody makes new entries as fast as they are removed.

    Raises:
        OSError: Something in it cannot be removed.
    """
    # Opened anew: another thread may still be listing it.
    folder = os.open(".", _FOLDER, dir_fd=folder)
    try:
        _empty_all(folder, rounds)
    finally:
        os.close(folder)
    if name is not None:
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(name)


def _empty_all(folder: int, rounds: int) -> None:
    fresh = (f".{secrets.token_hex(8)}-{number}" for number in itertools.count())
    refusals = 0
    for _ in range(rounds):
        entries = _some_of(folder)
        if not entries:
            return
        refused: OSError | None = None
        for entry in entries:
            try:
                _remove(entry, folder, fresh)
            except OSError as error:
                refused = error
        if refused is not None:
            refusals += 1
            if refusals >= _REFUSALS:
                raise refused
    raise OSError(f"expected a folder to be empty after {rounds} rounds, got one with new entries each time")


def _some_of(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in itertools.islice(entries, _AT_ONCE)]


def _remove(name: str, folder: int, fresh: Iterator[str]) -> None:
    if _unlink(name, folder):
        return
    below = _opened(name, folder)
    try:
        for inner in _some_of(below):
            if not _unlink(inner, below):
                # Moving a folder writes its "..", so it has to be writable itself.
                os.close(_opened(inner, below))
                os.rename(inner, next(fresh), src_dir_fd=below, dst_dir_fd=folder)
    finally:
        os.close(below)
    os.rmdir(name, dir_fd=folder)


def _opened(name: str, folder: int) -> int:
    """Open a folder, whatever its mode keeps its owner from; the mode does not any more."""
    place = os.open(name, _PLACE, dir_fd=folder)
    try:
        # What the name leads to by now may be a link to anywhere, and the mode of what that names be changed.
        os.chmod(f"/proc/self/fd/{place}", 0o700)
        return os.open(".", _FOLDER, dir_fd=place)
    finally:
        os.close(place)


def _unlink(name: str, folder: int) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    return True


PREFIX: Final = "ropewalk-sandbox-"
_LOCK: Final = ".lock"


class Scratch:
    """A folder of this process's own; its lock tells others that its owner lives."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Sessions with a user of their own come through, and see no other's name.
        self.path.chmod(0o711)
        self._lock = _locked(self.path)
        self._numbers = itertools.count(1)

    def make(self, owner: tuple[int, int] | None) -> tuple[int, str]:
        """Make a session's folder; return a descriptor of it, and its path."""
        path = str(self.path / str(next(self._numbers)))
        os.mkdir(path, mode=0o700)
        if owner is not None:
            os.chown(path, *owner)
        return os.open(path, _FOLDER), path

    def close(self) -> None:
        """Remove it. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _remove_folder(self.path)
            os.close(lock)


def sweep() -> None:
    """Remove the folders of owners that were killed before they could."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
            continue
        lock = _locked(path)
        if lock is not None:
            with contextlib.suppress(OSError):
                _remove_folder(path)
            os.close(lock)


def _remove_folder(path: Path) -> None:
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
