"""The base of hosted interpreters: ordering of calls, counters, lost state and files, whatever the host.

Nothing here is a boundary: files travel through code in the session's own interpreter, which that code may have
changed. What comes back is bounded and checked for its form, and never trusted for more.
"""

import asyncio
import base64
import binascii
import hashlib
import json
import secrets
import ssl
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
from openenv_core.proxies import proxy_for
from openenv_core.sandbox import (
    Execution,
    FileInfo,
    FileRefusedError,
    Limits,
    SandboxClosedError,
    SandboxFailureError,
    SandboxUnavailableError,
)

from .outputs import OutputCollector, make_stopped

MAX_REPLY_BYTES: Final = 8 << 20
"""The most that our own code may answer: a piece of a file, or a list of many."""

MAX_PATH_CHARS: Final = 1024
EXCERPT_CHARS: Final = 300

INSIDE_TIMEOUT_S: Final = 20.0
"""How long our own code in an interpreter may take."""

PIECE_BYTES: Final = 1 << 20
"""How much of a file travels at once."""


class HostFailureError(SandboxFailureError):
    """The service, the gateway or the container failed; the code had no part in it."""

    def __init__(self, message: str, *, state_lost: bool = False) -> None:
        super().__init__(message)
        self.state_lost = state_lost


class NoAnswerError(HostFailureError):
    """Our own code ran in the interpreter and gave no answer that we understand: the session's code may be why."""


class ResponseTooLargeError(HostFailureError):
    """The response is larger than anything that may be written."""


class InsideCall:
    """One call of a function of `inside.py`, our own code in a session's interpreter.

    The marker around the answer is random, so that nothing that was printed before is taken for it. Code that stays
    in the interpreter can see it and answer in our place; it would answer for its own files only.

    Attributes:
        function: As given.
        expression: A Python expression whose value is the answer, as a text.
        statement: A Python statement that prints it.
    """

    def __init__(self, function: str, **arguments: Any) -> None:
        self.function = function
        self._marker = f"<{secrets.token_hex(16)}>"
        packed = base64.b64encode(json.dumps(arguments).encode()).decode()
        # No name is left in the code's namespace.
        self.expression = (
            "(lambda names: (__import__('builtins').exec(names.pop('source'), names), "
            f"names['answer']({function!r}, {packed!r}, {self._marker!r}))[1])"
            f"({{'__name__': 'files_of_a_session', 'source': {_source()!r}}})"
        )
        self.statement = f"print({self.expression})"

    def read(self, text: str) -> Mapping[str, Any]:
        """Find the answer in the output, or in the `repr` of the expression's value.

        Raises:
            NoAnswerError: There is none.
        """
        # Code may have answered in our place, at any length: nothing is evaluated, and no more than this is read.
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
    """Return a path within the workspace in its plain form.

    Raises:
        FileRefusedError: It is absolute, leads upwards, or cannot be a path.
    """
    if not path or len(path) > MAX_PATH_CHARS or "\0" in path or "\\" in path or not path.isprintable():
        raise FileRefusedError(
            path[:100], f"a path has 1 to {MAX_PATH_CHARS} printable characters, and slashes forward"
        )
    plain = PurePosixPath(path)
    if plain.is_absolute() or ".." in plain.parts or not plain.parts:
        raise FileRefusedError(path, "a path is relative to the workspace and stays in it")
    return str(plain)


