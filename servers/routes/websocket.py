"""/ws in the released dialect."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.parse import parse_qs

from openenv_core.protocol import replies
from openenv_core.protocol.codes import EXECUTION_ERROR, INVALID_JSON, Refusal
from openenv_core.protocol.requests import Close, Mcp, ReadState, RequestDecoder, Reset
from servers.execution import FATAL
from servers.routes.connection import Message
from servers.routes.conversation import Seat, SocketRoute, over
from servers.routes.failures import reported
from servers.routes.jsonrpc import Caller, JsonRpc
from servers.routes.sockets import Sockets
from servers.security.guard import owner_of
from servers.sessions import Session, SessionTable


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

    def session_of(self, scope: Message) -> AbstractAsyncContextManager[Session]:
        """Attach the socket to the session that its address names; else give it one of its own.

        Raises:
            Refusal: On entry: there is none, or somebody speaks for it already.
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

    async def answer(self, seat: Seat, text: str | None) -> str | None:
        """Return the reply to one frame; None to a close.

        Raises:
            Refusal: The session is over.
        """
        try:
            return await self._answer(seat, text)
        except Refusal as refusal:
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

    def refusal(self, refusal: Refusal) -> str:
        """Return the error frame of a refusal."""
        return replies.encode_error(refusal.code, refusal.message, refusal.extra)

    async def _answer(self, seat: Seat, text: str | None) -> str | None:
        if text is None:
            raise Refusal(INVALID_JSON, "expected a text frame that holds a JSON object, got a binary frame")
        request: Any = self._decoder.frame(text)
        kind = type(request)
        if kind is Reset:
            return replies.encode_observation(await seat.run(lambda runner: runner.reset(request.options)))
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


def _failed(error: BaseException) -> str:
    return replies.encode_error(EXECUTION_ERROR, reported(error))
