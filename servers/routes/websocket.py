"""/ws and /mcp in the released dialect: one socket and its session, from accept to close."""

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from time import perf_counter
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import parse_qs

from openenv_core.protocol import jsonrpc, replies
from openenv_core.protocol.batch import SUBPROTOCOL
from openenv_core.protocol.errors import EXECUTION_ERROR, INVALID_JSON, SESSION_ERROR, RefusalError
from openenv_core.protocol.http import DETERMINISTIC, DETERMINISTIC_HEADER
from openenv_core.protocol.jsonrpc import JsonRpcFaultError
from openenv_core.protocol.requests import Close, Mcp, ReadState, RequestDecoder, Reset
from openenv_core.tracing import served_span
from openenv_core.watchdog import Watchdog
from servers.execution import FATAL, EnvironmentRunner, cancel_task, keep, start_eagerly
from servers.metrics import BUCKETS_S, RESET, STEP, ServerMetrics, size_of
from servers.routes.http import report_error, wait_of, while_connected
from servers.routes.jsonrpc import Caller, JsonRpc, fault_of
from servers.security import owner_of
from servers.sessions import (
    DeadlineExceededError,
    EnvironmentSession,
    SessionTable,
    Ticket,
    UnknownSessionError,
)
from servers.threads import Outcome

logger = logging.getLogger("servers")

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

SESSION_PATH: Final = "/ws"

NORMAL_CLOSURE: Final = 1000
GOING_AWAY: Final = 1001

FAST_PATH_EXTENSION: Final = "ropewalk.lane"
"""Key of the ASGI scope extension that holds the server's protocol object, if it is ours."""


class FastPath(Protocol):
    """The interface of the server's protocol beside ASGI; see `servers.protocols`.

    Attributes:
        on_frame: Called from the read callback with a frame of the fast path, while the socket is writable; returns
            whether it has taken the frame to answer.
    """

    on_frame: Callable[[str | bytes], bool] | None

    def send_frame(self, frame: str | bytes) -> bool:
        """Send a frame at once; return False if it has to be sent by ASGI's `send` instead."""

    def abort(self) -> None:
        """Drop the connection at once, with all unread data."""


HANDSHAKE_WAIT_S: Final = 8.0
"""Seconds that a client waits for a slot before its handshake ends: released clients time out after 10."""

_READ_AHEAD_AFTER_S: Final = 0.05
"""Seconds for a request, or for opening the session, after which the socket is read ahead from then on."""

_MAX_PIPELINED: Final = 32
"""Requests that a client may send ahead of their replies. The protocol allows one at a time; more come from clients
that gave up on a reply. The limit keeps a disconnect behind them visible."""

_MAX_PIPELINED_CHARS: Final = 16 * 1024 * 1024
"""Total characters of these requests; a single one may have as many."""


class DisconnectedError(Exception):
    """The client has disconnected, or the socket has been closed."""


class _RefusalEncoder(Protocol):
    """Encodes the refusals of a dialect."""

    def encode_refusal(self, refusal: RefusalError) -> str:
        """Return the error frame of a refusal that answers no particular request."""


class _Dialect(_RefusalEncoder, Protocol):
    """Decodes and answers requests, one at a time."""

    async def answer(self, session: EnvironmentSession, text: str | bytes) -> str | None:
        """Return the reply to a frame; None for a close request."""

    def answer_eagerly(
        self, session: EnvironmentSession, text: str, resume: Callable[[Outcome], None] | None
    ) -> str | Coroutine[Any, Any, str | None] | None:
        """Start answering a frame outside of a task.

        Args:
            session: A session without other callers.
            text: The frame.
            resume: Called once the environment's method has ended in its thread, if it runs in one.

        Returns:
            The reply; or a coroutine that continues it; or None if the frame has to be answered by `answer`, in a task.
        """


def is_break(message: Message) -> bool:
    """Whether a connection broke: without a close frame, or with 1011, sent by clients whose ping is not answered."""
    # uvicorn also reports 1005 for a connection without a close frame, but gives a reason only with one.
    return message.get("code") in (None, 1006, 1011) or (message["code"] == 1005 and "reason" not in message)


