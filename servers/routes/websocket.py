"""/ws in the released dialect: one socket, one session, one reply to each request, in order."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import parse_qs

from openenv_core.errors import EnvironmentFailure
from openenv_core.protocol import replies
from openenv_core.protocol.codes import EXECUTION_ERROR, INVALID_JSON, SESSION_ERROR, Refusal
from openenv_core.protocol.requests import Close, Mcp, ReadState, RequestDecoder, Reset
from servers.execution import FATAL, Runner, end
from servers.sessions import SessionTable

logger = logging.getLogger("servers")

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
NextFrame: TypeAlias = Callable[[], Awaitable[str | None]]

NORMAL_CLOSURE = 1000

MAX_PIPELINED = 32
"""Requests that a client may send ahead of their replies. The wire is one by one; the allowance is for
clients that gave up on a reply, and the bound keeps a disconnect visible behind them."""


class _Disconnected(Exception):  # noqa: N818 - control flow
    """The client has left."""


class WebSocketRoute:
    """The ASGI application behind /ws.

    Args:
        sessions: Where sessions come from.
        decoder: Reads the frames.
    """

    def __init__(self, sessions: SessionTable, decoder: RequestDecoder[Any]) -> None:
        self._sessions = sessions
        self._decoder = decoder

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one socket until it closes."""
        await receive()
        await send({"type": "websocket.accept"})
        attach = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("session_id")
        try:
            if attach:
                await _refuse(send, Refusal(SESSION_ERROR, f"Unknown session_id: {attach[0]}"))
            elif self._sessions.inline:
                await self._converse(_reading(receive), send)
            else:
                await self._converse_watched(receive, send)
        except (_Disconnected, OSError):
            pass  # OSError is how a server tells that a reply found nobody

    async def _converse(self, next_frame: NextFrame, send: Send) -> None:
        """Hold a session for as long as the client stays."""
        try:
            async with self._sessions.session() as session:
                await self._answer_all(session.runner, next_frame, send)
        except Refusal as refusal:
            await _refuse(send, refusal)
        except (_Disconnected, OSError):
            raise
        except Exception:
            logger.exception("a session ended by a fault of the server")
            await _refuse(send, Refusal(SESSION_ERROR, "the server failed; its log tells why"))
        else:
            await send({"type": "websocket.close", "code": NORMAL_CLOSURE})

    async def _converse_watched(self, receive: Receive, send: Send) -> None:
        """Do the same while reading ahead, so that a client that leaves in mid-step is noticed.

        The conversation runs in a task of its own, which is cancelled when the client leaves.
        """
        inbox = _Inbox()
        worker = asyncio.create_task(self._converse(inbox.get, send))
        try:
            while not worker.done():
                message = await receive()
                if message["type"] != "websocket.receive":
                    break
                if not inbox.put(message.get("text")):
                    await end(worker)
                    text = f"expected one request at a time, got {MAX_PIPELINED} ahead of their replies"
                    await _refuse(send, Refusal(SESSION_ERROR, text))
                    break
        finally:
            await end(worker)
        if worker.done() and not worker.cancelled() and (error := worker.exception()) is not None:
            raise error

    async def _answer_all(self, runner: Runner, next_frame: NextFrame, send: Send) -> None:
        while True:
            text = await next_frame()
            try:
                reply = await self._answer(runner, text)
            except Refusal as refusal:
                reply = replies.encode_error(refusal.code, refusal.message, refusal.extra)
            except FATAL as error:
                reply = _execution_error(error)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                reply = _execution_error(error)  # the environment's own: this task was not cancelled
            if reply is None:
                return
            await send({"type": "websocket.send", "text": reply})

    async def _answer(self, runner: Runner, text: str | None) -> str | None:
        """Return the reply to one frame; None to a close."""
        if text is None:
            raise Refusal(INVALID_JSON, "expected a text frame that holds a JSON object, got a binary frame")
        request: Any = self._decoder.frame(text)
        kind = type(request)
        if kind is Reset:
            return replies.encode_observation(await runner.reset(request.options))
        if kind is ReadState:
            return replies.encode_state(await runner.state())
        if kind is Close:
            return None
        if kind is Mcp:
            return replies.encode_mcp_unavailable(request.request)
        if runner.step_inline is not None:
            return replies.encode_observation(runner.step_inline(request))
        return replies.encode_observation(await runner.step(request))


class _Inbox:
    """Frames that were read but not served: one reader, one writer, bounded."""

    __slots__ = ("_frames", "_waiter")

    def __init__(self) -> None:
        self._frames: deque[str | None] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, frame: str | None) -> bool:
        """Add a frame; return False where there are too many."""
        if len(self._frames) >= MAX_PIPELINED:
            return False
        self._frames.append(frame)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return True

    async def get(self) -> str | None:
        """Wait for a frame. The wait ends with the connection: its task is cancelled then."""
        while not self._frames:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._frames.popleft()


def _reading(receive: Receive) -> NextFrame:
    async def next_frame() -> str | None:
        message = await receive()
        if message["type"] != "websocket.receive":
            raise _Disconnected
        return message.get("text")

    return next_frame


def _execution_error(error: BaseException) -> str:
    if isinstance(error, EnvironmentFailure):
        logger.debug("the environment refused: %s", error)
    else:
        logger.error("the environment raised", exc_info=error)
    return replies.encode_error(EXECUTION_ERROR, str(error) or type(error).__name__)


async def _refuse(send: Send, refusal: Refusal) -> None:
    """Send an error frame and close, as the released server does where no session comes about."""
    text = replies.encode_error(refusal.code, refusal.message, refusal.extra)
    await send({"type": "websocket.send", "text": text})
    await send({"type": "websocket.close", "code": NORMAL_CLOSURE})
