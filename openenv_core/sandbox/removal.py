"""Removing what code has left in a folder, however it was nested, named or protected.

The code may still live and change all of it meanwhile: no name is trusted to be what it was a moment before.
"""

import contextlib
import itertools
import os
import secrets
from collections.abc import Iterator
from typing import Final

MOST_ROUNDS: Final = 1 << 20
"""How deep folders may be nested: each round brings the content of one level up."""

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Where there is no O_PATH, no code runs here either: but hosted backends import this package too.
_PLACE: Final = getattr(os, "O_PATH", 0) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_AT_ONCE: Final = 100_000
"""Entries that are looked at before they are removed; a folder that grows meanwhile could be listed for ever."""

_REFUSALS: Final = 100
"""Rounds in which something may have refused to go: whoever changes a folder meanwhile causes that too."""


def remove_below(folder: int, name: str | None, rounds: int = MOST_ROUNDS) -> None:
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
