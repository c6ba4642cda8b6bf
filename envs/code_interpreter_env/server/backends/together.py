"""The backend for Together's Code Interpreter, written to its documentation; never run against the real service.

The documented interface runs code in sessions and uploads files. It has no call that reads or lists files, and none
that sets standard input, so those are refused.
"""

import asyncio
import base64
import hashlib
import json
import logging
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httpx

from openenv_core.backoff import exponential_pause_s
from openenv_core.errors import ConfigurationError
from openenv_core.protocol.http import is_bearer_token, retry_after
from openenv_core.proxies import proxy_for, tls_context
from openenv_core.sandbox import (
    CodeError,
    Execution,
    FileInfo,
    FileRefusedError,
    Limits,
    SandboxClosedError,
    SandboxFailureError,
    SandboxUnavailableError,
)
from servers.listening import is_loopback

from .outputs import OutputCollector, make_failed_execution, make_stopped_execution, parse_traceback

DEFAULT_URL: Final = "https://api.together.ai/v1"
TOKEN: Final = "TOGETHER_API_KEY"
URL: Final = "TOGETHER_BASE_URL"

MIN_BACKOFF_S: Final = 0.25
MAX_BACKOFF_S: Final = 8.0

PROBE_TIMEOUT_S: Final = 2.0
"""How long the request that checks whether a session or the service is alive is retried."""

IMPORT_TIMEOUT_S: Final = 30.0
"""The timeout of a session's start, and that of an upload."""

MAX_NAME_CHARS: Final = 255
MAX_REPLY_BYTES: Final = 1 << 20
"""The maximum size of a reply apart from the output of code."""

_EXCERPT_CHARS: Final = 300
_SLACK_BYTES: Final = 1 << 16
_MAY_HAVE_RUN: Final = "the code may have run, so it is not sent again"

_UNSENT_ERRORS: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
"""Failures that occur before any part of a request is sent."""

logger = logging.getLogger("openenv_core")


class ServiceFailureError(SandboxFailureError):
    """The service failed, through no fault of the code.

    Attributes:
        state_lost: Whether the session's state is lost.
    """

    def __init__(self, message: str, *, state_lost: bool = False) -> None:
        super().__init__(message)
        self.state_lost = state_lost


class _ServiceTimeoutError(ServiceFailureError):
    """The service did not reply in time. The code may still be running."""


class _ServiceRefusedError(ServiceFailureError):
    """The service rejected the request, for example because its session is gone."""


class _ReplyTooLargeError(ServiceFailureError):
    """The reply is larger than any output that the limits allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TogetherSettings:
    """The address and options of the service.

    Attributes:
        token: The bearer token.
        base_url: The base URL, to which `/tci/execute` is appended.
        network_s: Seconds that a request may take beyond the time limit of its code.
        retry_timeout_s: Seconds during which a repeatable request is retried.

    Raises:
        ConfigurationError: A value is invalid.
    """

    token: str = field(repr=False)
    base_url: str = DEFAULT_URL
    network_s: float = 10.0
    retry_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not is_bearer_token(self.token):
            raise ConfigurationError(
                f"expected {TOKEN} to be a token of printable ASCII without spaces, got {len(self.token)} others"
            )
        parts = urlsplit(self.base_url)
        host = parts.hostname or ""
        local = parts.scheme == "http" and (host == "localhost" or is_loopback(host))
        if not host or not (parts.scheme == "https" or local):
            raise ConfigurationError(
                f"expected {URL} with https://, as a token goes there (http:// on this machine alone), "
                f"got {self.base_url!r}"
            )
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigurationError(f"expected a plain URL for {URL}: no user, no query, no fragment")


def backend_from_environment(environ: Mapping[str, str]) -> "TogetherBackend":
    """Return the backend that TOGETHER_API_KEY and TOGETHER_BASE_URL describe.

    Raises:
        ConfigurationError: No token is set, or a value is invalid.
    """
    token = environ.get(TOKEN, "").strip()
    if not token:
        raise ConfigurationError(f"expected {TOKEN} to hold a token of the service, got nothing; set it")
    return TogetherBackend(
        TogetherSettings(token=token, base_url=environ.get(URL, "").strip() or DEFAULT_URL)
    )


class _RemoteExecution(NamedTuple):
    """The service's reply to an execution: its session, and its outputs by documented type."""

    session_id: str
    outputs: tuple[tuple[str, Any], ...]

    def collect_into(self, collector: OutputCollector) -> None:
        """Add all outputs to a collector. Undocumented types are dropped and noted as lost."""
        for kind, data in self.outputs:
            if kind in ("stdout", "stderr"):
                collector.write(kind, str(data))
            elif kind in ("display_data", "execute_result") and isinstance(data, dict):
                collector.show(kind, data)
            elif kind != "error":
                collector.note_loss()

    @property
    def error(self) -> CodeError | None:
        """The exception that ended the code, if any."""
        errors = [data for kind, data in self.outputs if kind == "error"]
        if not errors:
            return None
        return parse_traceback(errors[-1] if isinstance(errors[-1], str) else json.dumps(errors[-1]))


