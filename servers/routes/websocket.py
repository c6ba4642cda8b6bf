"""/ws and /mcp in the released dialect: one socket and its session, from accept to close."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qs

from openenv_core.protocol import frames, jsonrpc
from openenv_core.protocol.batch import SUBPROTOCOL
from openenv_core.protocol.errors import INVALID_JSON, SESSION_ERROR, RefusalError
from openenv_core.protocol.frames import Close, Mcp, RequestDecoder
from openenv_core.protocol.http import DETERMINISTIC, DETERMINISTIC_HEADER
from openenv_core.protocol.jsonrpc import JsonRpcFaultError
from servers.execution import FATAL, cancel_task, keep
from servers.metrics import size_of
from servers.routes.connection import Connection, Message, Receive, Send, connect
from servers.routes.http import refusal_of, wait_of, while_connected
from servers.routes.jsonrpc import Caller, JsonRpc, fault_of
from servers.security import owner_of
from servers.sessions import EnvironmentSession, SessionTable, Ticket
from servers.sessions.session import ENDED, RequestCall

logger = logging.getLogger("servers")

Frame: TypeAlias = str | bytes

SESSION_PATH: Final = "/ws"

NORMAL_CLOSURE: Final = 1000
GOING_AWAY: Final = 1001

HANDSHAKE_WAIT_S: Final = 8.0
"""Seconds that a client waits for a slot before its handshake ends: released clients time out after 10."""

_MAX_PIPELINED: Final = 32
"""Requests that a client may send ahead of their replies. The protocol allows one at a time; more come from clients
that gave up on a reply. The limit keeps their memory bounded."""

_MAX_PIPELINED_CHARS: Final = 16 * 1024 * 1024
"""Total characters of these requests; a single one may have as many."""


class Conversation(ABC):
    """One socket, from accept to close.

    Args:
        scope: The ASGI connection.
        receive: Likewise.
        send: Likewise.
        sockets: The set of open conversations.
        ticket: Its place in the queue for a slot, if it is to have a session of its own.

    Attributes:
        connection: Its frames, once it has been accepted.
        subprotocol: The subprotocol that the client is accepted with, if any.
        draining: Whether no further requests are accepted.
    """

    connection: Connection
    subprotocol: str | None = None

    def __init__(
        self, scope: Message, receive: Receive, send: Send, sockets: "Sockets", ticket: Ticket | None = None
    ) -> None:
        self._channels = scope, receive, send
        self._sockets = sockets
        self._sessions = sockets.sessions
        self._ticket = ticket
        self._close_code = NORMAL_CLOSURE
        self.draining = False

    async def serve(self) -> None:
        """Accept the client, answer its requests until it disconnects, and close.

        With a ticket, the client is accepted once that is settled.
        """
        scope, receive, send = self._channels
        sockets, ticket = self._sockets, self._ticket
        try:
            await receive()
            sockets.add(self)
            if (
                ticket is not None
                and ticket.is_waiting
                and not await while_connected(receive, ticket.wait_settled())
            ):
                return
            headers = [(DETERMINISTIC_HEADER.lower().encode(), DETERMINISTIC.encode())]
            await send(
                {
                    "type": "websocket.accept",
                    "subprotocol": self.subprotocol,
                    "headers": headers if self._sessions.deterministic else [],
                }
            )
            self.connection = connect(scope, receive, send, sockets.send_timeout_s)
            await self._converse()
        except OSError:
            pass  # servers raise it from `send` if the client has disconnected
        finally:
            sockets.remove(self)
            if ticket is not None:
                ticket.leave()

    async def _converse(self) -> None:
        connection = self.connection
        connection.on_frame, connection.on_error = self.on_frame, self._fail
        reader = connection.start()
        try:
            async with AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout(None) as until_left:
                        reader.add_done_callback(lambda _: self._stop_opening(until_left))
                        await self._open(stack)
                except RefusalError as refusal:
                    self.end(NORMAL_CLOSURE, self._encode_error(refusal))
                except TimeoutError:
                    if not until_left.expired():
                        self._fail()
                except Exception:
                    self._fail()
                await asyncio.wait([reader])
                await self._leave()
            self._sockets.remove(self)
            await connection.finish(self._close_code)
        finally:
            await cancel_task(reader)

    @staticmethod
    def _stop_opening(until_left: asyncio.Timeout) -> None:
        with suppress(RuntimeError):  # it is open
            until_left.reschedule(0.0)

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether the session is being opened, or a request answered."""

    @abstractmethod
    async def _open(self, stack: AsyncExitStack) -> None:
        """Open the session, if the conversation has one of its own, and end it with `stack`.

        Raises:
            RefusalError: It was refused.
        """

    @abstractmethod
    async def _leave(self) -> None:
        """End what runs, after the last frame has been read and before the session ends."""

    @abstractmethod
    def on_frame(self, frame: Frame) -> None:
        """Answer a frame, now or later."""

    @abstractmethod
    def _encode_error(self, error: BaseException) -> str:
        """Return the error frame of a refusal or another exception, and count it."""

    def _fail(self) -> None:
        logger.exception("a session ended because of an error in the server")
        self.end(
            NORMAL_CLOSURE,
            self._encode_error(RefusalError(SESSION_ERROR, "the server failed; see its log")),
        )

    def drain(self) -> None:
        """End the conversation after the current reply, or at once if there is none."""
        self.draining = True
        if not self.is_busy:
            self.end(GOING_AWAY)

    def end(self, code: int, last_frame: str | None = None) -> None:
        """Close the socket after what is unsent and a last frame, if any; the session ends then."""
        if last_frame is not None:
            self._sessions.metrics.count_sent(last_frame)
            self.connection.send(last_frame)
        self.connection.close(code)