class FileListing:
    """The files of one workspace, as its interpreter has listed them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._times: dict[str, int] = {}
        self._files: dict[str, FileInfo] = {}

    def arguments(self) -> dict[str, Any]:
        """Return what `inside.files` is called with: what is known, and how much may be listed and digested."""
        known = {path: [file.size, self._times[path]] for path, file in self._files.items()}
        return {"known": known, "most_files": self._limits.files, "most": self._limits.file_bytes}

    def files(self) -> list[FileInfo]:
        """Return all files."""
        return [file for _, file in sorted(self._files.items())]

    def read(self, reply: Mapping[str, Any]) -> tuple[FileInfo, ...]:
        """Take an answer in, and return what is new or different since the one before.

        Raises:
            FileRefusedError: It is not of the form that ours has.
        """
        times: dict[str, int] = {}
        files: dict[str, FileInfo] = {}
        try:
            for path, size, modified, digest in reply["files"][: self._limits.files]:
                try:
                    plain_path = check_path(path)
                except FileRefusedError:  # nobody could ask for it
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
    """One session's interpreter. A subclass says how code gets to it; everything is asked one by one.

    An interpreter that is lost, or whose execution was cancelled half-way, is replaced by a fresh one before the next
    execution. Where no result has reported the loss yet, that next execution runs nothing and reports it.

    Args:
        limits: Of the session. Time and output are bounded here; memory, disk and processes are the host's.
        packages: Imported at the start.
        isolation: What the code runs behind.
        report_files: Whether each execution is followed by a look at the files; otherwise what `_run` says of them
            counts.
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
        self._loss: str | None = None  # that nobody was told of yet
        self._root = ""
        self._had_stdin = False
        self._leftovers: list[str] = []
        self._listing = FileListing(limits)

    @abstractmethod
    async def _run(
        self, code: str, collector: OutputCollector, timeout_s: float, stdin: str | None
    ) -> Execution:
        """Run code, and have the collector take in what it writes."""

    @abstractmethod
    async def _call_inside(self, call: InsideCall, timeout_s: float) -> str:
        """Have our own code run, and return all that came back."""

    @abstractmethod
    async def _begin(self) -> None:
        """Release the current interpreter, if any, and get a fresh one with a workspace."""

    @abstractmethod
    async def _end(self) -> None:
        """Release the interpreter. Raises nothing."""

    async def open(self) -> None:
        """Get the first interpreter.

        HostFailureError: none can be had; ConfigurationError: a package cannot be imported there.
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
                    execution = make_stopped("sandbox_error", reason, state_lost=True)
                else:
                    start = time.monotonic()
                    execution = await self._run(code, collector, limit_s, stdin)
                    self._lost = self._lost or execution.state_lost
            except HostFailureError as failure:
                lost = failure.state_lost or self._loss is not None
                execution = make_stopped("sandbox_error", str(failure), state_lost=lost)
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
        """Begin anew; see `Interpreter`."""
        async with self._lock:
            self._require_open()
            self._lost, self._loss = True, None
            await self._replace_if_lost()

    async def close(self) -> None:
        """End it. Idempotent. An execution that is under way is not waited for."""
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
        """Make the workspace in a fresh interpreter, and import packages."""
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
            await self._changed_files()  # those that were there already are no news later

    async def _set_stdin(self, stdin: str | None, timeout_s: float) -> None:
        """Give the next code its standard input, and take the last one's away."""
        if stdin is not None or self._had_stdin:
            await self._call_inside(InsideCall("stdin", text=stdin or ""), timeout_s)
            self._had_stdin = stdin is not None

    async def _replace(self) -> None:
        if self._root:
            self._leftovers.append(self._root)  # one that died could not clear up after itself
        self._root, self._had_stdin = "", False
        await self._begin()
        if self.closed:  # meanwhile
            await self._end()
            self._require_open()

    async def _replace_if_lost(self) -> None:
        """Replace an interpreter that is lost."""
        if self._lost:
            try:
                await self._replace()
            except (ConfigurationError, HostFailureError) as failure:
                raise HostFailureError(str(failure), state_lost=True) from failure
            self._lost = False

    async def _ensure_ready(self) -> None:
        """Have an interpreter with files."""
        self._require_open()
        await self._replace_if_lost()
        if (loss := self._loss) is not None:
            self._loss = None
            raise SandboxFailureError(f"{loss}; its files are gone, and what comes next begins anew")

    async def _changed_files(self) -> tuple[FileInfo, ...]:
        """Return what files are new or different; none where the interpreter does not say."""
        if not self._report_files:
            return ()
        try:
            return self._listing.read(await self._request_inside("files", **self._listing.arguments()))
        except SandboxFailureError:
            return ()

    def _mark_lost(self, reason: str) -> None:
        """Note that the interpreter is gone, which the next result is to report."""
        self._lost, self._loss = True, reason

    def _require_open(self) -> None:
        if self.closed:
            raise SandboxClosedError("expected an open interpreter, got one that was closed; open another")


