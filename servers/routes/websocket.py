"""/ws and /mcp in the released dialect: one socket and its session, from accept to close."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeAlias, TypeVar
from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response

from openenv_core.protocol import jsonrpc, replies
from openenv_core.protocol.errors import EXECUTION_ERROR, INVALID_JSON, SESSION_ERROR, RefusalError
from openenv_core.protocol.jsonrpc import JsonRpcFaultError
from openenv_core.protocol.requests import Close, Mcp, ReadState, RequestDecoder, Reset
from servers.execution import FATAL, EnvironmentRunner, end
from servers.routes import description
from servers.routes.answers import reported, while_connected
from servers.routes.connection import (
    GOING_AWAY,
    NORMAL_CLOSURE,
    DisconnectedError,
    Message,
    Receive,
    Send,
    Sockets,
    SocketSender,
)
from servers.routes.jsonrpc import Caller, JsonRpc, fault_of
from servers.security.guard import owner_of
from servers.sessions import DeadlineExceededError, EnvironmentSession, SessionTable, UnknownSessionError

logger = logging.getLogger("servers")

T = TypeVar("T")
NextFrame: TypeAlias = Callable[[], Awaitable[str | None]]

MAX_PIPELINED = 32
"""Requests that a client may send ahead of their replies. The wire is one by one; the allowance is for
clients that gave up on a reply, and the bound keeps a disconnect visible behind them."""

MAX_AHEAD = 16 * 1024 * 1024
"""Characters of all of these together; one request may have as many by itself."""


class SocketSession:
    """A session as the one who speaks for it on a socket has it.

    Args:
        sessions: The table of sessions.
        session: The session.
        connection: The socket's sending side.
        dialect: In which to say that the environment takes too long.
    """

    __slots__ = ("_connection", "_dialect", "_sessions", "runner", "session")

    def __init__(
        self,
        sessions: SessionTable,
        session: EnvironmentSession,
        connection: SocketSender,
        dialect: "Dialect",
    ) -> None:
        self._sessions = sessions
        self._connection = connection
        self._dialect = dialect
        self.session = session
        self.runner = session.runner

    async def run(self, work: Callable[[EnvironmentRunner], Awaitable[T]]) -> T:
        """Do something in the session, with a deadline.

        Raises:
            RefusalError: The session is over, or too many wait for it.
            Exception: Whatever the environment raised.
        """
        if self.session.shared:
            return await self._sessions.call(self.session, work)
        if self.runner.step_inline is not None:
            return await work(self.runner)
        watch = self._connection.watch
        watch.expect(self._sessions.step_timeout_s, self._expire)
        try:
            return await work(self.runner)
        finally:
            watch.stop()

    def _expire(self) -> None:
        refusal = self._sessions.expire(self.session)
        self._connection.end(NORMAL_CLOSURE, self._dialect.refusal(refusal))


class Dialect(Protocol):
    """How requests are read and answered."""

    async def answer(self, seat: SocketSession, text: str | None) -> str | None:
        """Return the reply to one frame, which is None where it is binary; None to a close.

        Raises:
            RefusalError: `UnknownSessionError` and `DeadlineExceededError`: the session is over.
        """

    def refusal(self, refusal: RefusalError) -> str:
        """Return the frame that tells of a refusal for which no request is to blame."""


class SocketRoute:
    """An ASGI application that holds a conversation on every socket.

    Args:
        sessions: Where sessions come from.
        dialect: How requests are read and answered.
        sockets: Keeps count.
        send_timeout_s: Seconds that a client may leave its replies unread.
    """

    def __init__(
        self, sessions: SessionTable, dialect: Dialect, sockets: Sockets, send_timeout_s: float
    ) -> None:
        self._sessions = sessions
        self._dialect = dialect
        self._sockets = sockets
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one socket until it closes."""
        await receive()
        await send({"type": "websocket.accept"})
        connection = SocketSender(scope, send, self._send_timeout_s, self._sessions.step_timeout_s)
        # Where an environment may take its time, requests are read ahead: a client that leaves in mid-step is noticed.
        inbox = None if self._sessions.inline else _Inbox()
        next_frame = _reading(receive) if inbox is None else inbox.get
        worker = connection.task = asyncio.create_task(self._converse(scope, next_frame, connection))
        try:
            if inbox is None:
                await worker
            else:
                await self._read_ahead(receive, inbox, worker, connection)
        except (DisconnectedError, OSError):
            pass  # OSError is how a server tells that a reply found nobody
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The conversation was cancelled, whose end this is.
        finally:
            await end(worker)
            if worker.done():
                connection.release()
            else:
                # It does not heed its cancellation; its deadline holds all the same.
                connection.over = True
                worker.add_done_callback(lambda _: connection.release())
        if worker.done() and not worker.cancelled():
            error = worker.exception()
            if error is not None and not isinstance(error, DisconnectedError | OSError):
                raise error

    def session_of(self, scope: Message) -> AbstractAsyncContextManager[EnvironmentSession]:
        """Return what gives the socket a session of its own, which ends with it.

        Raises:
            RefusalError: On entry: there is none.
        """
        return self._sessions.session(owner_of(scope))

    async def _converse(self, scope: Message, next_frame: NextFrame, connection: SocketSender) -> None:
        """Hold a session for as long as the client stays."""
        dialect = self._dialect
        code = NORMAL_CLOSURE
        last: str | None = None
        try:
            self._sockets.enter(connection)
            async with self.session_of(scope) as session:
                code = await self._answer_all(
                    SocketSession(self._sessions, session, connection, dialect), next_frame, connection
                )
        except RefusalError as refusal:
            last = dialect.refusal(refusal)
        except (DisconnectedError, OSError):
            raise
        except Exception:
            logger.exception("a session ended by a fault of the server")
            last = dialect.refusal(RefusalError(SESSION_ERROR, "the server failed; its log tells why"))
        finally:
            self._sockets.leave(connection)
        await connection.close(code, last)

    async def _answer_all(self, seat: SocketSession, next_frame: NextFrame, connection: SocketSender) -> int:
        """Answer every request; return the code to close with."""
        session, answer, say = seat.session, self._dialect.answer, connection.say
        while not connection.leaving:
            connection.busy = False
            text = await next_frame()
            connection.busy = True
            reply = await answer(seat, text)
            if reply is None:
                return NORMAL_CLOSURE
            await say(reply)
            if session.over and not connection.leaving:
                return NORMAL_CLOSURE  # the reply has told it: a call inside the frame outlasted its time
        return GOING_AWAY

    async def _read_ahead(
        self, receive: Receive, inbox: "_Inbox", worker: asyncio.Task[None], connection: SocketSender
    ) -> None:
        while not worker.done():
            message = await receive()
            if message["type"] != "websocket.receive":
                return
            if not inbox.put(message.get("text")):
                await end(worker)
                text = (
                    f"expected one request at a time, got more than {MAX_PIPELINED}, or than {MAX_AHEAD} "
                    "characters, ahead of their replies"
                )
                await connection.close(
                    NORMAL_CLOSURE, self._dialect.refusal(RefusalError(SESSION_ERROR, text))
                )
                return