class SessionConversation(Conversation):
    """One socket of one session: a reply to each request, in order; subclasses decode requests and encode replies.

    Args:
        scope: As of `Conversation`; the rest up to `ticket` too.
        receive: Likewise.
        send: Likewise.
        sockets: Likewise.
        ticket: Likewise.
        session_id: The standing session to attach to, if it has no ticket.
    """

    def __init__(
        self,
        scope: Message,
        receive: Receive,
        send: Send,
        sockets: "Sockets",
        ticket: Ticket | None,
        session_id: str | None,
    ) -> None:
        super().__init__(scope, receive, send, sockets, ticket)
        self._metrics = sockets.sessions.metrics
        self._owner = owner_of(scope)
        self._session_id = session_id
        self._decoder, self._rpc = sockets.decoder, sockets.rpc
        self._session: EnvironmentSession | None = None
        self._frames_ahead: deque[Frame] = deque()
        self._frames_ahead_size = 0
        self._busy = True  # opening
        self._task: asyncio.Task[None] | None = None
        self._call: FrameCall | None = None

    @abstractmethod
    def _answer(self, session: EnvironmentSession, frame: Frame) -> None:
        """Begin to answer a frame."""

    @property
    def is_busy(self) -> bool:
        """Whether the session is being opened, or a request answered."""
        return self._busy

    async def detach(self) -> None:
        """Keep a standing session: the socket is not known to be broken."""

    async def _open(self, stack: AsyncExitStack) -> None:
        sessions, session_id = self._sessions, self._session_id
        self._session = await stack.enter_async_context(
            sessions.session(self._owner, ticket=self._ticket)
            if session_id is None
            else sessions.attach(self._owner, session_id, self)
        )
        self._finish_request()

    async def _leave(self) -> None:
        if self._call is not None and self._session is not None:
            self._session.leave(self._call)
            self._call = None
        if self._task is not None:
            await cancel_task(self._task)

    def on_frame(self, frame: Frame) -> None:
        """Answer a frame, after those before it."""
        if self._busy:
            self._keep_frame(frame)
            return
        session = self._session
        assert session is not None
        self._busy = True
        if self._metrics.enabled:
            self._metrics.counts.received_bytes += len(frame) if frame.isascii() else size_of(frame)
        self._answer(session, frame)

    def _keep_frame(self, frame: Frame) -> None:
        """Keep a frame that came ahead of the reply to the one before it; too many end the conversation."""
        ahead = self._frames_ahead
        size = self._frames_ahead_size + len(frame)
        if ahead and (len(ahead) >= _MAX_PIPELINED or size > _MAX_PIPELINED_CHARS):
            reason = (
                f"expected one request at a time, got more than {_MAX_PIPELINED}, or than "
                f"{_MAX_PIPELINED_CHARS} characters, ahead of their replies"
            )
            self.end(NORMAL_CLOSURE, self._encode_error(RefusalError(SESSION_ERROR, reason)))
            return
        self._frames_ahead_size = size
        ahead.append(frame)

    def _start(self, work: Coroutine[Any, Any, str]) -> None:
        """Run a coroutine that returns the reply."""
        self._task = keep(asyncio.create_task(self._reply_later(work)))

    async def _reply_later(self, work: Coroutine[Any, Any, str]) -> None:
        try:
            reply = await work
        except Exception:
            self._fail()
        else:
            self.reply(reply)
        finally:
            self._task = None

    def reply(self, reply: str) -> None:
        """Send the reply to the request that is being answered, and go on."""
        if self._metrics.enabled:
            self._metrics.counts.sent_bytes += len(reply) if reply.isascii() else size_of(reply)
        self.connection.send(reply)
        if self._frames_ahead or self.draining or self._session.phase is ENDED:  # type: ignore[union-attr]
            self._finish_request()
        else:
            self._busy = False

    def refuse(self, error: BaseException) -> None:
        """Reply with a refusal or with what the environment raised, if the client is still there."""
        if not self.connection.closing:
            self.reply(self._encode_error(error))

    def _finish_request(self) -> None:
        assert self._session is not None
        if self._session.ended:  # a call has exceeded its deadline, as its reply says
            self.end(NORMAL_CLOSURE)
        elif self.draining:
            self.end(GOING_AWAY)
        elif self._frames_ahead:
            # Not at once: answers would nest as deep as there are frames.
            asyncio.get_running_loop().call_soon(self._answer_next)
        else:
            self._busy = False

    def _answer_next(self) -> None:
        frame = self._frames_ahead.popleft()
        self._frames_ahead_size -= len(frame)
        if self.connection.closing:
            return
        self._busy = False
        try:
            self.on_frame(frame)
        except Exception:
            self._fail()