class Conversation(ABC):
    """One socket, from accept to close. Ending it from outside cancels its task.

    Attributes:
        accept: The ASGI message that accepts the client.
        broken: Whether the connection has not been closed in order, as far as known.
        busy: Whether a request is being answered.
        draining: Whether no further requests are accepted.
        closed: Whether the last frame has been sent; only the close frame may still follow.
        fast_path: The server's protocol, if frames may bypass ASGI.
    """

    accept: Message = {"type": "websocket.accept"}  # noqa: RUF012 - never modified

    def __init__(
        self,
        scope: Message,
        receive: Receive,
        send: Send,
        sessions: SessionTable,
        dialect: Any,
        send_timeout_s: float,
    ) -> None:
        self._receive = receive
        self._send = send
        self._sessions = sessions
        self._dialect: _RefusalEncoder = dialect
        fast_path: Any = (scope.get("extensions") or {}).get(FAST_PATH_EXTENSION)
        self._abort: Callable[[], None] | None = None if fast_path is None else fast_path.abort
        # Middleware that wraps these must see every message, which rules out the fast path.
        is_unwrapped = all(getattr(channel, "__self__", None) is fast_path for channel in (receive, send))
        self.fast_path: FastPath | None = fast_path if is_unwrapped else None
        self._send_timeout_s = send_timeout_s or None
        shortest_timeout_s = min(send_timeout_s or math.inf, sessions.step_timeout_s or math.inf)
        self._watchdog = Watchdog(shortest_timeout_s, self._drop_client)
        # While a slow request runs, frames are read ahead, so that a disconnect during a step is noticed.
        self._read_ahead_timer = (
            None if sessions.inline else Watchdog(_READ_AHEAD_AFTER_S, self._start_reader)
        )
        self._frames_ahead: deque[str | bytes] | None = None
        self._frames_ahead_size = 0
        self._reader: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.busy = self.broken = True
        self.draining = self.closed = False
        self.task: asyncio.Task[None] | None = None

    async def serve(
        self,
        sockets: "Sockets",
        session_context: AbstractAsyncContextManager[Any],
        ticket: Ticket | None = None,
    ) -> None:
        """Accept the client, answer its requests until it disconnects, and close.

        Args:
            sockets: The set of open conversations.
            session_context: Entered while requests are answered; raises a refusal on entry. It opens and ends a
                session, attaches to a standing one, or does nothing (`ropewalk.v1`, where the link opens the sessions).
            ticket: The place in the queue that `session_context` uses. The client is accepted once it is settled.
        """
        try:
            await self._receive()
            sockets.add(self)
            if (
                ticket is None
                or not ticket.is_waiting
                or await while_connected(self._receive, ticket.wait_settled())
            ):
                await self._run(sockets, session_context)
        finally:
            if self.task is None:
                sockets.remove(self)
            if ticket is not None:
                ticket.leave()

    async def _run(self, sockets: "Sockets", session_context: AbstractAsyncContextManager[Any]) -> None:
        headers = [(DETERMINISTIC_HEADER.lower().encode(), DETERMINISTIC.encode())]
        await self._send({**self.accept, "headers": headers if self._sessions.deterministic else []})
        # In a task of its own, each wake-up resumes only these coroutines, not also those of the application.
        task = self.task = asyncio.create_task(self._run_in_task(sockets, session_context))
        try:
            await asyncio.wait([task])
        finally:
            await cancel_task(task)
            if self._read_ahead_timer is not None:
                self._read_ahead_timer.close()
            if self._reader is not None:
                await cancel_task(self._reader)
            if task.done():
                self._watchdog.close()
            else:
                # The task ignores its cancellation; the watchdog keeps enforcing its deadline.
                self.closed = True
                task.add_done_callback(lambda _: self._watchdog.close())
        if task.done() and not task.cancelled():
            error = task.exception()
            # Servers raise OSError from `send` if the client has disconnected.
            if error is not None and not isinstance(error, DisconnectedError | OSError):
                raise error

    async def _run_in_task(
        self, sockets: "Sockets", session_context: AbstractAsyncContextManager[Any]
    ) -> None:
        code = NORMAL_CLOSURE
        last_frame: str | None = None
        try:
            if self._read_ahead_timer is not None:
                self._read_ahead_timer.start()
            async with session_context as session:
                if self._read_ahead_timer is not None:
                    self._read_ahead_timer.stop()
                code = await self._answer_requests(session)
        except RefusalError as refusal:
            last_frame = self._dialect.encode_refusal(refusal)
        except (DisconnectedError, OSError):
            raise
        except Exception:
            logger.exception("a session ended because of an error in the server")
            last_frame = self._dialect.encode_refusal(
                RefusalError(SESSION_ERROR, "the server failed; see its log")
            )
        finally:
            sockets.remove(self)
        await self._close(code, last_frame)

    @abstractmethod
    async def _answer_requests(self, session: Any) -> int:
        """Answer requests until the conversation ends; return the close code."""

    async def _next_frame(self) -> str | bytes:
        """Wait for a frame. A disconnect raises `DisconnectedError` or, while reading ahead, cancels the task."""
        if self._frames_ahead is None:
            message = await self._receive()
            if message["type"] != "websocket.receive":
                self.broken &= is_break(message)  # not if the client has asked to close
                raise DisconnectedError
            text = message.get("text")
            return message["bytes"] if text is None else text  # type: ignore[no-any-return]
        while not self._frames_ahead:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        frame = self._frames_ahead.popleft()
        self._frames_ahead_size -= len(frame)
        return frame

    def _start_reader(self) -> None:
        if self._reader is None and self.task is not None:
            self._frames_ahead = deque()
            self._reader = asyncio.create_task(self._read_ahead(self._frames_ahead, self.task))

    async def _read_ahead(self, frames: deque[str | bytes], task: asyncio.Task[None]) -> None:
        """Read a bounded number of frames ahead, until the client disconnects."""
        receive = self._receive
        flooded = False
        try:
            while (message := await receive())["type"] == "websocket.receive":
                text = message.get("text")
                frame: str | bytes = message["bytes"] if text is None else text
                size = self._frames_ahead_size + len(frame)
                if frames and (len(frames) >= _MAX_PIPELINED or size > _MAX_PIPELINED_CHARS):
                    reason = (
                        f"expected one request at a time, got more than {_MAX_PIPELINED}, or than "
                        f"{_MAX_PIPELINED_CHARS} characters, ahead of their replies"
                    )
                    self.end(
                        NORMAL_CLOSURE, self._dialect.encode_refusal(RefusalError(SESSION_ERROR, reason))
                    )
                    flooded = True
                    return
                self._frames_ahead_size = size
                frames.append(frame)
                if self._waiter is not None and not self._waiter.done():
                    self._waiter.set_result(None)
        finally:
            if not flooded:
                task.cancel()

    async def _send_text(self, text: str) -> None:
        if self.closed:
            raise DisconnectedError  # the conversation was ended from outside
        self._watchdog.expect(self._send_timeout_s, self._drop_client)
        await self._send({"type": "websocket.send", "text": text})
        self._watchdog.stop()

    async def _close(self, code: int, last_frame: str | None) -> None:
        """Send a last frame, if any, and close the socket."""
        if last_frame is not None:
            self._sessions.metrics.count_sent(last_frame)
            await self._send_text(last_frame)
        if self.closed:
            raise DisconnectedError
        self.closed = True
        self._watchdog.expect(self._send_timeout_s, self._drop_client)
        await self._send({"type": "websocket.close", "code": code})
        self._watchdog.stop()

    def drain(self) -> None:
        """End the conversation after the current reply, or at once if there is none."""
        self.draining = True
        if not self.busy and not self.closed:
            self.end(GOING_AWAY)

    def end(self, code: int, last_frame: str | None = None) -> None:
        """End the conversation from outside, whatever its task is waiting for."""
        keep(asyncio.create_task(self._end(code, last_frame)))

    async def _end(self, code: int, last_frame: str | None) -> None:
        with suppress(DisconnectedError, OSError):
            try:
                await self._close(code, last_frame)
            finally:
                self._interrupt()

    def _drop_client(self) -> None:
        logger.warning("a client does not read its replies; its connection is dropped")
        self.closed = True
        if self._abort is not None:
            self._abort()
        self._interrupt()

    def _interrupt(self) -> None:
        if self.task is not None and not self.task.done():
            self.task.cancel()


