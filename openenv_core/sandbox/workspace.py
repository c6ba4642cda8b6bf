"""Workspaces of sessions, accessed from outside through descriptors: reading, limits, copies and removal."""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import itertools
import logging
import math
import os
import secrets
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

from openenv_core.sandbox.config import Limits
from openenv_core.sandbox.errors import FileRefusedError
from openenv_core.sandbox.kernel.libc import closing
from openenv_core.sandbox.kernel.namespaces import WORKSPACE
from openenv_core.sandbox.results import FileInfo

logger = logging.getLogger("openenv_core.sandbox")

_TEMPORARY: Final = ".tmp"
"""The folder for temporary files, which is not listed."""

_BRANCH_FOLDERS: Final = 3
"""Folders of a branch: for all temporary files, its own, and for its temporary files."""

_MAX_DEPTH: Final = 32
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_QUICK_ENTRIES: Final = 64
_QUICK_BYTES: Final = 256 << 10

_PART: Final = 1 << 20
"""Bytes of a file to read at once."""

_SCANNERS: Final = 2
"""Number of workspaces that a process hashes at once; the others wait, to leave the machine to other work."""


@cache
def _scanners() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_SCANNERS, "openenv-scan")


class _ScanTooLongError(Exception):
    """The workspace is too large to scan on the event loop."""


class _UncountableError(Exception):
    """A folder's content cannot be counted: it is nested too deep, or was made unreadable."""


