"""The base classes of hosted interpreters: ordering of calls, counters, lost state and files, for any host.

Nothing here is a security boundary: files are transferred by code in the session's own interpreter, which the session's
code may have tampered with. Replies are limited in size and checked for their format, and not trusted beyond that.
"""

import asyncio
import base64
import binascii
import hashlib
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from openenv_core.errors import ConfigurationError, ProviderError
from openenv_core.proxies import proxy_for, tls_context
from openenv_core.sandbox import (
    Execution,
    FileInfo,
    FileRefusedError,
    Limits,
    SandboxClosedError,
    SandboxFailureError,
    SandboxUnavailableError,
)

from .outputs import OutputCollector, make_stopped_execution

MAX_REPLY_BYTES: Final = 8 << 20
"""The maximum size of a reply of our own code in an interpreter: a chunk of a file, or a list of files."""

MAX_PATH_CHARS: Final = 1024
EXCERPT_CHARS: Final = 300

INSIDE_TIMEOUT_S: Final = 20.0
"""The timeout of our own code in an interpreter."""

PIECE_BYTES: Final = 1 << 20
"""The chunk size of file transfers."""


class HostFailureError(SandboxFailureError):
    """The service, gateway or container failed, through no fault of the code.

    Attributes:
        state_lost: Whether the interpreter's state is lost.
    """

    def __init__(self, message: str, *, state_lost: bool = False) -> None:
        super().__init__(message)
        self.state_lost = state_lost


class NoAnswerError(HostFailureError):
    """Our own code in the interpreter returned no valid reply, possibly because of the session's code."""


class ResponseTooLargeError(HostFailureError):
    """The response is larger than any output that the limits allow."""


class InsideCall:
    """One call of a function in `inside.py`, our own code that runs in a session's interpreter.

    The reply is enclosed in a random marker, so that earlier output cannot be mistaken for it. Code left running in the
    interpreter can see the marker and forge a reply, but only about its own files.

    Attributes:
        function: The name of the function.
        expression: A Python expression whose value is the reply as a string.
        statement: A Python statement that prints the reply.
    """

    def __init__(self, function: str, **arguments: Any) -> None:
        self.function = function
        self._marker = f"<{secrets.token_hex(16)}>"
        encoded_arguments = base64.b64encode(json.dumps(arguments).encode()).decode()
        # An expression, so that it adds no names to the session's namespace.
        self.expression = (
            "(lambda names: (__import__('builtins').exec(names.pop('source'), names), "
            f"names['answer']({function!r}, {encoded_arguments!r}, {self._marker!r}))[1])"
            f"({{'__name__': 'files_of_a_session', 'source': {_source()!r}}})"
        )
        self.statement = f"print({self.expression})"

    def read(self, text: str) -> Mapping[str, Any]:
        """Parse the reply from the output, or from the `repr` of the expression's value.

        Raises:
            NoAnswerError: There is no valid reply.
        """
        # The session's code may have forged the reply, at any length: nothing is evaluated, and its size is limited.
        pieces = text.split(self._marker, 3) if len(text) <= MAX_REPLY_BYTES else []
        if len(pieces) == 3:
            try:
                reply = json.loads(base64.b64decode(pieces[1], validate=True))
            except (ValueError, RecursionError):
                reply = None
            if isinstance(reply, dict):
                return reply
        raise NoAnswerError(
            "expected the interpreter to answer about its files, and it did not: the code in it may have replaced "
            "what that needs; restart it"
        )


@cache
def _source() -> str:
    return Path(__file__).with_name("inside.py").read_text(encoding="utf-8")


