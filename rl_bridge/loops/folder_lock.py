"""One controller at a time writes to a run's folder."""

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
"""In a run's folder. It stays when the run ends: what counts is whether somebody has locked it."""

_LEFT: Final = {LOCK_FILE, PARTIAL_CONFIG_FILE}
"""What a run leaves that was killed before it had written its configuration: nothing that could be gone on with."""

_TAKEN: Final = (errno.EWOULDBLOCK, errno.EACCES)
_WITHOUT_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What file systems answer that have no locks: NFS without its lock service, Lustre without `-o flock`."""


def is_unused(folder: Path) -> bool:
    """Whether a new run may have the folder: there is none, or no run has come as far as to write anything there."""
    try:
        return {entry.name for entry in folder.iterdir()} <= _LEFT
    except FileNotFoundError:
        return True
    except OSError:  # it is no folder, or not ours to look into
        return False


@contextmanager
def folder_of_ones_own(folder: Path) -> Iterator[None]:
    """Have a run's folder to oneself for the length of the block. Who only reads from it need not ask.

    It is this process that has it, none of its children. The kernel gives it free when the process ends, however that
    comes about. Where the file system has no locks, a warning is all there is.

    Raises:
        RunInUseError: Another process has it.
        OSError: Nothing can be written there.
    """
    descriptor = _locked(folder)
    try:
        yield
    finally:
        if descriptor in _OPEN:  # not in a child that comes by here
            _OPEN.discard(descriptor)
            os.close(descriptor)


def _locked(folder: Path) -> int:
    path = folder / LOCK_FILE
    while True:
        # For writing, as NFS asks of who locks a file alone.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, folder)
            if _is_still(descriptor, path):
                _sign(descriptor)
                _OPEN.add(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # whoever had it has removed the folder, as a run does that could not begin


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            raise RunInUseError(_taken(descriptor, folder)) from None
        if error.errno not in _WITHOUT_LOCKS:
            raise
        logger.warning(
            "the file system of %s has no locks (%s): nothing keeps a second `ropewalk train` out of this run's "
            "folder, and two would spoil it; see to it that there is one",
            folder,
            error.strerror,
        )


def _is_still(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    """Write who has it: for people, nothing depends on it."""
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    note = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(note).encode(), 0)


def _taken(descriptor: int, folder: Path) -> str:
    try:
        note: dict[str, Any] = json.loads(os.pread(descriptor, 4096, 0))
        holder = f"process {note['pid']} on {note['host']} has it since {note['since']}"
    except (OSError, ValueError, TypeError, KeyError):  # it has begun this moment, or is no file of ours
        holder = "another process has it"
    return (
        f"expected the run's folder {str(folder)!r} to be free, {holder}; `ropewalk status --run {folder}` asks "
        "it how it stands. Wait for its end, or end it (SIGTERM), then resume; or train under another --name"
    )


_OPEN: Final = set[int]()


def _let_go() -> None:
    """A child has its parent's descriptors until it executes something else, and a lock lasts until all are closed."""
    while _OPEN:
        os.close(_OPEN.pop())


os.register_at_fork(after_in_child=_let_go)