class Workspace:
    """The files of one interpreter of a session.

    Args:
        folder: A descriptor of the folder; closed with the workspace.
        limits: The session's limits.
        owner: User and group of files written from outside; None: this process's own.
        bounded: Whether the file system itself enforces the limits.
        path: The folder's path, if it has to be removed; None if the code has its own file system, with the folder at
            `WORKSPACE`.
        removed: Called once the workspace and all its branches are closed and removed.
    """

    def __init__(
        self,
        folder: int,
        limits: Limits,
        owner: tuple[int, int] | None,
        *,
        bounded: bool,
        path: str | None = None,
        removed: Callable[[], None] | None = None,
    ) -> None:
        self._folder = folder
        self._closing = threading.Lock()
        self._limits = limits
        self._owner = owner
        self._path = path
        self._removed = removed
        self.inside = path or WORKSPACE
        self._first: Workspace | None = None  # of a branch: the workspace that it is a folder of
        self._branches = 0
        self._names = itertools.count(1)  # of branches
        self._closed = False
        self._known: dict[str, tuple[tuple[int, ...], FileInfo]] = {}
        self.bounded = bounded

    def put(self, path: str, data: bytes) -> FileInfo:
        """Write a file, creating missing folders. Blocks."""
        if len(data) > min(self._limits.file_bytes, self._limits.disk_bytes):
            raise FileRefusedError(path, f"{len(data)} bytes are more than a file may have")
        if not self.bounded and self._usage()[1] > self._limits.disk_bytes - len(data):
            raise FileRefusedError(path, f"the workspace may hold {self._limits.disk_bytes} bytes")
        with self._open(path, os.O_WRONLY | os.O_CREAT) as file:
            os.ftruncate(file, 0)
            if self._owner is not None:
                os.fchown(file, *self._owner)
            with open(file, "wb", closefd=False) as stream:
                stream.write(data)
            status = os.fstat(file)
        plain_path = "/".join(_parts(path))
        info = FileInfo(path=plain_path, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        self._known[plain_path] = (_fingerprint(status), info)
        return info

    def get(self, path: str) -> bytes:
        """Return a file's content. Blocks."""
        with self._reading(path) as file, open(file, "rb", closefd=False) as stream:
            return stream.read(self._limits.file_bytes)

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[int]:
        with self._open(path, os.O_RDONLY) as file:
            if (size := os.fstat(file).st_size) > self._limits.file_bytes:
                raise FileRefusedError(path, f"its {size} bytes are more than a file may have")
            yield file

    @contextlib.contextmanager
    def _open(self, path: str, flags: int) -> Iterator[int]:
        """Open a regular file; translate the errors of opening and using it."""
        *folders, name = _parts(path)
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with contextlib.ExitStack() as stack, _translate_errors(path):
            folder = self._descend(folders, stack, make=bool(flags & os.O_CREAT))
            file = stack.enter_context(closing(os.open(name, flags, 0o644, dir_fd=folder)))
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise FileRefusedError(path, "it is not a regular file")
            yield file

    def list(self) -> "list[FileInfo]":
        """Return the files, sorted by path, up to the limit of files. Blocks."""
        return sorted(self._scan(None).values(), key=lambda info: info.path)

    async def changes(self) -> tuple[FileInfo, ...]:
        """Return the files that are new or changed since the last scan, sorted by path."""
        before = {path: info for path, (_, info) in self._known.items()}
        try:
            now = self._scan(_QUICK_ENTRIES)
        except _ScanTooLongError:
            now = await asyncio.get_running_loop().run_in_executor(_scanners(), self._scan, None)
        return tuple(now[path] for path in sorted(now) if before.get(path) != now[path])

    def branch(self, *, fill: bool = True) -> "Workspace":
        """Return a workspace in an unlisted folder of the first workspace of the family. Blocks.

        Args:
            fill: Whether to copy the files; otherwise the folder stays empty.

        Raises:
            FileRefusedError: There is no space for a copy of the files.
        """
        first = self._first or self
        name = f"branch-{next(first._names)}"
        files = list(self._walk(include_all=False))
        if not self.bounded:
            first._require_space(name, [status for _, status in files])
        with contextlib.ExitStack() as stack, _translate_errors(name):
            inner = first._descend((_TEMPORARY, name), stack, make=True)
            # Bounded until it is filled: there is space, and looking for it again takes long.
            copy = Workspace(os.dup(inner), self._limits, self._owner, bounded=True)
            copy.inside = f"{first.inside}/{_TEMPORARY}/{name}"
            copy._first = first
        try:
            for path, status in files if fill else ():
                if stat.S_ISREG(status.st_mode):
                    copy.put(path, self.get(path))
        except BaseException:
            with contextlib.suppress(OSError):
                copy._remove(copy._folder)
            os.close(copy._folder)
            raise
        copy.bounded = self.bounded
        with first._closing:
            first._branches += 1
        return copy

    def _require_space(self, name: str, files: Sequence[os.stat_result]) -> None:
        """Raise unless a branch with copies of these files leaves the whole family within the limits."""
        count, size = self._usage()
        size += sum(max(status.st_size, status.st_blocks * 512) for status in files)
        if size > self._limits.disk_bytes or count + len(files) + _BRANCH_FOLDERS > self._limits.files:
            raise FileRefusedError(
                name, f"the workspace may hold {self._limits.disk_bytes} bytes and {self._limits.files} files"
            )

    async def is_overfull(self) -> bool:
        """Return whether the files exceed limits that the file system does not enforce itself."""
        if self.bounded:
            return False
        try:
            return self.exceeds_limits(_QUICK_ENTRIES)
        except _ScanTooLongError:
            return await asyncio.to_thread(self.exceeds_limits)

    def exceeds_limits(self, max_entries: int | None = None) -> bool:
        """Return whether the files exceed the limits of number, total size or depth. Blocks.

        Raises:
            _ScanTooLongError: There are more than `max_entries` entries.
        """
        count, size = self._usage(max_entries)
        return count > self._limits.files or size > self._limits.disk_bytes

    def _usage(self, max_entries: int | None = None) -> tuple[int, float]:
        """Return the number of files and folders and their size on disk, which is infinite if they are uncountable."""
        try:
            entries = itertools.islice(self._walk(include_all=True), max_entries and max_entries + 1)
            sizes = [status.st_blocks * 512 for _, status in entries]
        except _UncountableError:
            return 0, math.inf
        if max_entries is not None and len(sizes) > max_entries:
            raise _ScanTooLongError
        return len(sizes), sum(sizes)

    async def close(self) -> None:
        """Remove the files, once no branch of them is in use. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._remove_if_unused()

    async def _remove_if_unused(self) -> None:
        if self._branches or not self._closed or self._folder < 0:
            return
        folder, self._folder = self._folder, -1
        try:
            await asyncio.to_thread(self._remove, folder)
        except OSError as error:
            # No result depends on it, and the rest is removed with the sandbox.
            logger.warning("the files of a session were not removed: %s", error)
        finally:
            with self._closing:
                os.close(folder)
            if self._removed is not None:
                self._removed()
            if self._first is not None:
                with self._first._closing:
                    self._first._branches -= 1
                await self._first._remove_if_unused()

    def _remove(self, folder: int) -> None:
        if self._path is not None:
            remove_below(folder, self._path)
        if self._first is not None:
            # Code of related sessions may go on making folders here. Folders cannot be nested deeper than the limit of
            # files.
            remove_below(folder, None, 2 * self._limits.files)
            with contextlib.ExitStack() as stack:
                above = self._first._descend((_TEMPORARY,), stack, make=False)
                os.rmdir(os.path.basename(self.inside), dir_fd=above)

    def _scan(self, max_entries: int | None) -> dict[str, FileInfo]:
        files: dict[str, tuple[tuple[int, ...], FileInfo]] = {}
        hashed_bytes = 0
        for count, (path, status) in enumerate(self._walk(include_all=False), 1):
            if max_entries is not None and count > max_entries:
                raise _ScanTooLongError
            if not stat.S_ISREG(status.st_mode):
                continue
            fingerprint, known = _fingerprint(status), self._known.get(path)
            if known is not None and known[0] == fingerprint:
                files[path] = known
                continue
            hashed_bytes += status.st_size
            if max_entries is not None and hashed_bytes > _QUICK_BYTES:
                raise _ScanTooLongError
            if hashed_bytes > self._limits.disk_bytes:
                continue  # a sparse file: its size alone exceeds the limit of all files together
            with contextlib.suppress(OSError, FileRefusedError):
                files[path] = (fingerprint, self._read_file_info(path))
        self._known = files
        return {path: info for path, (_, info) in files.items()}

    def _read_file_info(self, path: str) -> FileInfo:
        """Return a file's info, hashed piece by piece: a sparse file is large, and other code may have made it."""
        digest, size = hashlib.sha256(), 0
        with self._reading(path) as file:
            while data := os.read(file, min(self._limits.file_bytes - size, _PART)):
                digest.update(data)
                size += len(data)
        return FileInfo(path=path, size=size, sha256=digest.hexdigest())

    def _walk(self, *, include_all: bool) -> Iterator[tuple[str, os.stat_result]]:
        # Folders are opened one at a time, so that deep nesting cannot exhaust descriptors.
        left: list[tuple[str, ...]] = [()]
        count = 0
        while left:
            parts = left.pop()
            with contextlib.ExitStack() as stack:
                try:
                    folder = self._descend(parts, stack, make=False)
                    entries = stack.enter_context(os.scandir(folder))
                except PermissionError:
                    if include_all:
                        raise _UncountableError from None
                    continue
                except OSError:
                    continue
                for entry in entries:
                    if not parts and entry.name == _TEMPORARY and not include_all:
                        continue
                    count += 1
                    if count > 2 * self._limits.files:
                        return
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    entry_parts = (*parts, os.fsencode(entry.name).decode("utf-8", "surrogateescape"))
                    if stat.S_ISDIR(status.st_mode):
                        if len(entry_parts) <= _MAX_DEPTH:
                            left.append(entry_parts)
                        elif include_all:
                            raise _UncountableError
                    path = "/".join(entry_parts)
                    if include_all or path.isprintable():
                        yield path, status

    def _descend(self, parts: Sequence[str], stack: contextlib.ExitStack, *, make: bool) -> int:
        # Reopened, because two threads that list through one descriptor would each see a part. The lock prevents use of
        # a descriptor number that was closed meanwhile and may belong to another session.
        with self._closing:
            folder = stack.enter_context(closing(os.open(".", _FOLDER, dir_fd=self._folder)))
        for name in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=folder)
                    if self._owner is not None:
                        os.chown(name, *self._owner, dir_fd=folder, follow_symlinks=False)
            folder = stack.enter_context(closing(os.open(name, _FOLDER, dir_fd=folder)))
        return folder


