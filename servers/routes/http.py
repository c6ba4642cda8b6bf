"""Plain HTTP: reset, step and state, in the session that a request names or in an environment of its own.

Also the helpers that all HTTP routes share for bodies, refusals and failures, and for requests whose caller awaits the
reply (`answer_request`).
"""

import asyncio
import logging
import math
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from time import perf_counter
from typing import Any, Final, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive

from openenv_core.errors import EnvironmentFailureError
from openenv_core.protocol import frames
from openenv_core.protocol.errors import (
    CAPACITY_REACHED,
    EXECUTION_ERROR,
    SESSION_ERROR,
    VALIDATION_ERROR,
    RefusalError,
    text_of,
)
from openenv_core.protocol.frames import (
    READ_STATE,
    RequestDecoder,
    Reset,
    http_reset,
    invalid_body,
    read_json,
    validate,
)
from openenv_core.protocol.http import SESSION_COOKIE, SESSION_HEADER, SESSION_ID
from openenv_core.protocol.jsonio import dumps
from openenv_core.tracebacks import authors_part
from servers.execution import FATAL
from servers.metrics import ServerMetrics
from servers.security import owner_of
from servers.sessions import (
    REQUEST_WAIT_S,
    DeadlineExceededError,
    EnvironmentSession,
    FullError,
    SessionBusyError,
    SessionTable,
    UnknownSessionError,
)
from servers.sessions.session import NO_OPTIONS, Options, RequestCall, ResultCall

logger = logging.getLogger("servers")

NEW: Final = "new"
"""The session id with which a reset requests a new session under an id that the server chooses."""

CLIENT_LEFT: Final = 499
"""The status of a request whose client disconnected before its reply; it appears only in the log."""

RETRY_AFTER_S: Final = 1

_PREFERRED_WAIT: Final = re.compile(rb"(?:^|[,;])\s*wait\s*=\s*(\d{1,6})\s*(?:$|[,;])", re.IGNORECASE)

ModelT = TypeVar("ModelT", bound=BaseModel)
T = TypeVar("T")


def make_route(path: str, endpoint: Callable[..., Any], *methods: str) -> Route:
    """Return a route without HEAD, which Starlette adds to GET, but the OpenAPI document does not describe."""
    route = Route(path, endpoint, methods=methods)
    assert route.methods is not None
    route.methods.discard("HEAD")
    return route


def path_of(scope: Mapping[str, Any]) -> str:
    """Return a connection's path without the prefix under which a parent app has mounted this one, if any."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, which is not None; if the client disconnects first, cancel it and return None.

    The client is watched by a task, but only once `work` waits for something.
    """
    watch: asyncio.Task[None] | None = None

    def start_watch() -> None:
        nonlocal watch
        watch = asyncio.create_task(_wait_disconnect(receive, until_left))

    try:
        async with asyncio.timeout(None) as until_left:
            start = asyncio.get_running_loop().call_soon(start_watch)
            try:
                return await work
            finally:
                start.cancel()
                if watch is not None and not watch.done():
                    watch.cancel()
    except TimeoutError:
        if not until_left.expired():
            raise
        return None


async def _wait_disconnect(receive: Receive, until_left: asyncio.Timeout) -> None:
    while not (await receive())["type"].endswith(".disconnect"):
        pass
    until_left.reschedule(0.0)


