"""Writing files so that they survive a crash of the machine: synced to disk before they are renamed."""

import contextlib
import os
from pathlib import Path


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
    """Write a file by way of `NAME.partial`: whatever happens, its content is the previous one or the new one.

    Raises:
        OSError: It could not be written; the previous one is unchanged.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        write_synced(partial, content)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync(path.parent)