def _parts(path: str) -> tuple[str, ...]:
    if not path or "\0" in path or len(path) > 1024 or not path.isprintable():
        raise FileRefusedError(path[:200], "expected a relative path of printable characters")
    pure = PurePosixPath(path)
    parts = pure.parts
    if pure.is_absolute() or ".." in parts or not parts:
        raise FileRefusedError(path, "expected a path inside of the workspace, relative to it")
    if len(parts) > _MAX_DEPTH or any(len(name.encode()) > 255 for name in parts):
        raise FileRefusedError(path, "it is too deep, or a name in it is too long")
    return parts


def _fingerprint(status: os.stat_result) -> tuple[int, ...]:
    # Code can set a file's mtime, but not its ctime.
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@contextlib.contextmanager
def _translate_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or "it cannot be opened").lower()
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            reason = "a part of it is a link, or not a folder"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason = "the workspace is full"
        raise FileRefusedError(path, reason) from None


DISK_POLL_INTERVAL_S: Final = 0.25
"""Seconds between two scans. Code can exceed its limit by as much as it can write in this time."""


@contextlib.contextmanager
def watch_disk(workspace: Workspace, on_exceeded: Callable[[], None]) -> Iterator[None]:
    """Poll a workspace's limits during one execution; a short one ends before the first poll."""

    async def poll() -> None:
        exceeds = False
        while not exceeds:
            await asyncio.sleep(DISK_POLL_INTERVAL_S)
            exceeds = await asyncio.to_thread(workspace.exceeds_limits)
        on_exceeded()

    if workspace.bounded:
        yield
        return
    polling = asyncio.create_task(poll())
    try:
        yield
    finally:
        polling.cancel()