class _SessionConversation(Conversation):
    """One socket of one session: a reply to each request, in order."""

    _dialect: _Dialect
    _session: EnvironmentSession
    _pending_reply: tuple[str, Coroutine[Any, Any, str | None]] | None = None
    """A frame whose method runs in a thread, and the coroutine that continues its reply."""
    _reply_task: asyncio.Task[None] | None = None
    """Continues a reply that was started by `answer_eagerly` and had to wait."""
    _previous_reply: asyncio.Future[None] | None = None
    """Done when the reply started by `answer_eagerly` is sent; awaited before the next frame is answered."""
    _resume: Callable[[Outcome], None] | None = None
    """Continues a reply once its method has ended; None if methods run on the event loop."""

    async def _answer_requests(self, session: EnvironmentSession) -> int:
        if not session.standing:
            session.watchdog = self._watchdog
            session.on_expiry = lambda: self.end(
                NORMAL_CLOSURE, self._dialect.encode_refusal(self._sessions.expire(session))
            )
        self._session = session
        if (
            self.fast_path is not None
            and session.exclusive
            and (self._sessions.inline or session.runner.in_thread)
        ):
            if session.runner.in_thread:
                self._resume = self._continue_reply
            self.fast_path.on_frame = self.answer_eagerly
        try:
            return await self._answer_in_order(session)
        finally:
            if self._pending_reply is not None:
                self._pending_reply[1].close()
            if self._reply_task is not None:
                await cancel_task(self._reply_task)

    async def _answer_in_order(self, session: EnvironmentSession) -> int:
        answer, read_ahead_timer, fast_path = self._dialect.answer, self._read_ahead_timer, self.fast_path
        while not self.draining:
            self.busy = False
            frame = await self._next_frame()
            if read_ahead_timer is not None:
                read_ahead_timer.start()
            if self.busy:  # with a reply that `answer_eagerly` started
                self._previous_reply = asyncio.get_running_loop().create_future()
                await self._previous_reply
                if self.draining or session.ended:
                    break
            self.busy = True
            reply = await answer(session, frame)
            if read_ahead_timer is not None:
                read_ahead_timer.stop()
            if reply is None:
                self._count_bytes(frame, "")
                return NORMAL_CLOSURE
            self._count_bytes(frame, reply)
            if fast_path is None or self.closed or not fast_path.send_frame(reply):
                await self._send_text(reply)
            if session.ended and not self.draining:
                return NORMAL_CLOSURE  # a call inside the frame exceeded its deadline, as its reply says
        return GOING_AWAY

    def answer_eagerly(self, text: str | bytes) -> bool:
        """Answer a frame from the read callback, without waking the task; return whether it was taken."""
        session = self._session
        if self.busy or self._frames_ahead or self.draining or self.closed or session.shared or session.ended:
            return False
        if not isinstance(text, str):
            return False  # `FrameDialect.answer` refuses it
        pending = self._dialect.answer_eagerly(session, text, self._resume)
        if pending is None:
            return False
        if self._resume is None or isinstance(pending, str):
            self._reply(text, pending)
        else:
            self._pending_reply = text, pending
            self.busy = True
            assert session.on_expiry is not None
            self._watchdog.expect(self._sessions.step_timeout_s, session.on_expiry)
        return True

    def _continue_reply(self, _: Outcome) -> None:
        """Continue the reply to a request whose method in a thread has ended."""
        assert self._pending_reply is not None
        (text, pending), self._pending_reply = self._pending_reply, None
        reply = start_eagerly(pending)
        assert reply is not None
        if self._session.ended:
            return  # it exceeded its deadline, which the client has been told
        self.busy = False
        if isinstance(reply, str):
            self._watchdog.stop()
        self._reply(text, reply)
        if not self.busy:
            self._accept_next_frame()

    def _reply(self, text: str, pending: str | Coroutine[Any, Any, str | None]) -> None:
        """Send a reply: at once if it is complete and the socket is writable, otherwise in a task."""
        assert self.fast_path is not None
        if isinstance(pending, str) and self.fast_path.send_frame(pending):
            self._count_bytes(text, pending)
            return
        self.busy = True
        if self._resume is None and not isinstance(pending, str):
            # The environment waits although it promises not to.
            assert self._session.on_expiry is not None
            self._watchdog.expect(self._sessions.step_timeout_s, self._session.on_expiry)
        self._reply_task = asyncio.create_task(self._complete_reply(text, pending))

    async def _complete_reply(self, text: str, pending: str | Coroutine[Any, Any, str | None]) -> None:
        try:
            # A coroutine that has started can be continued only as a task, not awaited.
            reply = pending if isinstance(pending, str) else await asyncio.create_task(pending)
            assert reply is not None
            self._watchdog.stop()
            self._count_bytes(text, reply)
            await self._send_text(reply)
        except Exception as error:
            if not isinstance(error, DisconnectedError | OSError):
                logger.exception("a session ended because of an error in the server")
            self._interrupt()
        else:
            self._accept_next_frame()

    def _accept_next_frame(self) -> None:
        """Let the next frame be answered, after one that `answer_eagerly` took."""
        self.busy = self._previous_reply is not None  # a frame that waits goes before those still to come
        if self._previous_reply is not None:
            if not self._previous_reply.done():
                self._previous_reply.set_result(None)
            self._previous_reply = None
        elif self.draining:
            self.end(GOING_AWAY)

    def _count_bytes(self, frame: str | bytes, reply: str) -> None:
        if (metrics := self._sessions.metrics).enabled:
            metrics.counts.received_bytes += len(frame) if frame.isascii() else size_of(frame)
            metrics.counts.sent_bytes += len(reply) if reply.isascii() else size_of(reply)


