"""The backend for Together's Code Interpreter, written to its documentation; never run against the real service."""

import asyncio
import base64
import hashlib
import json
import logging
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httpx

from openenv_core.backoff import exponential_pause_s
from openenv_core.errors import ConfigurationError
from openenv_core.protocol.http import is_bearer_token, retry_after
from openenv_core.sandbox import Execution, Limits
from servers.listening import is_loopback

from .hosted import (
    INSIDE_TIMEOUT_S,
    MAX_REPLY_BYTES,
    HostedBackend,
    HostedInterpreter,
    HostFailureError,
    InsideCall,
    ResponseTooLargeError,
    make_http_client,
    require_done,
    require_plain_url,
    send_bounded,
    shorten_body,
)
from .outputs import OutputCollector, make_failed_execution, make_stopped_execution, parse_traceback

DEFAULT_URL: Final = "https://api.together.ai/v1"
TOKEN: Final = "TOGETHER_API_KEY"
URL: Final = "TOGETHER_BASE_URL"

MIN_BACKOFF_S: Final = 0.25
MAX_BACKOFF_S: Final = 8.0

PROBE_TIMEOUT_S: Final = 2.0
"""How long the request that checks whether a session or the service is alive is retried."""

_MAX_SESSIONS_BYTES: Final = 1 << 20
_SLACK_BYTES: Final = 1 << 16
_MAY_HAVE_RUN: Final = "the code may have run, so it is not sent again"

_UNSENT_ERRORS: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
"""Failures that occur before any part of a request is sent."""

logger = logging.getLogger("openenv_core")


@dataclass(frozen=True, slots=True, kw_only=True)
class TogetherSettings:
    """The address and options of the service.

    Attributes:
        token: The bearer token.
        base_url: The base URL, to which `/tci/execute` is appended.
        network_s: Seconds that a request may take beyond the time limit of its code.
        retry_timeout_s: Seconds during which a repeatable request is retried.
        report_files: Whether to list the files after each execution, which takes an extra request.

    Raises:
        ConfigurationError: A value is invalid.
    """

    token: str = field(repr=False)
    base_url: str = DEFAULT_URL
    network_s: float = 10.0
    retry_timeout_s: float = 60.0
    report_files: bool = False

    def __post_init__(self) -> None:
        if not is_bearer_token(self.token):
            raise ConfigurationError(
                f"expected {TOKEN} to be a token of printable ASCII without spaces, got {len(self.token)} others"
            )
        require_plain_url(URL, self.base_url)
        parts = urlsplit(self.base_url)
        host = parts.hostname or ""
        if parts.scheme != "https" and host != "localhost" and not is_loopback(host):
            raise ConfigurationError(
                "expected the service's URL with https://, as a token goes there "
                f"(http:// on this machine alone), got {self.base_url!r}"
            )


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


class _ServiceTimeoutError(HostFailureError):
    """The service did not reply in time. The code may still be running."""


class _ServiceRefusedError(HostFailureError):
    """The service rejected the request, for example because its session is gone."""


class _RemoteExecution(NamedTuple):
    """The service's reply to an execution: its session, and its outputs by documented type."""

    session_id: str
    outputs: tuple[tuple[str, Any], ...]

    def collect_into(self, collector: OutputCollector) -> None:
        """Add all outputs to a collector. Undocumented types are dropped and noted as lost."""
        for kind, data in self.outputs:
            if kind in ("stdout", "stderr"):
                collector.write(kind, str(data))
            elif kind == "error":
                collector.error = parse_traceback(data if isinstance(data, str) else json.dumps(data))
            elif kind in ("display_data", "execute_result") and isinstance(data, dict):
                collector.show(kind, data, {})
            else:
                collector.note_loss("stdout", "stderr", "outputs")

    def stdout(self) -> str:
        return "".join(str(data) for kind, data in self.outputs if kind == "stdout")