class TogetherBackend:
    """Runs code in sessions of Together's Code Interpreter.

    It implements the documented interface and is tested against a fake server of ours, never against the service
    itself. Time and output are limited here. The service controls memory, disk, processes and network, and ends a
    session some time after its last use.

    A request is retried if it was rate limited (429) or never sent. One that the service may have started is retried
    only if running it twice is harmless, which never holds for the session's code.
    """

    isolation = "remote"

    def __init__(self, settings: TogetherSettings) -> None:
        self.is_connected = False
        self._settings = settings
        self._base_url = settings.base_url.rstrip("/")
        url = self._base_url
        # Sessions are limited already, and the time limit of code must not include a wait for a connection.
        transport = httpx.AsyncHTTPTransport(
            verify=tls_context() if url.startswith("https://") else False,
            proxy=proxy_for(url),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
        )
        # Size limits count the bytes on the wire, so compression is off. A redirect could send the token elsewhere.
        headers = {"Accept-Encoding": "identity", "Authorization": f"Bearer {settings.token}"}
        self._http = httpx.AsyncClient(
            transport=transport, headers=headers, follow_redirects=False, trust_env=False
        )

    async def start(self) -> None:
        """Check that the service is reachable and accepts the token; see `Backend`."""
        try:
            await self.sessions()
        except ServiceFailureError as failure:
            await self.close()
            raise SandboxUnavailableError(str(failure)) from failure
        self.is_connected = True

    async def open(
        self, limits: Limits, *, packages: tuple[str, ...] = (), snapshot: bool = False
    ) -> "TogetherInterpreter":
        """Start a session; see `Backend`."""
        if snapshot:
            raise ConfigurationError(
                "expected a session without snapshots, which only the local sandbox has; leave snapshot out"
            )
        if not self.is_connected:
            raise SandboxUnavailableError("expected a backend that was started, got one that is not")
        interpreter = TogetherInterpreter(self, limits, packages)
        try:
            await interpreter.open()
        except ServiceFailureError as failure:
            raise SandboxUnavailableError(str(failure)) from failure
        return interpreter

    async def close(self) -> None:
        """Close the connections to the service, and with them all interpreters. Idempotent."""
        self.is_connected = False
        await asyncio.shield(self._http.aclose())

    async def execute(
        self,
        code: str,
        session_id: str | None,
        *,
        timeout_s: float,
        max_bytes: int,
        repeatable: bool,
        files: Sequence[Mapping[str, str]] = (),
    ) -> _RemoteExecution:
        """Run code in a session, or in a new one if `session_id` is None.

        Args:
            code: Python source.
            session_id: The service's id of the session.
            timeout_s: Seconds that the code may take.
            max_bytes: The maximum size of the response body.
            repeatable: Whether running the code twice is harmless, so that the request may be retried.
            files: Files to upload, in the documented format.
        """
        body: dict[str, Any] = {"language": "python", "code": code}
        if session_id is not None:
            body["session_id"] = session_id
        if files:
            body["files"] = list(files)
        content = json.dumps(body).encode()
        limit_s = timeout_s + self._settings.network_s
        return _parse_execution(
            await self._request("POST", "/tci/execute", content, limit_s, max_bytes, repeatable)
        )

    async def sessions(self, retry_timeout_s: float | None = None) -> frozenset[str]:
        """Return the ids of the existing sessions."""
        limit_s = self._settings.network_s
        reply = await self._request(
            "GET", "/tci/sessions", None, limit_s, MAX_REPLY_BYTES, True, retry_timeout_s
        )
        try:
            return frozenset(str(each["id"]) for each in reply["data"]["sessions"])
        except (KeyError, TypeError):
            raise self._make_format_error("a list of sessions") from None

    async def _request(
        self,
        method: str,
        path: str,
        content: bytes | None,
        limit_s: float,
        max_bytes: int,
        repeatable: bool,
        retry_timeout_s: float | None = None,
    ) -> Any:
        if retry_timeout_s is None:
            retry_timeout_s = self._settings.retry_timeout_s
        deadline = time.monotonic() + retry_timeout_s
        headers = {} if content is None else {"Content-Type": "application/json"}
        # One deadline covers the whole attempt; connecting has a shorter one, because it can be retried.
        timeout = httpx.Timeout(None, connect=self._settings.network_s / 2)
        attempt = 0
        while True:
            attempt += 1
            asked_to_wait: str | None = None
            request = self._http.build_request(
                method, self._base_url + path, content=content, headers=headers, timeout=timeout
            )
            try:
                async with asyncio.timeout(limit_s):
                    response, body = await _send_bounded(self._http, request, max_bytes)
            except TimeoutError:
                raise _ServiceTimeoutError(
                    f"expected an answer of {self._base_url} within {limit_s:g} s, got none"
                ) from None
            except httpx.TransportError as error:
                failure = f"expected {self._base_url} to answer, got {type(error).__name__}: {error}"
                if not repeatable and not isinstance(error, _UNSENT_ERRORS):
                    raise ServiceFailureError(self._hide_token(f"{failure}; {_MAY_HAVE_RUN}")) from None
            else:
                if response.status_code == 200:
                    return self._parse_json(body, repeatable)
                status = response.status_code
                failure = f"expected {self._base_url} to answer, got HTTP {status}: {_shorten_body(body)}"
                self._require_retry(status, failure, repeatable)
                asked_to_wait = response.headers.get("Retry-After")
            pause_s = exponential_pause_s(attempt, MIN_BACKOFF_S, MAX_BACKOFF_S)
            # Jitter, so that requests that were rejected together are not retried together.
            pause_s = max(pause_s * random.uniform(0.75, 1.0), retry_after(asked_to_wait) or 0.0)
            if time.monotonic() + pause_s > deadline:
                wait = f", asked to wait {asked_to_wait} s" if asked_to_wait else ""
                raise ServiceFailureError(
                    self._hide_token(f"{failure}; gave up after {attempt} attempts{wait}")
                ) from None
            logger.debug(
                "%s %s is sent again in %.2f s: %s", method, path, pause_s, self._hide_token(failure)
            )
            await asyncio.sleep(pause_s)

    def _require_retry(self, status: int, failure: str, repeatable: bool) -> None:
        """Raise unless the request may be retried after this HTTP status."""
        if status in (401, 403):
            raise ServiceFailureError(self._hide_token(f"{failure}; see to {TOKEN}"))
        if status == 429 or (status >= 500 and repeatable):
            return
        if status >= 500:
            raise ServiceFailureError(self._hide_token(f"{failure}; {_MAY_HAVE_RUN}"))
        raise _ServiceRefusedError(self._hide_token(failure))

    def _parse_json(self, body: bytes, repeatable: bool) -> Any:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise self._make_format_error("JSON" if repeatable else f"JSON ({_MAY_HAVE_RUN})") from None

    def _make_format_error(self, expected: str) -> ServiceFailureError:
        return ServiceFailureError(
            f"expected {self._base_url} to answer with {expected}, as is documented, got something else"
        )

    def _hide_token(self, text: str) -> str:
        """Return a text without the token, which a service may echo."""
        return text.replace(self._settings.token, "[token]")