class Sockets:
    """The set of conversations, each from its accept to the end of its session.

    Attributes:
        draining: Whether new conversations end at once.
    """

    def __init__(self) -> None:
        self._conversations: set[Conversation] = set()
        self._conversation_removed = asyncio.Event()
        self.draining = False

    def add(self, conversation: Conversation) -> None:
        """Add a new conversation."""
        self._conversations.add(conversation)
        conversation.draining = self.draining

    def remove(self, conversation: Conversation) -> None:
        """Remove a conversation whose session has ended."""
        self._conversations.discard(conversation)
        self._conversation_removed.set()

    async def drain(self, deadline: float) -> None:
        """Drain every conversation, and wait until the last one has ended.

        Args:
            deadline: When to return in any case, by the event loop's clock.
        """
        self.draining = True
        for conversation in list(self._conversations):
            conversation.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while self._conversations:
                    self._conversation_removed.clear()
                    await self._conversation_removed.wait()


class SocketRoute:
    """An ASGI application that runs a conversation on every socket.

    Args:
        sessions: Opens the sessions.
        dialect: Decodes and answers requests.
        sockets: The set of open conversations.
        send_timeout_s: Seconds that a client may leave replies unread; 0 for no limit.
        v1_factory: Creates the conversation for the subprotocol `ropewalk.v1`. If given, the URL may name a standing
            session to attach to, in either dialect; otherwise each socket has its own session, which ends with it.
    """

    def __init__(
        self,
        sessions: SessionTable,
        dialect: _Dialect,
        sockets: Sockets,
        send_timeout_s: float,
        v1_factory: "Callable[[Message, Receive, Send, str | None], Conversation] | None" = None,
    ) -> None:
        self._sessions = sessions
        self._dialect = dialect
        self._sockets = sockets
        self._send_timeout_s = send_timeout_s
        self._v1_factory = v1_factory

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one socket until it closes."""
        owner = owner_of(scope)
        session_id: str | None = None
        if self._v1_factory is not None:
            query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
            session_id = query.get("session_id", [None])[0]
            if SUBPROTOCOL in (scope.get("subprotocols") or ()):
                v1_conversation = self._v1_factory(scope, receive, send, session_id)
                await v1_conversation.serve(self._sockets, nullcontext())
                return
        ticket: Ticket | None = None
        if session_id is not None:
            session_context = self._sessions.attach(owner, session_id)
        else:
            ticket = self._sessions.queue.enter(owner, wait_s=wait_of(scope["headers"], HANDSHAKE_WAIT_S))
            session_context = self._sessions.session(owner, ticket=ticket)
        conversation = _SessionConversation(
            scope, receive, send, self._sessions, self._dialect, self._send_timeout_s
        )
        await conversation.serve(self._sockets, session_context, ticket)


class FrameDialect:
    """Decodes and answers the frames of the released dialect on /ws; `rpc` answers the requests in mcp frames."""

    def __init__(self, decoder: RequestDecoder[Any], rpc: JsonRpc, metrics: ServerMetrics) -> None:
        self._decoder = decoder
        self._rpc = rpc
        self.metrics = metrics
        self._resets, self._steps = metrics.counts.calls[RESET], metrics.counts.calls[STEP]

    async def answer(
        self,
        session: EnvironmentSession,
        text: str | bytes,
        request: Any = None,
        began: float = 0.0,
        traceparent: str | None = None,
        *,
        inline: bool = False,
        resume: Callable[[Outcome], None] | None = None,
    ) -> str | None:
        """Return the reply to a frame; None for a close request.

        Args:
            session: The session to call.
            text: The frame.
            request: The request decoded from it, if already done.
            began: When it came, by `perf_counter`, for metrics; by default now.
            traceparent: W3C trace context of the client's span, if any.
            inline: Step without the session's lock and deadline: it has no other caller and is not over, and the caller
                enforces the deadline.
            resume: If this runs outside of a task, resumes it once the environment's method in a thread has ended.

        Raises:
            RefusalError: The session is over.
        """
        if traceparent is not None and not isinstance(request, ReadState | Close | Mcp):
            return await self._answer_traced(traceparent, session, text, request, began)
        is_timed = self.metrics.enabled
        if is_timed and not began:
            began = perf_counter()
        try:
            if request is None:
                if not isinstance(text, str):
                    raise RefusalError(
                        INVALID_JSON, "the frame is binary; send a text frame that holds a JSON object"
                    )
                request = self._decoder.frame(text)
            kind = type(request)
            calls = self._steps
            if kind is Reset:
                calls = self._resets
                observation = await session.run(EnvironmentRunner.reset, request.options, resume=resume)
            elif kind is ReadState:
                return replies.encode_state(await session.run(EnvironmentRunner.state, resume=resume))
            elif kind is Close:
                return None
            elif kind is Mcp:
                caller = Caller(session.owner, session)
                return replies.encode_mcp(await self._rpc.answer(request.request, caller, len(text)))
            else:
                call = (
                    session.runner.step(request, resume=resume)
                    if inline
                    else session.run(EnvironmentRunner.step, request, resume=resume)
                )
                observation = await call
            reply = replies.encode_observation(observation)
            if is_timed:
                # `observe`, inlined for speed, which avoids most calls of bisect.
                elapsed_s = perf_counter() - began
                calls.buckets[0 if elapsed_s < BUCKETS_S[0] else bisect_left(BUCKETS_S, elapsed_s)] += 1
                calls.seconds += elapsed_s
                calls.environment_s += session.runner.spent_s
            return reply
        except RefusalError as refusal:
            if isinstance(refusal, UnknownSessionError | DeadlineExceededError):
                raise
            return self.encode_refusal(refusal)
        except FATAL as error:
            return self._encode_exception(error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The environment raised it; this task was not cancelled.
            return self._encode_exception(error)

    def answer_eagerly(
        self, session: EnvironmentSession, text: str, resume: Callable[[Outcome], None] | None
    ) -> str | Coroutine[Any, Any, str | None] | None:
        """Start answering a frame outside of a task; see `_Dialect`."""
        try:
            request = self._decoder.frame(text)
        except FATAL:  # the author's validators may raise anything
            return None  # `answer` decodes it again and refuses it
        if isinstance(request, Close | Mcp):
            return None
        return start_eagerly(self.answer(session, text, request, inline=True, resume=resume))

    async def _answer_traced(
        self, traceparent: str, session: EnvironmentSession, *arguments: Any
    ) -> str | None:
        _, request, began = arguments
        name = "reset" if isinstance(request, Reset) else "step"
        span_args = name, self.metrics.environment, session.runner, began or perf_counter()
        with served_span(traceparent, *span_args) as fail:
            reply = await self.answer(session, *arguments)
            if reply is not None and reply.startswith('{"type":"error"'):
                fail(reply)
        return reply

    def _encode_exception(self, error: BaseException) -> str:
        return self.encode_refusal(RefusalError(EXECUTION_ERROR, report_error(error)))

    def encode_refusal(self, refusal: RefusalError) -> str:
        """Return the error frame of a refusal, and count it."""
        self.metrics.count_error(refusal.code)
        return replies.encode_error(refusal.code, refusal.message, refusal.extra)


class RpcDialect:
    """Answers the frames of the socket /mcp, each a JSON-RPC request."""

    def __init__(self, rpc: JsonRpc) -> None:
        self._rpc = rpc

    async def answer(self, session: EnvironmentSession, text: str | bytes) -> str | None:
        """Return the response to a frame."""
        if not isinstance(text, str):
            fault = JsonRpcFaultError(
                jsonrpc.PARSE_ERROR, "the frame is binary; send a text frame that holds a request"
            )
            return self._rpc.encode_fault(None, fault).decode()
        return (await self._rpc.answer_text(text, Caller(session.owner, session))).decode()

    def answer_eagerly(self, session: EnvironmentSession, text: str, resume: Any) -> None:
        """Return None: a tool may wait, so frames are answered in a task."""

    def encode_refusal(self, refusal: RefusalError) -> str:
        """Return the error response of a refusal that answers no particular request."""
        return self._rpc.encode_fault(None, fault_of(refusal)).decode()