class _Inbox:
    """Frames that were read but not served: one reader, one writer, bounded."""

    __slots__ = ("_frames", "_size", "_waiter")

    def __init__(self) -> None:
        self._frames: deque[str | None] = deque()
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None

    def put(self, frame: str | None) -> bool:
        """Add a frame; return False where there are too many."""
        size = self._size + len(frame or "")
        if self._frames and (len(self._frames) >= MAX_PIPELINED or size > MAX_AHEAD):
            return False
        self._size = size
        self._frames.append(frame)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return True

    async def get(self) -> str | None:
        """Wait for a frame. The wait ends with the connection: its task is cancelled then."""
        while not self._frames:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        frame = self._frames.popleft()
        self._size -= len(frame or "")
        return frame


def _reading(receive: Receive) -> NextFrame:
    async def next_frame() -> str | None:
        message = await receive()
        if message["type"] != "websocket.receive":
            raise DisconnectedError
        text: Any = message.get("text")
        return text  # type: ignore[no-any-return]

    return next_frame


def over(refusal: RefusalError) -> bool:
    """Whether a refusal means that the session has ended."""
    return isinstance(refusal, UnknownSessionError | DeadlineExceededError)


class WebSocketRoute(SocketRoute):
    """The ASGI application behind /ws.

    Args:
        sessions: Where sessions come from.
        decoder: Reads the frames.
        rpc: Answers what is inside mcp frames.
        sockets: Keeps count.
        send_timeout_s: Seconds that a client may leave its replies unread.
    """

    def __init__(
        self,
        sessions: SessionTable,
        decoder: RequestDecoder[Any],
        rpc: JsonRpc,
        sockets: Sockets,
        send_timeout_s: float,
    ) -> None:
        super().__init__(sessions, _Frames(decoder, rpc), sockets, send_timeout_s)

    def session_of(self, scope: Message) -> AbstractAsyncContextManager[EnvironmentSession]:
        """Attach the socket to the session that its address names; else give it one of its own.

        Raises:
            RefusalError: On entry: there is none, or somebody speaks for it already.
        """
        wanted = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("session_id")
        if wanted:
            return self._sessions.attach(owner_of(scope), wanted[0])
        return super().session_of(scope)


