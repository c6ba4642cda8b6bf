"""Removing what code has left in a folder, however it was nested, named or protected."""

import contextlib
import itertools
import os
import secrets
import stat
from collections.abc import Iterator
from typing import Final

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_below(folder: int, name: str | None) -> None:
    """Remove everything in a folder, and the folder. Blocks.

    Folders in it are moved up to it one by one, so that neither their depth nor the length of their paths matters.

    Args:
        folder: A descriptor of it.
        name: Its path; None leaves the folder itself.

    Raises:
        OSError: Something in it cannot be removed.
    """
    # Opened anew: another thread may still be listing it.
    folder = os.open(".", _FOLDER, dir_fd=folder)
    try:
        _empty_all(folder)
    finally:
        os.close(folder)
    if name is not None:
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(name)


def _empty_all(folder: int) -> None:
    fresh = (f".{secrets.token_hex(8)}-{number}" for number in itertools.count())
    while entries := os.listdir(folder):
        for entry in entries:
            if not _unlink(entry, folder):
                os.chmod(entry, 0o700, dir_fd=folder)
                _empty(entry, folder, fresh)
                os.rmdir(entry, dir_fd=folder)


def _empty(name: str, folder: int, fresh: Iterator[str]) -> None:
    below = os.open(name, _FOLDER, dir_fd=folder)
    try:
        for inner in os.listdir(below):
            if not _unlink(inner, below):
                # Moving a folder writes its "..", so it has to be writable itself.
                os.chmod(inner, 0o700, dir_fd=below)
                os.rename(inner, next(fresh), src_dir_fd=below, dst_dir_fd=folder)
    finally:
        os.close(below)


def _unlink(name: str, folder: int) -> bool:
    told = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISDIR(told.st_mode):
        return False
    os.unlink(name, dir_fd=folder)
    return True