class FrameCall(RequestCall):
    """A request of the released dialect.

    Args:
        conversation: Where it came from.
        received_at: As of `RequestCall`.
    """

    __slots__ = ("_conversation",)

    def __init__(self, conversation: SessionConversation, received_at: float) -> None:
        self._conversation = conversation
        self.received_at = received_at
        self.request_id = None

    def reply(self, reply: str) -> None:
        """Send the reply."""
        self._conversation.reply(reply)

    def refuse(self, error: BaseException) -> None:
        """Answer with a refusal, or with what the environment raised."""
        self._conversation.refuse(error)


class FrameConversation(SessionConversation):
    """/ws in the released dialect."""

    def _answer(self, session: EnvironmentSession, frame: Frame) -> None:
        received_at = perf_counter() if self._metrics.enabled else 0.0
        try:
            if not isinstance(frame, str):
                raise RefusalError(
                    INVALID_JSON, "the frame is binary; send a text frame that holds a JSON object"
                )
            request = self._decoder.frame(frame)
        except FATAL as error:  # the author's validators may raise anything
            self.reply(self._encode_error(error))
            return
        if type(request) is Close:
            self.connection.stop()  # the socket is closed once the session has ended
        elif type(request) is Mcp:
            self._start(answer_mcp(self._rpc, session, request, len(frame)))
        else:
            self._call = call = FrameCall(self, received_at)
            call.bind(session, request)
            session.submit(call)

    def _encode_error(self, error: BaseException) -> str:
        refusal = refusal_of(error)
        self._metrics.count_error(refusal.code)
        return frames.encode_error(refusal.code, refusal.message, refusal.extra)