def require_done(path: str, reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what our own code in an interpreter answered.

    Raises:
        FileRefusedError: It could not do what it was asked for with the file.
    """
    if "refused" in reply:
        raise FileRefusedError(path, str(reply["refused"])[:1000])
    return reply


class HostedBackend(ABC):
    """Opens interpreters that one host runs: a service, a gateway, a pool of containers."""

    isolation = "remote"

    def __init__(self) -> None:
        self._connected = False
        self._opened: set[HostedInterpreter] = set()

    @abstractmethod
    async def _connect(self) -> None:
        """See that the host is there and lets us in. HostFailureError or ProviderError: it is not, or does not."""

    @abstractmethod
    def _make_interpreter(self, limits: Limits, packages: tuple[str, ...]) -> HostedInterpreter:
        """Return an interpreter, not opened."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Release the host, if there is one."""

    async def start(self) -> None:
        """Make ready; see `Backend`. SandboxUnavailableError: the host does not answer, or refuses us."""
        try:
            await self._connect()
        except (HostFailureError, ProviderError) as failure:
            await self.close()
            raise SandboxUnavailableError(str(failure)) from failure
        self._connected = True

    async def open(
        self, limits: Limits, *, packages: tuple[str, ...] = (), snapshot: bool = False
    ) -> HostedInterpreter:
        """Start an interpreter; see `Backend`."""
        if snapshot:
            raise ConfigurationError(
                "expected a session without snapshots, which only the local sandbox has; leave snapshot out"
            )
        if not self._connected:
            raise SandboxUnavailableError("expected a backend that was started, got one that is not")
        interpreter = self._make_interpreter(limits, packages)
        self._opened = {each for each in self._opened if not each.closed} | {interpreter}
        try:
            await interpreter.open()
        except HostFailureError as failure:
            raise SandboxUnavailableError(str(failure)) from failure
        return interpreter

    async def close(self) -> None:
        """End all interpreters. Idempotent."""
        opened, self._opened = self._opened, set()
        await asyncio.gather(*(each.close() for each in opened), return_exceptions=True)
        self._connected = False
        await self._disconnect()


def require_plain_url(variable: str, url: str) -> None:
    """Refuse what is no URL of http or https, and one with a user, a query or a fragment.

    Raises:
        ConfigurationError: It is one of those.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"expected {variable} with http:// or https://, got {url!r}")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigurationError(f"expected a plain URL for {variable}: no user, no query, no fragment")


def make_http_client(url: str, headers: Mapping[str, str]) -> httpx.AsyncClient:
    """Return a client of one host, for coroutines of one loop.

    Bounds on responses hold for what comes over the wire, so nothing is compressed. No redirect is followed: it may
    lead to somebody who must not get the token.

    Raises:
        ConfigurationError: The proxy of the environment cannot be used.
    """
    verify = _make_ssl_context() if url.startswith("https://") else False
    transport = httpx.AsyncHTTPTransport(verify=verify, proxy=proxy_for(url))
    headers = {"Accept-Encoding": "identity", **headers}
    return httpx.AsyncClient(transport=transport, headers=headers, follow_redirects=False, trust_env=False)


async def send_bounded(
    client: httpx.AsyncClient, request: httpx.Request, max_bytes: int
) -> tuple[httpx.Response, bytes]:
    """Send a request, and return the response with its body; of an error's body no more than its beginning.

    ResponseTooLargeError: it is longer than it may be; httpx.TransportError: there is none.
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
    """Return the beginning of a host's response, for a message."""
    text = body[: 4 * EXCERPT_CHARS].decode("utf-8", "replace")
    return " ".join(text.split())[:EXCERPT_CHARS] or "(nothing)"


@cache
def _make_ssl_context() -> ssl.SSLContext:
    return httpx.create_ssl_context()
