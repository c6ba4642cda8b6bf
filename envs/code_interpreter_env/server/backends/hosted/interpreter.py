"""An interpreter somewhere else: turns, counts, losses and files, the same whoever runs it."""

import asyncio
import base64
import binascii
import hashlib
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox import (
    CodeError,
    Execution,
    FileInfo,
    FileRefusedError,
    Limits,
    SandboxClosedError,
    SandboxFailureError,
    SandboxUnavailableError,
    Status,
)
from openenv_core.sandbox.results import EXIT_ERROR, EXIT_KILLED, EXIT_OK, EXIT_SANDBOX, EXIT_TIMEOUT

from .collector import Collector, ErrandUnansweredError, HostFailureError
from .errand import Errand, Listing, checked_path

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")

_LAST_LINE: Final = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?::\s*(?P<value>.*))?", re.DOTALL)

MOST_TRACEBACK_CHARS: Final = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionEnd:
    """The end of an execution; fields as in `Execution`.

    Attributes:
        files: None where whoever ran the code does not say, and the interpreter is to be asked.
    """

    status: Status = "ok"
    exit_code: int = EXIT_OK
    error: CodeError | None = None
    state_lost: bool = False
    reason: str | None = None
    signal: int | None = None
    max_rss_bytes: int | None = None
    files: tuple[FileInfo, ...] | None = None


def raised(error: CodeError) -> ExecutionEnd:
    """Return the verdict on code that ended with an exception; `SystemExit` is told by its code."""
    if error.ename == "MemoryError":
        return ExecutionEnd(status="memory", exit_code=EXIT_ERROR, error=error)
    if error.ename != "SystemExit":
        return ExecutionEnd(status="error", exit_code=EXIT_ERROR, error=error)
    carried = error.evalue.strip()
    if carried in ("", "None", "0"):
        return ExecutionEnd()
    number = int(carried) if re.fullmatch(r"-?\d{1,9}", carried) else EXIT_ERROR
    return ExecutionEnd(status="error", exit_code=number & 0xFF or EXIT_ERROR, error=error)


def overdue(reason: str, *, state_lost: bool) -> ExecutionEnd:
    """Return the verdict on code that took too long."""
    return ExecutionEnd(status="timeout", exit_code=EXIT_TIMEOUT, state_lost=state_lost, reason=reason)


def flooded(reason: str, *, state_lost: bool) -> ExecutionEnd:
    """Return the verdict on code that wrote too much."""
    return ExecutionEnd(status="output_limit", exit_code=EXIT_KILLED, state_lost=state_lost, reason=reason)


def killed(reason: str) -> ExecutionEnd:
    """Return the verdict on code whose interpreter died under it."""
    return ExecutionEnd(status="killed", exit_code=EXIT_KILLED, state_lost=True, reason=reason)


def failed(reason: str, state_lost: bool) -> ExecutionEnd:
    """Return the verdict on code that had no chance."""
    return ExecutionEnd(status="sandbox_error", exit_code=EXIT_SANDBOX, state_lost=state_lost, reason=reason)


def error_of(text: str) -> CodeError:
    """Read an exception from a traceback's text, whose last line names it."""
    lines = plain(text[-MOST_TRACEBACK_CHARS:]).strip("\n").split("\n")
    for index in range(len(lines) - 1, -1, -1):
        # A message may have lines of its own; the line that names the class begins at the margin.
        match = _LAST_LINE.fullmatch("\n".join(lines[index:]).strip())
        if match is not None and not lines[index].startswith((" ", "\t")):
            if match["value"] is None and index < len(lines) - 1:
                continue
            return CodeError(ename=match["name"], evalue=match["value"] or "", traceback=tuple(lines))
    return CodeError(ename="Exception", evalue=lines[-1] if lines else "", traceback=tuple(lines))


def plain(text: str) -> str:
    """Return a text without its colours, and without what no encoder could write."""
    clean = text if text.isascii() else text.encode("utf-8", "replace").decode()
    return _COLOURS.sub("", clean)


ERRAND_TIMEOUT_S: Final = 20.0
"""How long our own code in an interpreter may take."""

PIECE_BYTES: Final = 1 << 20
"""How much of a file travels at once."""