async def answer_mcp(
    rpc: JsonRpc, session: EnvironmentSession, request: Mcp, size: int, request_id: int | None = None
) -> str:
    """Return the reply to a frame with a JSON-RPC request; `size` is its length."""
    answer = await rpc.answer(request.request, Caller(session.owner, session), size)
    return frames.encode_mcp(answer, request_id)


class RpcConversation(SessionConversation):
    """/mcp in the released dialect: each frame is a JSON-RPC request."""

    def _answer(self, session: EnvironmentSession, frame: Frame) -> None:
        if isinstance(frame, str):
            self._start(self._answer_text(session, frame))
        else:
            text = "the frame is binary; send a text frame that holds a request"
            fault = JsonRpcFaultError(jsonrpc.PARSE_ERROR, text)
            self.reply(self._rpc.encode_fault(None, fault).decode())

    async def _answer_text(self, session: EnvironmentSession, frame: str) -> str:
        return (await self._rpc.answer_text(frame, Caller(session.owner, session))).decode()

    def _encode_error(self, error: BaseException) -> str:
        assert isinstance(error, RefusalError)
        return self._rpc.encode_fault(None, fault_of(error)).decode()


@dataclass(eq=False)
class Sockets:
    """The set of conversations, each from its accept to the end of its session.

    Attributes:
        sessions: Opens their sessions.
        decoder: Decodes requests of the released dialect.
        rpc: Answers JSON-RPC requests.
        send_timeout_s: Seconds that a client may leave replies unread; 0 for no limit.
        draining: Whether new conversations end at once.
    """

    sessions: SessionTable
    decoder: RequestDecoder[Any]
    rpc: JsonRpc
    send_timeout_s: float
    draining: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._conversations: set[Conversation] = set()
        self._conversation_removed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._conversations)

    def add(self, conversation: Conversation) -> None:
        """Add a new conversation."""
        self._conversations.add(conversation)
        conversation.draining = self.draining

    def remove(self, conversation: Conversation) -> None:
        """Remove a conversation whose session has ended."""
        self._conversations.discard(conversation)
        self._conversation_removed.set()

    def start_draining(self) -> None:
        """End every conversation after its current reply. No request is begun from here on."""
        self.draining = True
        for conversation in list(self._conversations):
            conversation.drain()

    async def wait_drained(self, deadline: float) -> None:
        """Wait until the last conversation has ended.

        Args:
            deadline: When to return in any case, by the event loop's clock.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while self._conversations:
                    self._conversation_removed.clear()
                    await self._conversation_removed.wait()


V1Factory: TypeAlias = Callable[[Message, Receive, Send, str | None], Conversation]
"""Creates the conversation for the subprotocol `ropewalk.v1`, attached to the standing session of an id if given."""


@dataclass(frozen=True)
class SocketRoute:
    """An ASGI application that runs a conversation on every socket.

    Attributes:
        kind: The conversation in the released dialect.
        sockets: The set of open conversations.
        v1_factory: Creates the conversation for the subprotocol `ropewalk.v1`. If given, the URL may name a standing
            session to attach to, in either dialect; otherwise each socket has its own session, which ends with it.
    """

    kind: type[SessionConversation]
    sockets: Sockets
    v1_factory: V1Factory | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one socket until it closes."""
        session_id: str | None = None
        if self.v1_factory is not None:
            query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
            session_id = query.get("session_id", [None])[0]
            if SUBPROTOCOL in (scope.get("subprotocols") or ()):
                await self.v1_factory(scope, receive, send, session_id).serve()
                return
        ticket: Ticket | None = None
        if session_id is None:
            wait_s = wait_of(scope["headers"], HANDSHAKE_WAIT_S)
            ticket = self.sockets.sessions.queue.enter(owner_of(scope), wait_s=wait_s)
        await self.kind(scope, receive, send, self.sockets, ticket, session_id).serve()