def _parse_execution(reply: Any) -> _RemoteExecution:
    try:
        data, errors = reply.get("data"), reply.get("errors")
        if data is None and errors:
            texts = [each if isinstance(each, str) else json.dumps(each) for each in errors]
            raise _ServiceRefusedError("; ".join(texts)[:1000])
        outputs = tuple((str(each["type"]), each["data"]) for each in data["outputs"])
        session_id = data["session_id"]
    except (KeyError, TypeError, AttributeError):
        session_id = None
    if not isinstance(session_id, str) or not session_id:
        raise ServiceFailureError("expected the service to answer with data or errors, got neither")
    return _RemoteExecution(session_id, outputs)


class TogetherInterpreter:
    """One session of the service; calls run one at a time.

    The interface cannot interrupt or end a session. One whose code times out, or whose execution is cancelled, is
    abandoned for the service to end after a while, and the next execution starts another. If no result has reported
    the loss yet, that execution runs nothing and reports it.
    """

    isolation = TogetherBackend.isolation

    def __init__(self, backend: TogetherBackend, limits: Limits, packages: tuple[str, ...]) -> None:
        self.session_id = secrets.token_hex(8)
        self._backend = backend
        self._limits = limits
        self._packages = packages
        self._lock = asyncio.Lock()
        self._closed = False
        self._count = 0
        self._remote_id: str | None = None
        self._loss: str | None = None  # the reason of a loss that no result has reported yet

    async def open(self) -> None:
        """Start a session, and import the packages in it.

        Raises:
            ServiceFailureError: No session can be started.
            ConfigurationError: A package cannot be imported there.
        """
        self._remote_id = None
        # An expression, which adds no names to the session's namespace.
        code = f"[__import__('importlib').import_module(name) for name in {list(self._packages)!r}] and None"
        execution = await self._send(code, IMPORT_TIMEOUT_S, MAX_REPLY_BYTES, repeatable=True)
        if (error := execution.error) is not None:
            self._remote_id = None
            raise ConfigurationError(
                f"expected packages that can be imported where the code runs, got {error.ename}: "
                f"{error.evalue[:_EXCERPT_CHARS]}"
            )

    async def execute(
        self, code: str, *, timeout_s: float | None = None, stdin: str | None = None
    ) -> Execution:
        """Run code; see `Interpreter`. Standard input is refused, as a "sandbox_error"."""
        async with self._lock:
            self._require_open()
            self._count += 1
            collector = OutputCollector(self._limits)
            limit_s = self._limits.timeout_s if timeout_s is None else min(timeout_s, self._limits.timeout_s)
            start = time.monotonic()
            try:
                if (loss := self._take_loss()) is not None:
                    reason = f"{loss}; nothing was run, and what comes next begins anew"
                    execution = make_stopped_execution("sandbox_error", reason, state_lost=True)
                elif stdin is not None:
                    reason = "expected no stdin, which the service has no way to pass on; leave it out"
                    execution = make_stopped_execution("sandbox_error", reason)
                else:
                    await self._ensure_session()
                    start = time.monotonic()
                    execution = await self._run(code, collector, limit_s)
            except ServiceFailureError as failure:
                execution = make_stopped_execution(
                    "sandbox_error", str(failure), state_lost=failure.state_lost
                )
            except asyncio.CancelledError:
                self._abandon("the execution before was cancelled, and its session given up")
                raise
            if execution.state_lost:
                self._remote_id = None
            return replace(
                collector.fill(execution),
                execution_count=self._count,
                session_id=self.session_id,
                execution_time_s=time.monotonic() - start,
                isolation=self.isolation,
            )

    async def put_file(self, path: str, data: bytes) -> FileInfo:
        """Upload a file to the workspace, which has no folders; see `Interpreter`."""
        if not 0 < len(path) <= MAX_NAME_CHARS or "/" in path or "\\" in path or not path.isprintable():
            raise FileRefusedError(
                path[:100],
                f"the service takes names of 1 to {MAX_NAME_CHARS} printable characters, no folders",
            )
        if path in (".", ".."):
            raise FileRefusedError(path, "it names a folder")
        if len(data) > self._limits.file_bytes:
            raise FileRefusedError(path, f"it is larger than {self._limits.file_bytes} bytes")
        upload = {"name": path, "encoding": "base64", "content": base64.b64encode(data).decode()}
        async with self._lock:
            self._require_open()
            if (loss := self._take_loss()) is not None:
                raise SandboxFailureError(f"{loss}; its files are gone, and what comes next begins anew")
            try:
                await self._ensure_session()
                await self._send("None", IMPORT_TIMEOUT_S, MAX_REPLY_BYTES, repeatable=True, files=(upload,))
            except ServiceFailureError as failure:
                if failure.state_lost:
                    self._abandon(str(failure))
                raise
            except asyncio.CancelledError:
                self._abandon("an upload was cancelled, and its session given up")
                raise
        return FileInfo(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())

    async def get_file(self, path: str) -> bytes:
        """Refuse: the service has no way to read a file.

        Raises:
            FileRefusedError: Always.
        """
        raise FileRefusedError(path[:100], "the service has no call that reads files; print its content")

    async def list_files(self) -> list[FileInfo]:
        """Refuse: the service has no way to list files.

        Raises:
            FileRefusedError: Always.
        """
        raise FileRefusedError(".", "the service has no call that lists files; print os.listdir()")

    async def restart(self) -> None:
        """Replace the session by a fresh one; see `Interpreter`."""
        async with self._lock:
            self._require_open()
            self._remote_id = self._loss = None
            await self._ensure_session()

    async def close(self) -> None:
        """Abandon the session, without waiting for a running execution. Idempotent."""
        self._closed = True

    async def _ensure_session(self) -> None:
        """Start a session if there is none, as after a loss."""
        if self._remote_id is None:
            try:
                await self.open()
            except (ConfigurationError, ServiceFailureError) as failure:
                raise ServiceFailureError(str(failure), state_lost=True) from failure

    async def _run(self, code: str, collector: OutputCollector, timeout_s: float) -> Execution:
        # Twice the output limits, because JSON escapes some characters as two.
        max_bytes = 2 * (self._limits.output_hard_bytes + self._limits.outputs_bytes) + _SLACK_BYTES
        try:
            execution = await self._send(code, timeout_s, max_bytes, repeatable=False)
        except _ServiceTimeoutError as error:
            await self._require_service()
            reason = f"{error}; the session was left behind, as there is no way to interrupt it"
            return make_stopped_execution("timeout", reason, state_lost=True)
        except _ReplyTooLargeError as failure:
            return make_stopped_execution("output_limit", str(failure))
        execution.collect_into(collector)
        if collector.bytes_written > self._limits.output_hard_bytes:
            reason = f"it wrote more than {self._limits.output_hard_bytes} bytes, and was not stopped"
            return make_stopped_execution("output_limit", reason)
        raised = execution.error
        return Execution(status="ok") if raised is None else make_failed_execution(raised)

    async def _send(
        self,
        code: str,
        timeout_s: float,
        max_bytes: int,
        *,
        repeatable: bool,
        files: tuple[dict[str, str], ...] = (),
    ) -> _RemoteExecution:
        try:
            execution = await self._backend.execute(
                code,
                self._remote_id,
                timeout_s=timeout_s,
                max_bytes=max_bytes,
                repeatable=repeatable,
                files=files,
            )
        except _ServiceRefusedError as failure:
            raise ServiceFailureError(
                f"expected the service to run the code, got: {failure}", state_lost=await self._is_gone()
            ) from None
        if self._remote_id is not None and execution.session_id != self._remote_id:
            raise ServiceFailureError(
                "expected the answer of one session, got that of another", state_lost=True
            )
        self._remote_id = execution.session_id
        return execution

    async def _require_service(self) -> None:
        """Raise if the service does not respond, which distinguishes that from code that takes too long."""
        try:
            await self._backend.sessions(PROBE_TIMEOUT_S)
        except ServiceFailureError as failure:
            raise ServiceFailureError(str(failure), state_lost=True) from failure

    async def _is_gone(self) -> bool:
        """Return whether the service no longer has the session."""
        if self._remote_id is None:
            return False
        try:
            return self._remote_id not in await self._backend.sessions(PROBE_TIMEOUT_S)
        except ServiceFailureError:
            return False

    def _abandon(self, reason: str) -> None:
        """Give the session up, for the next result to report."""
        self._remote_id, self._loss = None, reason

    def _take_loss(self) -> str | None:
        loss, self._loss = self._loss, None
        return loss

    def _require_open(self) -> None:
        if self._closed or not self._backend.is_connected:
            raise SandboxClosedError("expected an open interpreter, got one that was closed; open another")


async def _send_bounded(
    client: httpx.AsyncClient, request: httpx.Request, max_bytes: int
) -> tuple[httpx.Response, bytes]:
    """Send a request, and return the response and its body. An error's body is truncated at the limit.

    Raises:
        _ReplyTooLargeError: The body of a successful response exceeds `max_bytes`.
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
                raise _ReplyTooLargeError(f"expected an answer of at most {max_bytes} bytes, got more")
    finally:
        await response.aclose()
    return response, bytes(body)


def _shorten_body(body: bytes) -> str:
    """Return an excerpt of a service's response for an error message."""
    text = body[: 4 * _EXCERPT_CHARS].decode("utf-8", "replace")
    return " ".join(text.split())[:_EXCERPT_CHARS] or "(nothing)"