async def respond(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the response of `work`; 499 if the client disconnects first, 503 if the server stops first."""
    try:
        return await while_connected(request.receive, work) or Response(status_code=CLIENT_LEFT)
    except asyncio.CancelledError:
        text = "the server is stopping and has ended this call; connect to another"
        detail = {"message": text, "code": SESSION_ERROR}
        return json_answer(dumps({"detail": detail}), 503, retry_headers(503))


def status_of(refusal: RefusalError) -> int:
    """Return the HTTP status of a refusal."""
    if refusal.code == VALIDATION_ERROR:
        return 422
    if refusal.code == CAPACITY_REACHED:
        return 503
    for kind, status in ((SessionBusyError, 429), (UnknownSessionError, 404), (DeadlineExceededError, 504)):
        if isinstance(refusal, kind):
            return status
    return 500


def retry_headers(status: int, after_s: float | None = None) -> dict[str, str]:
    """Return the Retry-After header of a 429 or 503 response, after the estimated `after_s` if given."""
    seconds = max(RETRY_AFTER_S, math.ceil(after_s or 0))
    return {"Retry-After": str(seconds)} if status in (429, 503) else {}


def refusal_of(error: BaseException) -> RefusalError:
    """Return a refusal itself; for what the environment raised, which is logged, the one that reports it."""
    return error if isinstance(error, RefusalError) else RefusalError(EXECUTION_ERROR, report_error(error))


def refusal_data(refusal: RefusalError) -> dict[str, Any]:
    """Return the fields of a refusal over plain HTTP and in our own dialect."""
    queue = refusal.queue if isinstance(refusal, FullError) else {}
    return {"message": refusal.message, "code": refusal.code, **refusal.extra, **queue}


def refusal_response(refusal: RefusalError, metrics: ServerMetrics) -> Response:
    """Return the response to a refused request, and count the error."""
    metrics.count_error(refusal.code)
    status = status_of(refusal)
    if status == 422:
        return json_answer(dumps({"detail": refusal.extra["errors"]}), status)
    data = refusal_data(refusal)
    return json_answer(dumps({"detail": data}), status, retry_headers(status, data.get("retry_after_s")))


def json_answer(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a body of encoded JSON."""
    return Response(body, status, headers, "application/json")


async def json_body(request: Request) -> bytes:
    """Return the body, whose size the guard has limited.

    Raises:
        RefusalError: VALIDATION_ERROR: its content type is not JSON.
    """
    body = await request.body()
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    if body and not is_json:
        raise invalid_body(f"expected a body of type application/json, got {kind}")
    return body


async def read_model(request: Request, model: type[ModelT]) -> ModelT:
    """Read the body into a model. FastAPI itself would list every error, even a million in one body.

    Raises:
        RefusalError: VALIDATION_ERROR.
    """
    body = await json_body(request)
    return validate(model, read_json(body), len(body))


def report_error(error: BaseException, event: str = "the environment raised") -> str:
    """Log an exception of an environment, and return its text for the caller.

    Args:
        error: The exception. An `EnvironmentFailureError`, by which an environment refuses a request, is only logged at
            debug level, since it does not concern the operator.
        event: What happened, for the log.
    """
    if isinstance(error, EnvironmentFailureError):
        logger.debug("the environment refused: %s", error)
    else:
        traceback = authors_part(error) or error.__traceback__
        logger.error("%s", event, exc_info=(type(error), error, traceback))
    return text_of(error)


def wait_of(headers: Iterable[tuple[bytes, bytes]], default_s: float) -> float:
    """Return the seconds to wait for a slot, from the header `Prefer: wait=N` (RFC 7240)."""
    for name, value in headers:
        if name.lower() == b"prefer" and (match := _PREFERRED_WAIT.search(value)):
            return float(match[1])
    return default_s


def requested_session_id(request: Request) -> str | None:
    """Return the session id in a request's header or else its cookie; None if there is none.

    Raises:
        RefusalError: VALIDATION_ERROR: it is not a valid id.
    """
    named = request.headers.getlist(SESSION_HEADER)
    place, key = ("header", SESSION_HEADER.lower()) if named else ("cookie", SESSION_COOKIE)
    session_id = ", ".join(named) if named else request.cookies.get(SESSION_COOKIE)
    if session_id is None or SESSION_ID.fullmatch(session_id):
        return session_id
    text = "String should be 1 to 128 of the characters A-Z a-z 0-9 . _ -"
    fault = {"type": "string_pattern_mismatch", "loc": [place, key], "msg": text, "input": session_id}
    raise RefusalError(VALIDATION_ERROR, "Invalid session id", {"errors": [fault]})


def _session_headers(request: Request, session_id: str, keep: bool = False) -> dict[str, str]:
    """Return the response headers that name the session; with `keep`, also as a cookie for the paths of this app."""
    headers = {SESSION_HEADER: session_id}
    if keep:
        path = request.scope.get("root_path") or "/"
        secure = "; Secure" if _is_encrypted(request) else ""
        headers["Set-Cookie"] = (
            f"{SESSION_COOKIE}={session_id}; HttpOnly; SameSite=Strict; Path={path}{secure}"
        )
    return headers


def _is_encrypted(request: Request) -> bool:
    """Whether the caller uses TLS to this server or to a proxy. A false claim only hides the caller's own cookie."""
    forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    return request.url.scheme == "https" or forwarded == "https"


class _AnsweredCall(RequestCall, ResultCall):
    """A request whose caller awaits the reply, `result`."""

    __slots__ = ("encode", "encode_state", "result")

    def __init__(self, encode: Callable[[Any], Any], received_at: float) -> None:
        self.received_at = received_at
        self.request_id = None
        self.encode = self.encode_state = lambda value, _: encode(value)
        self.result = asyncio.get_running_loop().create_future()

    def reply(self, reply: Any, /) -> None:
        """Set the result."""
        if not self.result.done():  # or else the caller has gone
            self.result.set_result(reply)

    def refuse(self, error: BaseException, /) -> None:
        """Set the error."""
        if not self.result.done():
            self.result.set_exception(error)


async def answer_request(
    session: EnvironmentSession,
    request: Any,
    encode: Callable[[Any], Any] = lambda result: result,
    *,
    kind: int | None = None,
    received_at: float = 0.0,
    options: Options = NO_OPTIONS,
    traceparent: str | None = None,
) -> Any:
    """Have a session answer a request, and return the reply; for callers that await it.

    Args:
        session: The session to call.
        request: What the dialect has decoded.
        encode: Makes the reply of what the environment returned.
        kind: What the call counts as, in place of a reset or step: an index of `servers.metrics.CALLS`.
        received_at: When the request came, by `perf_counter`; 0 if it is not to be counted.
        options: Options of the step beside the action.
        traceparent: W3C trace context of the client's span, if any.

    Raises:
        RefusalError: As `EnvironmentSession.submit`.
        Exception: Whatever the environment or `encode` raised.
    """
    call = _AnsweredCall(encode, received_at)
    call.bind(session, request, options, traceparent)
    if kind is not None:
        call.counts = session.metrics.counts.calls[kind]
    return await session.perform(call)


class HttpRoutes:
    """The routes of reset, step and state, each run in the session that a request names or in one of its own."""

    def __init__(self, sessions: SessionTable, decoder: RequestDecoder[Any]) -> None:
        self._sessions = sessions
        self._decoder = decoder

    def routes(self) -> list[Route]:
        """Return the routes; `servers.routes.description` describes them in the OpenAPI document."""
        return [
            make_route("/reset", partial(self._serve, lambda body: (Reset(http_reset(body)), {})), "POST"),
            make_route("/step", partial(self._serve, self._decoder.http_step), "POST"),
            make_route("/state", partial(self._serve, None), "GET"),
        ]

    async def _serve(
        self, decode: Callable[[bytes], tuple[Any, dict[str, Any]]] | None, request: Request
    ) -> Response:
        """Decode the body to a request and its options, and answer it until the client disconnects."""
        metrics = self._sessions.metrics
        try:
            decoded = (READ_STATE, {}) if decode is None else decode(await json_body(request))
            session_id = requested_session_id(request)
        except RefusalError as refusal:
            response = refusal_response(refusal, metrics)
        else:
            response = await respond(request, self._answer(request, session_id, *decoded))
        if metrics.enabled:
            metrics.counts.sent_bytes += len(response.body)
            if decode is not None:
                metrics.counts.received_bytes += len(await request.body())
        return response

    async def _answer(
        self, request: Request, session_id: str | None, decoded: Any, options: dict[str, Any]
    ) -> Response:
        """Call a session and return the response; a reset opens the named session if it does not exist."""
        sessions, owner = self._sessions, owner_of(request.scope)
        wait_s = wait_of(request.scope["headers"], REQUEST_WAIT_S)
        is_reset = isinstance(decoded, Reset)
        session: EnvironmentSession | None = None
        headers: dict[str, str] = {}
        try:
            if session_id is None:
                async with sessions.session(owner, wait_s=wait_s) as session:
                    return json_answer(await self._call(request, session, decoded, options))
            if not is_reset:
                session = sessions.find(owner, session_id)
            elif session_id == NEW:
                session = await sessions.open(owner, wait_s=wait_s)
            else:
                session = await sessions.find_or_open(owner, session_id, wait_s=wait_s)
            headers = _session_headers(request, session.id, keep=is_reset)
            return json_answer(await self._call(request, session, decoded, options), 200, headers)
        except RefusalError as refusal:
            return refusal_response(refusal, self._sessions.metrics)
        except asyncio.CancelledError:
            if session is not None and session_id == NEW:
                sessions.drop(session)  # nobody has been told its id
            raise
        except FATAL as error:
            if session is None:
                raise
            sessions.metrics.count_error(EXECUTION_ERROR)
            return json_answer(dumps({"detail": report_error(error)}), 500, headers)

    async def _call(
        self, request: Request, session: EnvironmentSession, decoded: Any, options: dict[str, Any]
    ) -> bytes:
        return await answer_request(  # type: ignore[no-any-return]
            session,
            decoded,
            frames.encode_model if decoded is READ_STATE else frames.encode_http_result,
            received_at=perf_counter() if session.metrics.enabled else 0.0,
            options=options,
            traceparent=request.headers.get("traceparent"),
        )