def check_path(path: str) -> str:
    """Return a path relative to the workspace, normalized.

    Raises:
        FileRefusedError: The path is absolute, contains "..", or is malformed.
    """
    if not path or len(path) > MAX_PATH_CHARS or "\0" in path or "\\" in path or not path.isprintable():
        raise FileRefusedError(
            path[:100], f"a path has 1 to {MAX_PATH_CHARS} printable characters, and slashes forward"
        )
    pure_path = PurePosixPath(path)
    if pure_path.is_absolute() or ".." in pure_path.parts or not pure_path.parts:
        raise FileRefusedError(path, "a path is relative to the workspace and stays in it")
    return str(pure_path)


class FileListing:
    """The files of one workspace, as last listed by its interpreter."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._times: dict[str, int] = {}
        self._files: dict[str, FileInfo] = {}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `inside.files`: the known files, and the limits for listing and hashing."""
        known = {path: [file.size, self._times[path]] for path, file in self._files.items()}
        return {"known": known, "most_files": self._limits.files, "most": self._limits.file_bytes}

    def files(self) -> list[FileInfo]:
        """Return all files, sorted by path."""
        return [file for _, file in sorted(self._files.items())]

    def read(self, reply: Mapping[str, Any]) -> tuple[FileInfo, ...]:
        """Update the listing from a reply, and return the files that are new or changed.

        Raises:
            FileRefusedError: The reply is malformed.
        """
        times: dict[str, int] = {}
        files: dict[str, FileInfo] = {}
        try:
            for path, size, modified, digest in reply["files"][: self._limits.files]:
                try:
                    plain_path = check_path(path)
                except FileRefusedError:  # get_file could not read it either
                    continue
                known = self._files.get(plain_path)
                sha256 = str(digest)[:64] or (known.sha256 if known else "")
                files[plain_path], times[plain_path] = (
                    FileInfo(path=plain_path, size=int(size), sha256=sha256),
                    int(modified),
                )
        except (KeyError, TypeError, ValueError):
            raise FileRefusedError(".", "the interpreter described its files in words of its own") from None
        changed = tuple(file for path, file in files.items() if self._files.get(path) != file)
        self._files, self._times = files, times
        return changed


