"""Writing files so that they survive a crash of the machine: synced to disk before they are renamed."""

import contextlib
import os
from pathlib import Path
from typing import Final

PARTIAL_SUFFIX: Final = ".partial"
"""Ends the name of a file that is being written."""


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and sync it to disk; its name is durable only after `sync` of its folder."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Sync a file's content, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file by way of a partial one: whatever happens, its content is the previous one or the new one.

    Raises:
        OSError: It could not be written; the previous one is unchanged.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        write_synced(partial, content)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync(path.parent)
