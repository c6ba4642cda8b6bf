"""The gateway's web application and server: one process for the agents of many episodes."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl_bridge.errors import ConfigError
from rl_bridge.gateway.dialects import ChatDialect, Dialect, MessagesDialect, ResponsesDialect
from rl_bridge.gateway.dialects.base import encode
from rl_bridge.gateway.episode import CallRecord, GatewayEpisode, RetryMarks
from rl_bridge.gateway.mcp import answer_mcp
from rl_bridge.gateway.messages import GatewayError, ModelRequest

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

KEEP_ALIVE_S: Final = 10.0
"""How long a stream is silent while its answer is sampled. An error that is known before that has its own status."""
MAX_BODY_BYTES: Final = 64 << 20
RETRY_AFTER_S: Final = 1
MODEL: Final = "policy"
"""The name of the model in its list. Requests may name any: agents have names of their own for side calls."""
HOST: Final = "127.0.0.1"


class Gateway:
    """The episodes that agents play now, by their keys.

    Args:
        keep_alive_s: How long a stream may be silent.
        routes: Further routes of the application.
    """

    def __init__(self, *, keep_alive_s: float = KEEP_ALIVE_S, routes: Sequence[Route] = ()) -> None:
        self.keep_alive_s = keep_alive_s
        self._episodes: dict[str, GatewayEpisode] = {}
        self.app = Starlette(routes=[*self._routes(), *routes])

    def open(self, episode: GatewayEpisode) -> None:
        """Answer requests with an episode's key from now on."""
        self._episodes[episode.key] = episode

    async def close(self, episode: GatewayEpisode) -> None:
        """End an episode's key, and abort its answers in progress. Its calls stay readable."""
        self._episodes.pop(episode.key, None)
        await episode.close()

    def find(self, headers: Mapping[str, str]) -> GatewayEpisode:
        """Return the episode whose key a request has; GatewayError if there is none."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        episode = self._episodes.get(key)
        if episode is None:
            raise GatewayError(
                "expected the API key of an episode that is being played, got another one",
                status=HTTPStatus.UNAUTHORIZED,
                code="invalid_api_key",
            )
        return episode

    def _routes(self) -> list[Route]:
        chat, messages, responses = ChatDialect(), MessagesDialect(), ResponsesDialect()
        return [
            Route("/", _say_hello),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{model:path}", self._show_model),
            Route("/v1/chat/completions", _CallEndpoint(self, chat), methods=["POST"]),
            Route("/v1/messages", _CallEndpoint(self, messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", self._counter(messages), methods=["POST"]),
            Route("/v1/responses", _CallEndpoint(self, responses), methods=["POST"]),
            Route("/v1/responses/input_tokens", self._counter(responses), methods=["POST"]),
            Route("/mcp", self._answer_mcp, methods=["POST", "DELETE"]),
        ]

    async def _list_models(self, request: Request) -> Response:
        return self._guard(request, lambda: {"object": "list", "data": [_model(MODEL)]})

    async def _show_model(self, request: Request) -> Response:
        return self._guard(request, lambda: _model(request.path_params["model"]))

    def _guard(self, request: Request, make: Callable[[], dict[str, Any]]) -> Response:
        try:
            self.find(request.headers)
        except GatewayError as error:
            return JSONResponse(ChatDialect().write_error(error), error.status)
        return JSONResponse(make())

    def _counter(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        async def count(request: Request) -> Response:
            try:
                episode = self.find(request.headers)
                tokens = episode.count_tokens(dialect.read(await read_body(request)))
            except GatewayError as error:
                return JSONResponse(dialect.write_error(error), error.status)
            return JSONResponse(dialect.write_count(tokens))

        return count

    async def _answer_mcp(self, request: Request) -> Response:
        try:
            episode = self.find(request.headers)
            if episode.tools is None:
                raise GatewayError("the episode has no tools", status=HTTPStatus.NOT_FOUND)
            if request.method == "DELETE":
                return Response(status_code=HTTPStatus.OK)
            answer = await answer_mcp(episode.tools, await read_body(request))
        except GatewayError as error:
            return JSONResponse(ChatDialect().write_error(error), error.status)
        return Response(status_code=HTTPStatus.ACCEPTED) if answer is None else JSONResponse(answer)


async def _say_hello(request: Request) -> Response:
    return JSONResponse({"name": "ropewalk gateway"})


def _model(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "owned_by": "ropewalk",
    }


async def read_body(request: Request) -> Mapping[str, Any]:
    """Return a request's JSON object; GatewayError if it has none."""
    parts: list[bytes] = []
    length = 0
    async for part in request.stream():  # whose length a client may not say, or not truly
        parts.append(part)
        if (length := length + len(part)) > MAX_BODY_BYTES:
            raise GatewayError(
                f"expected a body of at most {MAX_BODY_BYTES} bytes, got more",
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            )
    try:
        body = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise GatewayError(f"expected a body of JSON: {error}") from error
    if not isinstance(body, Mapping):
        raise GatewayError(f"expected a JSON object as the body, got {type(body).__name__}")
    return body