class HostedInterpreter(ABC):
    """The interpreter of one session. Subclasses send code to the host; calls run one at a time.

    A lost interpreter, or one whose execution was cancelled, is replaced by a fresh one before the next execution. If
    no result has reported the loss yet, that execution runs nothing and reports it.

    Args:
        limits: Limits of the session. Time and output are limited here; memory, disk and processes by the host.
        packages: Packages to import at the start.
        isolation: The isolation level to report.
        report_files: Whether to list the files after each execution; otherwise the files that `_run` reports are used.
    """

    def __init__(
        self, limits: Limits, packages: tuple[str, ...], *, isolation: str, report_files: bool
    ) -> None:
        self.session_id = secrets.token_hex(8)
        self.isolation = isolation
        self.closed = False
        self._limits = limits
        self._packages = packages
        self._report_files = report_files
        self._lock = asyncio.Lock()
        self._count = 0
        self._lost = False
        self._loss: str | None = None  # the reason of a loss that no result has reported yet
        self._root = ""
        self._stdin_was_set = False
        self._leftovers: list[str] = []
        self._listing = FileListing(limits)

    @abstractmethod
    async def _run(
        self, code: str, collector: OutputCollector, timeout_s: float, stdin: str | None
    ) -> Execution:
        """Run code, passing its output to the collector."""

    @abstractmethod
    async def _call_inside(self, call: InsideCall, timeout_s: float) -> str:
        """Run our own code, and return its raw output or value."""

    @abstractmethod
    async def _begin(self) -> None:
        """Release the current interpreter, if any, and get a fresh one with a workspace."""

    @abstractmethod
    async def _end(self) -> None:
        """Release the interpreter. Must not raise."""

    async def open(self) -> None:
        """Start the first interpreter.

        Raises:
            HostFailureError: No interpreter can be started.
            ConfigurationError: A package cannot be imported there.
        """
        try:
            await self._replace()
        except BaseException:
            await self.close()
            raise

    async def execute(
        self, code: str, *, timeout_s: float | None = None, stdin: str | None = None
    ) -> Execution:
        """Run code; see `Interpreter`."""
        async with self._lock:
            self._require_open()
            self._count += 1
            collector = OutputCollector(self._limits)
            limit_s = self._limits.timeout_s if timeout_s is None else min(timeout_s, self._limits.timeout_s)
            start = time.monotonic()
            try:
                await self._replace_if_lost()
                if (loss := self._loss) is not None:
                    reason = f"{loss}; nothing was run, and what comes next begins anew"
                    execution = make_stopped_execution("sandbox_error", reason, state_lost=True)
                else:
                    start = time.monotonic()
                    execution = await self._run(code, collector, limit_s, stdin)
                    self._lost = self._lost or execution.state_lost
            except HostFailureError as failure:
                lost = failure.state_lost or self._loss is not None
                execution = make_stopped_execution("sandbox_error", str(failure), state_lost=lost)
                self._lost = self._lost or failure.state_lost
            except asyncio.CancelledError:
                self._mark_lost("the execution before was cancelled, and its interpreter given up")
                raise
            elapsed_s = time.monotonic() - start
            self._loss = None
            files = execution.files
            if self._report_files:
                files = () if self._lost else await self._changed_files()
            return replace(
                collector.fill(execution),
                execution_count=self._count,
                session_id=self.session_id,
                execution_time_s=elapsed_s,
                files=files,
                isolation=self.isolation,
            )

    async def put_file(self, path: str, data: bytes) -> FileInfo:
        """Write a file; see `Interpreter`."""
        plain_path = check_path(path)
        if len(data) > self._limits.file_bytes:
            raise FileRefusedError(path, f"it is larger than {self._limits.file_bytes} bytes")
        async with self._lock:
            await self._ensure_ready()
            await self._put(plain_path, data)
        return FileInfo(path=plain_path, size=len(data), sha256=hashlib.sha256(data).hexdigest())

    async def get_file(self, path: str) -> bytes:
        """Return a file's content; see `Interpreter`."""
        plain_path = check_path(path)
        async with self._lock:
            await self._ensure_ready()
            return await self._get(plain_path)

    async def list_files(self) -> list[FileInfo]:
        """Return the files of the workspace; see `Interpreter`."""
        async with self._lock:
            await self._ensure_ready()
            self._listing.read(await self._request_inside("files", **self._listing.arguments()))
            return self._listing.files()

    async def restart(self) -> None:
        """Replace the interpreter by a fresh one; see `Interpreter`."""
        async with self._lock:
            self._require_open()
            self._lost, self._loss = True, None
            await self._replace_if_lost()

    async def close(self) -> None:
        """Release the interpreter, without waiting for a running execution. Idempotent."""
        if not self.closed:
            self.closed = True
            await self._end()

    async def _put(self, path: str, data: bytes) -> None:
        for offset in range(0, max(1, len(data)), PIECE_BYTES):
            piece = base64.b64encode(data[offset : offset + PIECE_BYTES]).decode()
            await self._request_inside("put", path=path, offset=offset, data=piece)

    async def _get(self, path: str) -> bytes:
        content, max_bytes = bytearray(), self._limits.file_bytes
        while True:
            reply = await self._request_inside(
                "get", path=path, offset=len(content), piece=PIECE_BYTES, most=max_bytes
            )
            try:
                size, piece = int(reply["size"]), base64.b64decode(reply["data"], validate=True)
            except (KeyError, TypeError, ValueError, binascii.Error):
                raise FileRefusedError(path, "the interpreter described it in words of its own") from None
            content += piece
            if len(content) >= size or not piece or len(content) > max_bytes:
                break
        if len(content) != size:
            raise FileRefusedError(path, "it was changed while it was read")
        return bytes(content)

    async def _request_inside(self, function: str, **arguments: Any) -> Mapping[str, Any]:
        path = str(arguments.get("path", "."))
        call = InsideCall(function, root=self._root, **arguments)
        try:
            reply = call.read(await self._call_inside(call, INSIDE_TIMEOUT_S))
        except NoAnswerError as failure:
            raise FileRefusedError(path, str(failure)) from None
        except HostFailureError as failure:
            if failure.state_lost:
                self._mark_lost(str(failure))
            raise
        except asyncio.CancelledError:
            self._mark_lost("work on its files was cancelled, and the interpreter given up")
            raise
        return require_done(path, reply)

    async def _enter(self, *, own_folder: bool) -> None:
        """Create the workspace in a fresh interpreter and import the packages.

        Args:
            own_folder: Whether to use a new folder rather than the interpreter's working directory.
        """
        leftovers = self._leftovers if own_folder else []
        call = InsideCall("begin", own_folder=own_folder, packages=list(self._packages), leftovers=leftovers)
        reply = call.read(await self._call_inside(call, INSIDE_TIMEOUT_S + 10.0 * len(self._packages)))
        if "refused" in reply or not isinstance(reply.get("root"), str):
            raise HostFailureError(f"expected the interpreter to have a workspace, got {str(reply)[:500]}")
        if failures := reply.get("failed"):
            raise ConfigurationError(
                f"expected packages that can be imported where the code runs, got {str(failures)[:500]}"
            )
        self._root, self._leftovers = reply["root"], []
        self._listing = FileListing(self._limits)
        if not own_folder:
            await self._changed_files()  # so that files that already exist are not reported as new later

    async def _set_stdin(self, stdin: str | None, timeout_s: float) -> None:
        """Set the standard input of the next execution, replacing that of the last one."""
        if stdin is not None or self._stdin_was_set:
            await self._call_inside(InsideCall("stdin", text=stdin or ""), timeout_s)
            self._stdin_was_set = stdin is not None

    async def _replace(self) -> None:
        if self._root:
            self._leftovers.append(self._root)  # a dead interpreter could not remove its folder
        self._root, self._stdin_was_set = "", False
        await self._begin()
        if self.closed:  # while it started
            await self._end()
            self._require_open()

    async def _replace_if_lost(self) -> None:
        """Replace the interpreter if it is lost."""
        if self._lost:
            try:
                await self._replace()
            except (ConfigurationError, HostFailureError) as failure:
                raise HostFailureError(str(failure), state_lost=True) from failure
            self._lost = False

    async def _ensure_ready(self) -> None:
        """Make the interpreter ready for work on files.

        Raises:
            SandboxFailureError: The files are lost, and no result has reported it yet.
        """
        self._require_open()
        await self._replace_if_lost()
        if (loss := self._loss) is not None:
            self._loss = None
            raise SandboxFailureError(f"{loss}; its files are gone, and what comes next begins anew")

    async def _changed_files(self) -> tuple[FileInfo, ...]:
        """Return the files that are new or changed; none if the interpreter cannot list them."""
        if not self._report_files:
            return ()
        try:
            return self._listing.read(await self._request_inside("files", **self._listing.arguments()))
        except SandboxFailureError:
            return ()

    def _mark_lost(self, reason: str) -> None:
        """Mark the interpreter as lost, for the next result to report."""
        self._lost, self._loss = True, reason

    def _require_open(self) -> None:
        if self.closed:
            raise SandboxClosedError("expected an open interpreter, got one that was closed; open another")