class TogetherBackend(HostedBackend):
    """Runs code in sessions of Together's Code Interpreter.

    It implements the documented interface and is tested against a fake server of ours, never against the service
    itself. Time and output are limited here. The service controls memory, disk, processes and network, and ends a
    session some time after its last use.

    A request is retried if it was rate limited (429) or never sent. One that the service may have started is retried
    only if running it twice is harmless, which never holds for the session's code.
    """

    def __init__(self, settings: TogetherSettings) -> None:
        super().__init__()
        self._settings = settings
        self._base_url = settings.base_url.rstrip("/")
        self._http = make_http_client(self._base_url, {"Authorization": f"Bearer {settings.token}"})

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
            "GET", "/tci/sessions", None, limit_s, _MAX_SESSIONS_BYTES, True, retry_timeout_s
        )
        try:
            return frozenset(str(each["id"]) for each in reply["data"]["sessions"])
        except (KeyError, TypeError):
            raise self._make_format_error("a list of sessions") from None

    async def _connect(self) -> None:
        await self.sessions()

    def _make_interpreter(self, limits: Limits, packages: tuple[str, ...]) -> "_TogetherInterpreter":
        return _TogetherInterpreter(self, limits, packages, self._settings.report_files)

    async def _disconnect(self) -> None:
        await asyncio.shield(self._http.aclose())

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
                    response, body = await send_bounded(self._http, request, max_bytes)
            except TimeoutError:
                raise _ServiceTimeoutError(
                    f"expected an answer of {self._base_url} within {limit_s:g} s, got none"
                ) from None
            except httpx.TransportError as error:
                failure = f"expected {self._base_url} to answer, got {type(error).__name__}: {error}"
                if not repeatable and not isinstance(error, _UNSENT_ERRORS):
                    raise HostFailureError(self._hide_token(f"{failure}; {_MAY_HAVE_RUN}")) from None
            else:
                if response.status_code == 200:
                    return self._parse_json(body, repeatable)
                status = response.status_code
                failure = f"expected {self._base_url} to answer, got HTTP {status}: {shorten_body(body)}"
                self._require_retry(status, failure, repeatable)
                asked_to_wait = response.headers.get("Retry-After")
            pause_s = exponential_pause_s(attempt, MIN_BACKOFF_S, MAX_BACKOFF_S)
            # Jitter, so that requests that were rejected together are not retried together.
            pause_s = max(pause_s * random.uniform(0.75, 1.0), retry_after(asked_to_wait) or 0.0)
            if time.monotonic() + pause_s > deadline:
                wait = f", asked to wait {asked_to_wait} s" if asked_to_wait else ""
                raise HostFailureError(
                    self._hide_token(f"{failure}; gave up after {attempt} attempts{wait}")
                ) from None
            logger.debug(
                "%s %s is sent again in %.2f s: %s", method, path, pause_s, self._hide_token(failure)
            )
            await asyncio.sleep(pause_s)

    def _require_retry(self, status: int, failure: str, repeatable: bool) -> None:
        """Raise unless the request may be retried after this HTTP status."""
        if status in (401, 403):
            raise HostFailureError(self._hide_token(f"{failure}; see to {TOKEN}"))
        if status == 429 or (status >= 500 and repeatable):
            return
        if status >= 500:
            raise HostFailureError(self._hide_token(f"{failure}; {_MAY_HAVE_RUN}"))
        raise _ServiceRefusedError(self._hide_token(failure))

    def _parse_json(self, body: bytes, repeatable: bool) -> Any:
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise self._make_format_error("JSON" if repeatable else f"JSON ({_MAY_HAVE_RUN})") from None

    def _make_format_error(self, expected: str) -> HostFailureError:
        return HostFailureError(
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
        raise HostFailureError("expected the service to answer with data or errors, got neither")
    return _RemoteExecution(session_id, outputs)


class _TogetherInterpreter(HostedInterpreter):
    """One session of the service.

    The interface cannot interrupt or end a session. One whose code times out is abandoned for the service to end after
    a while, and the next execution starts another.
    """

    def __init__(
        self, service: TogetherBackend, limits: Limits, packages: tuple[str, ...], report_files: bool
    ) -> None:
        super().__init__(limits, packages, isolation="remote", report_files=report_files)
        self._service = service
        self._remote_id: str | None = None

    async def _begin(self) -> None:
        self._remote_id = None
        # Uploads arrive in the session's initial working directory, so that is the workspace.
        await self._enter(own_folder=False)

    async def _end(self) -> None:
        self._remote_id = None

    async def _run(
        self, code: str, collector: OutputCollector, timeout_s: float, stdin: str | None
    ) -> Execution:
        await self._set_stdin(stdin, timeout_s)
        # Twice the output limits, because JSON escapes some characters as two.
        max_bytes = 2 * (self._limits.output_hard_bytes + self._limits.outputs_bytes) + _SLACK_BYTES
        try:
            execution = await self._send(code, timeout_s, max_bytes, repeatable=False)
        except _ServiceTimeoutError as error:
            await self._require_service()
            reason = f"{error}; the session was left behind, as there is no way to interrupt it"
            return make_stopped_execution("timeout", reason, state_lost=True)
        except ResponseTooLargeError as failure:
            return make_stopped_execution("output_limit", str(failure), state_lost=False)
        execution.collect_into(collector)
        if collector.flood.done():
            reason = f"it wrote more than {self._limits.output_hard_bytes} bytes, and was not stopped"
            return make_stopped_execution("output_limit", reason, state_lost=False)
        return Execution(status="ok") if collector.error is None else make_failed_execution(collector.error)

    async def _call_inside(self, call: InsideCall, timeout_s: float) -> str:
        return (await self._send(call.statement, timeout_s, MAX_REPLY_BYTES, repeatable=True)).stdout()

    async def _put(self, path: str, data: bytes) -> None:
        """Upload a file with the documented field, and move it to its path."""
        name = f"upload-{secrets.token_hex(8)}"
        call = InsideCall("take", root=self._root, name=name, path=path)
        upload = {"name": name, "encoding": "base64", "content": base64.b64encode(data).decode()}
        execution = await self._send(
            call.statement, INSIDE_TIMEOUT_S, MAX_REPLY_BYTES, repeatable=True, files=(upload,)
        )
        reply = require_done(path, call.read(execution.stdout()))
        if reply.get("sha256") != hashlib.sha256(data).hexdigest():
            raise HostFailureError("expected the service to put a file where its code runs, it did not")

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
            execution = await self._service.execute(
                code,
                self._remote_id,
                timeout_s=timeout_s,
                max_bytes=max_bytes,
                repeatable=repeatable,
                files=files,
            )
        except _ServiceRefusedError as failure:
            raise HostFailureError(
                f"expected the service to run the code, got: {failure}", state_lost=await self._is_gone()
            ) from None
        if self._remote_id is not None and execution.session_id != self._remote_id:
            raise HostFailureError("expected the answer of one session, got that of another", state_lost=True)
        self._remote_id = execution.session_id
        return execution

    async def _require_service(self) -> None:
        """Raise if the service does not respond, which distinguishes that from code that takes too long."""
        try:
            await self._service.sessions(PROBE_TIMEOUT_S)
        except HostFailureError as failure:
            raise HostFailureError(str(failure), state_lost=True) from failure

    async def _is_gone(self) -> bool:
        """Return whether the service no longer has the session."""
        if self._remote_id is None:
            return False
        try:
            return self._remote_id not in await self._service.sessions(PROBE_TIMEOUT_S)
        except HostFailureError:
            return False
