"""The lock of a run's folder: one controller at a time writes to it."""

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from rl_bridge.config import PARTIAL_CONFIG_FILE
from rl_bridge.errors import RunInUseError

logger = logging.getLogger(__name__)

LOCK_FILE: Final = "run.lock"
"""Lock file in a run's folder. It stays after the run; only the lock on it counts."""

_LEFTOVER_FILES: Final = {LOCK_FILE, PARTIAL_CONFIG_FILE}
"""Files of a run that was killed before it wrote its configuration, so that it cannot be resumed."""

_LOCKED_ERRNOS: Final = (errno.EWOULDBLOCK, errno.EACCES)
_UNSUPPORTED_ERRNOS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without locks: NFS without its lock service, Lustre without `-o flock`."""


def is_unused(folder: Path) -> bool:
    """Whether a new run may use the folder: it does not exist, or holds only files in `_LEFTOVER_FILES`."""
    try:
        return {entry.name for entry in folder.iterdir()} <= _LEFTOVER_FILES
    except OSError:  # there is none, or none that is a folder and readable
        return not os.path.lexists(folder)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a run's folder for writing within the block. Readers need no lock.

    This process holds the lock, its children do not. The kernel releases it when the process ends, however it ends. On
    a file system without locks only a warning is logged.

    Raises:
        RunInUseError: Another process holds the lock.
        OSError: The folder is not writable.
    """
    descriptor = _open_locked(folder)
    try:
        yield
    finally:
        if descriptor in _OPEN_DESCRIPTORS:  # false in a forked child, whose copy is closed already
            _OPEN_DESCRIPTORS.discard(descriptor)
            os.close(descriptor)


def _open_locked(folder: Path) -> int:
    path = folder / LOCK_FILE
    while True:
        # Opened for writing, as NFS requires for an exclusive lock.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, folder)
            if _is_same_file(descriptor, path):
                _write_holder(descriptor)
                _OPEN_DESCRIPTORS.add(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the last holder removed the folder, as a run does that could not start


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCKED_ERRNOS:
            raise RunInUseError(_describe_conflict(descriptor, folder)) from None
        if error.errno not in _UNSUPPORTED_ERRNOS:
            raise
        logger.warning(
            "the file system of %s has no locks (%s): nothing keeps a second `ropewalk train` out of this run's "
            "folder, and two would spoil it; see to it that there is one",
            folder,
            error.strerror,
        )


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _write_holder(descriptor: int) -> None:
    """Write the holder into the lock file, for people to read; nothing depends on it."""
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _describe_conflict(descriptor: int, folder: Path) -> str:
    try:
        holder_data: dict[str, Any] = json.loads(os.pread(descriptor, 4096, 0))
        holder = f"process {holder_data['pid']} on {holder_data['host']} has it since {holder_data['since']}"
    except (OSError, ValueError, TypeError, KeyError):  # not written yet, or not a file of ours
        holder = "another process has it"
    return (
        f"expected the run's folder {str(folder)!r} to be free, {holder}; `ropewalk status --run {folder}` asks "
        "it how it stands. Wait for its end, or end it (SIGTERM), then resume; or train under another --name"
    )


_OPEN_DESCRIPTORS: Final = set[int]()


def _close_in_child() -> None:
    """Close the locks' descriptors in a forked child, which would keep the locks as long as it lives."""
    while _OPEN_DESCRIPTORS:
        os.close(_OPEN_DESCRIPTORS.pop())


os.register_at_fork(after_in_child=_close_in_child)