class _Frames:
    """Reads and answers the frames of the released dialect."""

    def __init__(self, decoder: RequestDecoder[Any], rpc: JsonRpc) -> None:
        self._decoder = decoder
        self._rpc = rpc

    async def answer(self, seat: SocketSession, text: str | None) -> str | None:
        """Return the reply to one frame; None to a close.

        Raises:
            RefusalError: The session is over.
        """
        try:
            if text is None:
                raise RefusalError(
                    INVALID_JSON, "expected a text frame that holds a JSON object, got a binary frame"
                )
            request: Any = self._decoder.frame(text)
            kind = type(request)
            if kind is Reset:
                return replies.encode_observation(
                    await seat.run(lambda runner: runner.reset(request.options))
                )
            if kind is ReadState:
                return replies.encode_state(await seat.run(lambda runner: runner.state()))
            if kind is Close:
                return None
            if kind is Mcp:
                caller = Caller(seat.session.owner, seat.session)
                return replies.encode_mcp(await self._rpc.answer(request.request, caller, len(text)))
            step = seat.runner.step_inline
            if step is not None and not seat.session.shared:  # what others ask too may be busy, or over
                return replies.encode_observation(step(request))
            return replies.encode_observation(await seat.run(lambda runner: runner.step(request)))
        except RefusalError as refusal:
            if over(refusal):
                raise
            return self.refusal(refusal)
        except FATAL as error:
            return _failed(error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return _failed(error)  # the environment's own: this task was not cancelled
        except BaseException as error:
            return _failed(error)  # out of a step on the loop, which nothing stands around

    def refusal(self, refusal: RefusalError) -> str:
        """Return the error frame of a refusal."""
        return replies.encode_error(refusal.code, refusal.message, refusal.extra)


def _failed(error: BaseException) -> str:
    return replies.encode_error(EXECUTION_ERROR, reported(error))


class McpSocketRoute(SocketRoute):
    """The ASGI application behind the socket /mcp.

    Args:
        sessions: Where sessions come from.
        rpc: Answers the requests.
        sockets: Keeps count.
        send_timeout_s: Seconds that a client may leave its replies unread.
    """

    def __init__(self, sessions: SessionTable, rpc: JsonRpc, sockets: Sockets, send_timeout_s: float) -> None:
        super().__init__(sessions, _Rpc(rpc), sockets, send_timeout_s)


class _Rpc:
    """Every frame is a JSON-RPC request."""

    def __init__(self, rpc: JsonRpc) -> None:
        self._rpc = rpc

    async def answer(self, seat: SocketSession, text: str | None) -> str | None:
        """Return the response to one frame."""
        if text is None:
            fault = JsonRpcFaultError(
                jsonrpc.PARSE_ERROR, "expected a text frame that holds a request, got a binary frame"
            )
            return jsonrpc.encode_fault(None, fault).decode()
        return (await self._rpc.answer_text(text, Caller(seat.session.owner, seat.session))).decode()

    def refusal(self, refusal: RefusalError) -> str:
        """Return the response that no request has asked for."""
        return jsonrpc.encode_fault(None, fault_of(refusal)).decode()


def mcp_router(rpc: JsonRpc) -> APIRouter:
    """Return the HTTP side of /mcp."""
    router = APIRouter()

    @router.post(
        "/mcp",
        response_model=None,
        responses={200: description.answer("The response.", description.RPC_ANSWER)},
        openapi_extra=description.RPC_BODY,
    )
    async def mcp(request: Request) -> Response:
        """Answer one JSON-RPC request; errors are in the body, the status is 200.

        Requests of standard MCP, which `servers.mcp` answers at this address, do not come this far.
        """
        caller = Caller(owner_of(request.scope))
        # Whoever leaves gives up what was made for the request alone; a call in a standing session goes on.
        return await while_connected(request, _answered(rpc, await request.body(), caller))

    return router


async def _answered(rpc: JsonRpc, text: bytes, caller: Caller) -> Response:
    return Response(await rpc.answer_text(text, caller), media_type="application/json")