_MAX_ROUNDS: Final = 1 << 20
"""Maximum nesting of folders that can be removed: each round moves the content of one level up."""

# Platforms without O_PATH cannot run the sandbox, but hosted backends import this package there too.
_FOLDER_FLAGS: Final = getattr(os, "O_PATH", 0) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_ENTRIES_PER_PASS: Final = 100_000
"""Entries to list before removing them; a folder that grows meanwhile could be listed for ever."""

_MAX_REFUSALS: Final = 100
"""Rounds with failed removals before giving up: code that changes a folder meanwhile causes failures too."""


def remove_below(folder: int, name: str | None, rounds: int = _MAX_ROUNDS) -> None:
    """Remove a folder and everything in it. Blocks.

    Folders in it are moved up into it one by one, so that neither depth nor path length matters.

    Args:
        folder: A descriptor of the folder.
        name: The folder's path; None keeps the folder itself.
        rounds: Rounds before giving up, in case new entries are made as fast as they are removed.

    Raises:
        OSError: An entry cannot be removed.
    """
    # Reopened: another thread may still be listing it.
    with closing(os.open(".", _FOLDER, dir_fd=folder)) as own:
        _empty_all(own, rounds)
    if name is not None:
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(name)


def _empty_all(folder: int, rounds: int) -> None:
    fresh = (f".{secrets.token_hex(8)}-{number}" for number in itertools.count())
    refusals = 0
    for _ in range(rounds):
        entries = _list_some(folder)
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
            if refusals >= _MAX_REFUSALS:
                raise refused
    raise OSError(f"expected a folder to be empty after {rounds} rounds, got one with new entries each time")


def _list_some(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in itertools.islice(entries, _ENTRIES_PER_PASS)]


def _remove(name: str, folder: int, fresh: Iterator[str]) -> None:
    if _unlink(name, folder):
        return
    with closing(_open_folder(name, folder)) as subfolder:
        for inner in _list_some(subfolder):
            if not _unlink(inner, subfolder):
                # Moving a folder writes its "..", so the folder itself has to be writable.
                os.close(_open_folder(inner, subfolder))
                os.rename(inner, next(fresh), src_dir_fd=subfolder, dst_dir_fd=folder)
    os.rmdir(name, dir_fd=folder)


def _open_folder(name: str, folder: int) -> int:
    """Open a folder, after giving its owner all permissions."""
    with closing(os.open(name, _FOLDER_FLAGS, dir_fd=folder)) as descriptor:
        # Changed through the descriptor: by now the name may be a link, and chmod would follow it anywhere.
        os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
        return os.open(".", _FOLDER, dir_fd=descriptor)


def _unlink(name: str, folder: int) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    return True


PREFIX: Final = "ropewalk-sandbox-"
_LOCK: Final = ".lock"


class Scratch:
    """A folder for this process's workspaces; its lock shows other processes that its owner is alive."""

    def __init__(self) -> None:
        sweep()
        # Under another name until it is locked: other processes may sweep meanwhile.
        folder = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
        # Sessions with their own users may pass through, but not list the other sessions.
        folder.chmod(0o711)
        self._lock = _locked(folder)
        self.path = folder.rename(folder.with_name(folder.name.removeprefix(".")))
        self._numbers = itertools.count(1)

    def make(self, owner: tuple[int, int] | None) -> tuple[int, str]:
        """Make a session's folder; return a descriptor of it and its path."""
        path = str(self.path / str(next(self._numbers)))
        os.mkdir(path, mode=0o700)
        if owner is not None:
            os.chown(path, *owner)
        return os.open(path, _FOLDER), path

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _remove_folder(self.path)
            os.close(lock)


def sweep() -> None:
    """Remove folders whose owners were killed before they could do so."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # its owner may be removing it
            status = path.lstat()
            own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if own and (lock := _locked(path)) is not None:
                with closing(lock):
                    _remove_folder(path)


def _remove_folder(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError), closing(os.open(path, _FOLDER)) as folder:
        remove_below(folder, str(path))


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