class HostedInterpreter(ABC):
    """One session's interpreter. A subclass says how code gets to it; everything is asked one by one.

    An interpreter that is lost, or whose execution was cancelled half-way, is replaced by a fresh one before the next
    execution. Where no result has told of the loss yet, that next execution runs nothing and tells it.

    Args:
        limits: Of the session. Time and output are bounded here; memory, disk and processes are the host's.
        packages: Imported at the start.
        isolation: What the code runs behind.
        report_files: Whether each execution is followed by a look at the files.
    """

    def __init__(
        self, limits: Limits, packages: tuple[str, ...], *, isolation: str, report_files: bool
    ) -> None:
        self._limits = limits
        self._packages = packages
        self._isolation = isolation
        self._report_files = report_files
        self._session_id = secrets.token_hex(8)
        self._turn = asyncio.Lock()
        self._closed = False
        self._count = 0
        self._lost = False
        self._untold = False
        self._why = ""
        self._root = ""
        self._leftovers: list[str] = []
        self._listing = Listing(limits)

    @property
    def session_id(self) -> str:
        """Its name here; whoever runs the code may have others."""
        return self._session_id

    @property
    def isolation(self) -> str:
        """What the code runs behind."""
        return self._isolation

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @abstractmethod
    async def _run(
        self, code: str, collector: Collector, timeout_s: float, stdin: str | None
    ) -> ExecutionEnd:
        """Run code, and have the collector hear what it writes.

        Raises:
            HostFailureError: The infrastructure failed.
        """

    @abstractmethod
    async def _ask(self, errand: Errand, timeout_s: float) -> str:
        """Have our own code run, and return all that came back.

        Raises:
            HostFailureError: The infrastructure failed.
        """

    @abstractmethod
    async def _begin(self) -> None:
        """Let the interpreter go that there is, if any, and get a fresh one with a workspace.

        Raises:
            HostFailureError: None can be had.
        """

    @abstractmethod
    async def _end(self) -> None:
        """Let the interpreter go. Raises nothing."""

    async def open(self) -> None:
        """Get the first interpreter.

        Raises:
            HostFailureError: None can be had.
            ConfigurationError: A package cannot be imported there.
        """
        try:
            await self._begin_anew()
        except BaseException:
            await self.close()
            raise

    async def execute(
        self, code: str, *, timeout_s: float | None = None, stdin: str | None = None
    ) -> Execution:
        """Run code; see `Interpreter`."""
        async with self._turn:
            self._require_open()
            self._count += 1
            collector = Collector(self._limits)
            longest = self._limits.timeout_s
            limit_s = longest if timeout_s is None else min(timeout_s, longest)
            begin = time.monotonic()
            try:
                await self._renew()
                if self._untold:
                    verdict = failed(f"{self._why}; nothing was run, and what comes next begins anew", True)
                else:
                    begin = time.monotonic()
                    verdict = await self._run(code, collector, limit_s, stdin)
                    if verdict.state_lost:
                        self._lose(verdict.reason or "the interpreter is gone", told=True)
            except HostFailureError as failure:
                verdict = failed(str(failure), failure.state_lost or self._untold)
                if failure.state_lost:
                    self._lose(str(failure), told=True)
            except asyncio.CancelledError:
                self._lose("the execution before was cancelled, and its interpreter given up", told=False)
                raise
            took_s = time.monotonic() - begin
            self._untold = False
            files = verdict.files
            if files is None:
                files = () if self._lost else await self._changed_files()
            return Execution(
                status=verdict.status,
                stdout=collector.stdout,
                stderr=collector.stderr,
                exit_code=verdict.exit_code,
                error=verdict.error,
                result=collector.result,
                outputs=collector.outputs,
                execution_count=self._count,
                session_id=self._session_id,
                state_lost=verdict.state_lost,
                truncated=collector.truncated,
                signal=verdict.signal,
                max_rss_bytes=verdict.max_rss_bytes,
                execution_time_s=took_s,
                files=files,
                isolation=self._isolation,
                reason=verdict.reason,
            )

    async def put_file(self, path: str, data: bytes) -> FileInfo:
        """Write a file; see `Interpreter`."""
        place = checked_path(path)
        if len(data) > self._limits.file_bytes:
            raise FileRefusedError(path, f"it is larger than {self._limits.file_bytes} bytes")
        async with self._turn:
            await self._ready()
            await self._put(place, data)
        return FileInfo(path=place, size=len(data), sha256=hashlib.sha256(data).hexdigest())

    async def get_file(self, path: str) -> bytes:
        """Return a file's content; see `Interpreter`."""
        place = checked_path(path)
        whole = bytearray()
        async with self._turn:
            await self._ready()
            while True:
                said = await self._errand(
                    "get", path=place, offset=len(whole), piece=PIECE_BYTES, most=self._limits.file_bytes
                )
                try:
                    size, piece = int(said["size"]), base64.b64decode(said["data"], validate=True)
                except (KeyError, TypeError, ValueError, binascii.Error):
                    raise FileRefusedError(path, "the interpreter described it in words of its own") from None
                whole += piece
                if len(whole) >= size or not piece or len(whole) > self._limits.file_bytes:
                    break
        if len(whole) != size:
            raise FileRefusedError(path, "it was changed while it was read")
        return bytes(whole)

    async def list_files(self) -> list[FileInfo]:
        """Return the files of the workspace; see `Interpreter`."""
        async with self._turn:
            await self._ready()
            self._listing.read(await self._errand("files", **self._listing.arguments()))
            return self._listing.files()

    async def restart(self) -> None:
        """Begin anew; see `Interpreter`."""
        async with self._turn:
            self._require_open()
            self._lose("it was to begin anew", told=True)
            await self._renew()

    async def close(self) -> None:
        """End it. Idempotent. An execution that is under way is not waited for."""
        if not self._closed:
            self._closed = True
            await self._end()

    async def _put(self, path: str, data: bytes) -> None:
        """Write a file through our own code."""
        for offset in range(0, max(1, len(data)), PIECE_BYTES):
            piece = base64.b64encode(data[offset : offset + PIECE_BYTES]).decode()
            await self._errand("put", path=path, offset=offset, data=piece)

    async def _errand(self, verb: str, **asked: Any) -> Mapping[str, Any]:
        errand = Errand(verb, root=self._root, **asked)
        try:
            said = errand.read(await self._ask(errand, ERRAND_TIMEOUT_S))
        except ErrandUnansweredError as failure:
            raise FileRefusedError(str(asked.get("path", ".")), str(failure)) from None
        except HostFailureError as failure:
            if failure.state_lost:
                self._lose(str(failure), told=False)
            raise
        except asyncio.CancelledError:
            self._lose("work on its files was cancelled, and the interpreter given up", told=False)
            raise
        if "refused" in said:
            raise FileRefusedError(str(asked.get("path", ".")), str(said["refused"])[:1000])
        return said

    async def _enter(self, *, own_folder: bool) -> None:
        """Make the workspace in a fresh interpreter, and import packages.

        Raises:
            HostFailureError: It cannot be made.
            ConfigurationError: A package cannot be imported.
        """
        errand = Errand(
            "begin",
            own_folder=own_folder,
            packages=list(self._packages),
            leftovers=self._leftovers if own_folder else [],
        )
        said = errand.read(await self._ask(errand, ERRAND_TIMEOUT_S + 10.0 * len(self._packages)))
        if "refused" in said or not isinstance(said.get("root"), str):
            raise HostFailureError(f"expected the interpreter to have a workspace, got {str(said)[:500]}")
        if failures := said.get("failed"):
            raise ConfigurationError(
                f"expected packages that can be imported where the code runs, got {str(failures)[:500]}"
            )
        self._root, self._leftovers = said["root"], []
        self._listing = Listing(self._limits)
        if not own_folder:
            await self._changed_files()  # those that were there already are no news later

    async def _begin_anew(self) -> None:
        if self._root:
            self._leftovers.append(self._root)  # one that died could not clear up after itself
        self._root = ""
        await self._begin()
        if self._closed:  # meanwhile
            await self._end()
            self._require_open()

    async def _renew(self) -> None:
        """Replace an interpreter that is lost."""
        if not self._lost:
            return
        try:
            await self._begin_anew()
        except ConfigurationError as error:
            raise HostFailureError(str(error), state_lost=True) from error
        except HostFailureError as failure:
            raise HostFailureError(str(failure), state_lost=True) from failure
        self._lost = False

    async def _ready(self) -> None:
        """Have an interpreter with files.

        Raises:
            SandboxFailureError: There is none any more; it is replaced, and has none of the files.
        """
        self._require_open()
        await self._renew()
        if self._untold:
            self._untold = False
            raise SandboxFailureError(f"{self._why}; its files are gone, and what comes next begins anew")

    async def _changed_files(self) -> tuple[FileInfo, ...]:
        """Return what files are new or different; none where the interpreter does not say."""
        if not self._report_files:
            return ()
        try:
            return self._listing.read(await self._errand("files", **self._listing.arguments()))
        except SandboxFailureError:
            return ()

    def _lose(self, reason: str, *, told: bool) -> None:
        self._lost, self._why = True, reason
        self._untold = not told

    def _require_open(self) -> None:
        if self._closed:
            raise SandboxClosedError("expected an open interpreter, got one that was closed; open another")


InterpreterT = TypeVar("InterpreterT", bound=HostedInterpreter)


class Opened(Generic[InterpreterT]):
    """The interpreters of one backend, to be closed with it."""

    def __init__(self) -> None:
        self._all: set[InterpreterT] = set()

    async def add(self, interpreter: InterpreterT) -> InterpreterT:
        """Open an interpreter, and return it.

        Raises:
            SandboxUnavailableError: It cannot be opened.
            ConfigurationError: A package cannot be imported there.
        """
        self._all = {each for each in self._all if not each.closed} | {interpreter}
        try:
            await interpreter.open()
        except HostFailureError as failure:
            raise SandboxUnavailableError(str(failure)) from failure
        return interpreter

    async def close(self) -> None:
        """Close all of them."""
        await asyncio.gather(*(each.close() for each in self._all), return_exceptions=True)
        self._all = set()


def refuse_snapshots(snapshot: bool) -> None:
    """Refuse what only an interpreter on this machine has.

    Raises:
        ConfigurationError: A snapshot is asked for.
    """
    if snapshot:
        raise ConfigurationError(
            "expected a session without snapshots, which only the local sandbox has; leave snapshot out"
        )