class _CallEndpoint:
    """Answers the calls of one dialect, whole or as a stream. Notices when its client leaves."""

    def __init__(self, gateway: Gateway, dialect: Dialect) -> None:
        self._gateway = gateway
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        try:
            episode = self._gateway.find(http.headers)
            request = self._dialect.read(await read_body(http))
            record = episode.request(request, _read_marks(http.headers))
        except ClientDisconnect:
            return
        except GatewayError as error:
            await self._send_error(error, scope, receive, send)
            return
        gone = asyncio.ensure_future(_wait_disconnected(receive))
        delivered = False
        try:
            if await self._wait(record, gone, self._gateway.keep_alive_s if request.stream else None):
                delivered = await self._reply(record, request, gone, scope, receive, send)
            elif not gone.done():
                delivered = await self._stream_later(record, request, gone, send)
        finally:
            record.leave(delivered=delivered and not gone.done())
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone

    async def _wait(self, record: CallRecord, gone: "asyncio.Future[None]", timeout_s: float | None) -> bool:
        """Wait for an answer until the client leaves or the time is over; returns whether it is there."""
        waits: set[asyncio.Future[Any]] = {record.task, gone}
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return record.task.done() and not gone.done()

    async def _reply(
        self,
        record: CallRecord,
        request: ModelRequest,
        gone: "asyncio.Future[None]",
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> bool:
        """Send an answer that is there; returns whether it was sent to its end."""
        if (error := _error_of(record)) is not None:
            await self._send_error(error, scope, receive, send)
            return False
        dialect = self._dialect
        if request.stream:
            await _start_stream(send)
            return await self._send_events(record, request, send)
        body = encode(dialect.write(record.task.result(), request))
        await send(_start(HTTPStatus.OK, b"application/json", len(body)))
        await send({"type": "http.response.body", "body": body})
        return True

    async def _send_events(self, record: CallRecord, request: ModelRequest, send: Send) -> bool:
        dialect = self._dialect
        events = [*dialect.open_stream(record.head, request), *dialect.stream(record.task.result(), request)]
        await send({"type": "http.response.body", "body": b"".join(events)})
        return True

    async def _stream_later(
        self, record: CallRecord, request: ModelRequest, gone: "asyncio.Future[None]", send: Send
    ) -> bool:
        """Begin a stream before its answer is there, and keep it alive until it is."""
        dialect = self._dialect
        await _start_stream(send)
        await _send_part(send, b"".join(dialect.open_stream(record.head, request)))
        while not await self._wait(record, gone, self._gateway.keep_alive_s):
            if gone.done():
                return False
            await _send_part(send, dialect.PING)
        if (error := _error_of(record)) is not None:
            body = dialect.stream_error(error, record.head, request)
            await send({"type": "http.response.body", "body": body})
            return False
        events = b"".join(dialect.stream(record.task.result(), request))
        await send({"type": "http.response.body", "body": events})
        return True

    async def _send_error(self, error: GatewayError, scope: Scope, receive: Receive, send: Send) -> None:
        headers = (
            {"retry-after": str(RETRY_AFTER_S)} if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else None
        )
        response = JSONResponse(self._dialect.write_error(error), error.status, headers)
        await response(scope, receive, send)


def _error_of(record: CallRecord) -> GatewayError | None:
    if record.task.cancelled():
        return GatewayError("the episode is over", status=HTTPStatus.FORBIDDEN, code="episode_over")
    error = record.task.exception()
    if error is None or isinstance(error, GatewayError):
        return error
    raise error


def _read_marks(headers: Mapping[str, str]) -> RetryMarks:
    count = headers.get("x-stainless-retry-count", "0")
    return RetryMarks(int(count) if count.isdigit() else 0, headers.get("idempotency-key"))


async def _wait_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, content_type: bytes, length: int | None = None) -> MutableMapping[str, Any]:
    headers = [(b"content-type", content_type)]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    else:
        headers.append((b"cache-control", b"no-cache"))
    return {"type": "http.response.start", "status": int(status), "headers": headers}


async def _start_stream(send: Send) -> None:
    await send(_start(HTTPStatus.OK, b"text/event-stream; charset=utf-8"))


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


class GatewayServer:
    """A gateway that listens on a port of this machine, on the running event loop."""

    def __init__(self, gateway: Gateway, *, host: str = HOST, port: int = 0) -> None:
        self.gateway = gateway
        config = uvicorn.Config(gateway.app, log_config=None, access_log=False, lifespan="off", ws="none")
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        self._host, self._port = host, port

    @property
    def address(self) -> tuple[str, int]:
        """Its host and port."""
        (server,) = self._server.servers
        return self._host, server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        """Its URL, without `/v1`."""
        return "http://{}:{}".format(*self.address)

    async def start(self) -> None:
        """Listen; returns when it does.

        Raises:
            ConfigError: It cannot listen at its address.
        """
        # Not by uvicorn, which ends the whole process if it cannot.
        try:
            family = (await asyncio.get_running_loop().getaddrinfo(self._host, None))[0][0]
            listener = socket.create_server((self._host, self._port), family=family)
        except OSError as error:
            raise ConfigError(
                f"expected to listen at {self._host}:{self._port}, got: {error.strerror or error}; give an address of "
                "this machine (rollout.agent.gateway_host, --host) and a port that is free"
            ) from error
        self._task = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the gateway ended before it listened")
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Close all connections."""
        self._server.should_exit = self._server.force_exit = True
        if self._task is not None:
            await self._task


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Leave the process's signals to the program that the gateway is a part of."""
        yield