def require_done(path: str, reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a reply of our own code in an interpreter if it succeeded.

    Raises:
        FileRefusedError: The code rejected the operation on the file.
    """
    if "refused" in reply:
        raise FileRefusedError(path, str(reply["refused"])[:1000])
    return reply


class HostedBackend(ABC):
    """Opens interpreters on one host: a service, a gateway or a pool of containers."""

    isolation = "remote"

    def __init__(self) -> None:
        self._is_connected = False
        self._open_interpreters: set[HostedInterpreter] = set()

    @abstractmethod
    async def _connect(self) -> None:
        """Check that the host is reachable and accepts our credentials.

        Raises:
            HostFailureError: It is not reachable, or rejects us.
            ProviderError: Likewise, for containers.
        """

    @abstractmethod
    def _make_interpreter(self, limits: Limits, packages: tuple[str, ...]) -> HostedInterpreter:
        """Return an interpreter without opening it."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Close the connection to the host, if any."""

    async def start(self) -> None:
        """Connect to the host; see `Backend`.

        Raises:
            SandboxUnavailableError: The host is not reachable, or rejects us.
        """
        try:
            await self._connect()
        except (HostFailureError, ProviderError) as failure:
            await self.close()
            raise SandboxUnavailableError(str(failure)) from failure
        self._is_connected = True

    async def open(
        self, limits: Limits, *, packages: tuple[str, ...] = (), snapshot: bool = False
    ) -> HostedInterpreter:
        """Start an interpreter; see `Backend`."""
        if snapshot:
            raise ConfigurationError(
                "expected a session without snapshots, which only the local sandbox has; leave snapshot out"
            )
        if not self._is_connected:
            raise SandboxUnavailableError("expected a backend that was started, got one that is not")
        interpreter = self._make_interpreter(limits, packages)
        self._open_interpreters = {each for each in self._open_interpreters if not each.closed} | {
            interpreter
        }
        try:
            await interpreter.open()
        except HostFailureError as failure:
            raise SandboxUnavailableError(str(failure)) from failure
        return interpreter

    async def close(self) -> None:
        """Close all interpreters and disconnect from the host. Idempotent."""
        interpreters, self._open_interpreters = self._open_interpreters, set()
        await asyncio.gather(*(each.close() for each in interpreters), return_exceptions=True)
        self._is_connected = False
        await self._disconnect()


def require_plain_url(variable: str, url: str) -> None:
    """Check that a URL is http or https, without user, query and fragment.

    Raises:
        ConfigurationError: It is not.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"expected {variable} with http:// or https://, got {url!r}")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigurationError(f"expected a plain URL for {variable}: no user, no query, no fragment")


def make_http_client(url: str, headers: Mapping[str, str]) -> httpx.AsyncClient:
    """Return an HTTP client of one host, for use on one event loop.

    Compression is off, because size limits count the bytes on the wire. Redirects are not followed, because they could
    send the token to another host.

    Raises:
        ConfigurationError: The proxy set in the environment variables is invalid.
    """
    verify = tls_context() if url.startswith("https://") else False
    # The sessions are limited already, and the time limit of code must not include a wait for a connection.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    transport = httpx.AsyncHTTPTransport(verify=verify, proxy=proxy_for(url), limits=limits)
    headers = {"Accept-Encoding": "identity", **headers}
    return httpx.AsyncClient(transport=transport, headers=headers, follow_redirects=False, trust_env=False)


async def send_bounded(
    client: httpx.AsyncClient, request: httpx.Request, max_bytes: int
) -> tuple[httpx.Response, bytes]:
    """Send a request, and return the response and its body. An error's body is truncated at the limit.

    Raises:
        ResponseTooLargeError: The body of a successful response exceeds `max_bytes`.
        httpx.TransportError: There is no response.
    """
    response = await client.send(request, stream=True)
    body = bytearray()
    try:
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > max_bytes:
                if not response.is_success:
                    break
                raise ResponseTooLargeError(f"expected an answer of at most {max_bytes} bytes, got more")
    finally:
        await response.aclose()
    return response, bytes(body)


def shorten_body(body: bytes) -> str:
    """Return an excerpt of a host's response for an error message."""
    text = body[: 4 * EXCERPT_CHARS].decode("utf-8", "replace")
    return " ".join(text.split())[:EXCERPT_CHARS] or "(nothing)"
