"""Requests of a session: replies are matched to them, and a broken connection is resumed."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from openenv_core.backoff import Backoff
from openenv_core.client.carrier import SESSION_ENDED, Carrier, StuckError
from openenv_core.client.settings import ClientSettings
from openenv_core.client.socket import open_socket
from openenv_core.errors import (
    AccessRefusedError,
    AuthenticationError,
    CapacityError,
    ClientClosedError,
    ClientError,
    ConfigurationError,
    ConnectionFailedError,
    ConnectionLostError,
    ProtocolError,
    RequestTimeoutError,
    ServerError,
)
from openenv_core.protocol.batch import (
    RESUME,
    SNAPSHOT,
    SUBPROTOCOL,
    Array,
    decode_frame,
    encode_frame,
)
from openenv_core.protocol.frames import encode_request, server_error
from openenv_core.protocol.http import redact_url
from openenv_core.protocol.jsonio import dumps, from_json
from openenv_core.tracing import current_traceparent, tracer

MAX_PENDING: Final = 64
"""Requests awaiting replies on one connection, abandoned ones too. A server has half as many in progress at most."""

MAX_REFUSED_CONNECTS: Final = 4
"""Refused connects in a row after which a server counts as gone, if another one can take over the episode."""

MAX_REFUSED_CONNECTS_ALONE: Final = 8
"""The same without another server: about four seconds, in which an ingress may restart."""


class BatchReply(NamedTuple):
    """One reply frame of a request.

    Attributes:
        request_id: Id of the request.
        fields: The frame's header.
        arrays: Its arrays; header fields refer to them by index.
        last: No further frame answers this request.
    """

    request_id: int
    fields: dict[str, Any]
    arrays: list[Array]
    last: bool


@dataclass(slots=True, eq=False)
class PendingCall:
    """A request without a reply so far; its caller may have stopped waiting.

    Attributes:
        request_id: Id of the request, counted from 1.
        frame: The encoded request.
        binary: The frame is binary, not text.
        deadline: Deadline by the loop's clock; 0 without a timeout.
        future: Future of the decoded reply; done early if its caller stops waiting.
        sink: Callback for the reply frames of a request that may have several.
        sent: The frame was sent on the current connection, or an earlier one and the server has received it.
        reply_frame: The raw reply, even if nobody waits for it; empty if the request was never sent.
        on_late_reply: Callback for the raw reply, if nobody waits for it.
    """

    request_id: int
    frame: bytes
    binary: bool
    deadline: float
    future: "asyncio.Future[Any]"
    sink: Callable[[Any], None] | None = None
    sent: bool = False
    reply_frame: bytes | bytearray | None = None
    on_late_reply: Callable[[bytes | bytearray], None] | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """Options for opening sessions in `ropewalk.v1`.

    Attributes:
        url: WebSocket URL of the server.
        settings: Settings of the client. `queue_timeout_s` is for this attempt.
        start_notice: Starts the timer of a warning, when they begin to wait in the server's queue.
        count: Number of sessions.
        snapshot: Id of the snapshot whose state they start in, if any.
        fail_fast: Whether to stop sooner if the server refuses connections: another one can be tried, or a provider
            started it, so that it will not come back.
    """

    url: str
    settings: ClientSettings
    start_notice: Callable[[], asyncio.TimerHandle]
    count: int = 1
    snapshot: str | None = None
    fail_fast: bool = False

    def request(self) -> dict[str, Any]:
        """Return the header fields of the `open` request."""
        request_fields = {
            "count": self.count,
            "wait_s": self.settings.queue_timeout_s,
            "lease_s": self.settings.lease_s or None,
            SNAPSHOT: self.snapshot,
        }
        return {name: value for name, value in request_fields.items() if value is not None}


class Conversation:
    """Sends requests to a server and matches replies to them, in one of two dialects.

    Replies of the released dialect have no ids: each answers the oldest unanswered request. Replies of `ropewalk.v1`
    (docs/protocol.md) have ids, and a broken connection is replaced for as long as the server keeps the sessions.

    Args:
        carrier: The connection.
        timeout_s: Reply timeout in seconds; None waits for ever.
        opening: Sessions to open in `ropewalk.v1`; None speaks the released dialect.

    Attributes:
        carrier: The current connection.
        v1: The dialect is `ropewalk.v1`.
        error: Why no more requests can be sent; None while they can.
    """

    def __init__(self, carrier: Carrier, timeout_s: float | None, opening: Opening | None = None) -> None:
        self.carrier = carrier
        self.v1 = opening is not None
        self.error: ClientError | None = None
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._notice: asyncio.TimerHandle | None = None
        self._pending: dict[int, PendingCall] = {}  # in the order of sending
        self._next_id = 1
        self._unclaimed_error: ServerError | None = None  # ends the session; its caller had stopped waiting
        self._frames_read = 0
        self._session: str | None = None
        self._secret = ""
        self._resume_task: asyncio.Task[None] | None = None
        if opening is not None:
            self._opening = opening
            self._open_call = self.request("open", (), opening.request(), self._handle_open_reply)
        carrier.listen(self)  # last: the connection may be lost already

    async def wait_open(self) -> None:
        """Wait until the sessions are open.

        Raises:
            CapacityError: The server has no room for all of them; none was opened.
            FactoryError: The server could not create their environments.
        """
        await self._open_call.future

    def send(
        self, frame: bytes, binary: bool = False, sink: Callable[[Any], None] | None = None
    ) -> PendingCall:
        """Send a request, now or once the connection can take it; its future has the reply, or fails.

        A caller that stops waiting for it, or whose RequestTimeoutError it is, calls `abandon`.

        Args:
            frame: The encoded request: a frame of the released dialect, or what `request` makes.
            binary: The frame is binary, not text.
            sink: As of `request`.

        Raises:
            StuckError: Too many requests have no reply, and nobody waits for one.
            ClientError: The conversation's `error`, if set.
        """
        if self.error is not None:
            raise self.error.with_traceback(None)
        if len(self._pending) >= MAX_PENDING:
            if all(call.future.done() for call in self._pending.values()):
                raise StuckError(
                    f"expected a reply to one of the last {MAX_PENDING} requests, got none, so that nothing more was "
                    "sent; wait, or call reset() for a new session"
                )
            raise ConfigurationError(f"{MAX_PENDING} requests wait for answers; wait for some of these first")
        request_id, self._next_id = self._next_id, self._next_id + 1
        deadline = 0.0
        if self._timeout_s is not None:
            deadline = self._loop.time() + self._timeout_s
            if self._timer is None:
                self._timer = self._loop.call_at(deadline, self._expire_calls)
        if self.v1 and sink is None:
            if tracer() is not None and (parent := current_traceparent()) is not None:
                frame = b'{"traceparent":"%b",%b' % (parent.encode(), frame[1:])
            frame = b'{"id":%d,"read":%d,%b' % (request_id, self._frames_read, frame[1:])
        can_leave = self._resume_task is None and not self.carrier.write_paused
        call = PendingCall(request_id, frame, binary, deadline, self._loop.create_future(), sink, can_leave)
        self._pending[request_id] = call
        if can_leave:
            self.carrier.send(frame, binary=binary)
        return call

    def request(
        self,
        operation: str,
        arrays: Sequence[Array],
        fields: Mapping[str, Any],
        sink: Callable[[BatchReply], None],
    ) -> PendingCall:
        """Send a request of `ropewalk.v1`.

        Args:
            operation: The header's `op`.
            arrays: Arrays of the frame; header fields refer to them by index.
            fields: Further header fields.
            sink: Called with each reply frame; the last one completes the call.
        """
        header = {"id": self._next_id, "op": operation, "read": self._frames_read, **fields}
        frame = encode_frame({name: dumps(value) for name, value in header.items()}, arrays)
        call = self.send(
            frame if isinstance(frame, bytes) else frame.encode(), isinstance(frame, bytes), sink
        )
        # Retrieve the exception, or asyncio logs it as never retrieved if nobody awaits the call.
        call.future.add_done_callback(lambda future: future.cancelled() or future.exception())
        return call

    def abandon(self, call: PendingCall) -> None:
        """Stop waiting for a reply. A request that was not sent is dropped.

        In `ropewalk.v1` the server is asked to cancel one that was sent, which it does unless it has begun.
        """
        call.future.cancel()
        if not call.sent:
            self._drop_unsent(call)
        is_pending = self._resume_task is None and call.request_id in self._pending
        if self.v1 and is_pending and len(self._pending) < MAX_PENDING:
            self.send(b'{"op":"cancel","request":%d}' % call.request_id).future.cancel()

    def abort(self) -> None:
        """End the connection without waiting; pending requests fail with ConnectionLostError."""
        self._stop_resuming()
        self._abort_with(ConnectionLostError("the connection was broken off by this client"))

    async def close(self, *, end_session: bool) -> None:
        """End the connection in order; after an abort, wait until its cleanup has ended.

        Args:
            end_session: Ask the server to end the session first.
        """
        try:
            if self.error is None:
                self._stop_resuming()
                if end_session and len(self._pending) < MAX_PENDING:
                    self.send(encode_request("close")).future.cancel()
                self._fail_calls(ClientClosedError("this client is closed; make a new one"))
            await self.carrier.close()
        except BaseException:
            self.carrier.abort()
            raise

    # Callbacks of the carrier

    def on_frame(self, frame: bytes | bytearray) -> None:
        """Complete the request that a reply answers: by its id, or the oldest in the released dialect."""
        arrays: list[Array] = []
        try:
            if self.v1 and type(frame) is bytearray:
                fields, arrays = decode_frame(frame)
            else:
                fields = from_json(frame)
            request_id = fields.get("id") if self.v1 else next(iter(self._pending), None)
        except (ValueError, AttributeError) as error:  # not JSON, or not an object
            self._abort_with(ProtocolError(f"expected a JSON object, got {bytes(frame[:200])!r}: {error}"))
            return
        if type(request_id) is not int:
            self._abort_with(
                error_of(fields)
                or ProtocolError(
                    f"expected one answer to each request, got {bytes(frame[:200])!r} unasked; the session is over, "
                    "since replies could be taken for those of other requests"
                )
            )
            return
        self._frames_read += 1
        call = self._pending.get(request_id)
        if call is None:
            return
        if call.sink is None:
            del self._pending[request_id]
            call.reply_frame = frame
            if not call.future.done():
                call.future.set_result(fields)
            else:
                if isinstance(ending := error_of(fields), SESSION_ENDED):
                    self._unclaimed_error = ending
                if call.on_late_reply is not None:
                    call.on_late_reply(frame)
            return
        last = fields.get("last") is True
        if last:
            del self._pending[request_id]
        elif self._timeout_s is not None:
            call.deadline = self._loop.time() + self._timeout_s
        # A late reply to the open still counts: it names the session.
        if call.future.done() and call is not self._open_call:
            return
        call.sink(BatchReply(request_id, fields, arrays, last))
        if last and not call.future.done():
            call.future.set_result(None)

    def on_writable(self) -> None:
        """Send the requests that were held back."""
        for call in [call for call in self._pending.values() if not call.sent]:
            if call.future.done():  # its caller has stopped waiting
                self._drop_unsent(call)
            elif self._resume_task is None and not self.carrier.write_paused:
                call.sent = True
                self.carrier.send(call.frame, binary=call.binary)

    def on_lost(self, error: ClientError) -> None:
        """Begin to resume the sessions if the server keeps them; otherwise fail the pending requests."""
        resumable = self.v1 and self.carrier.broken and self._opening.settings.lease_s and self.error is None
        if resumable and (self._session is not None or self._open_call.request_id in self._pending):
            self._resume_task = asyncio.create_task(self._resume(error))
        else:
            self._fail_calls(self._unclaimed_error or error)

    # Internals

    def _drop_unsent(self, call: PendingCall) -> None:
        """Remove a request that was never sent."""
        self._pending.pop(call.request_id, None)
        call.reply_frame = b""

    def _expire_calls(self) -> None:
        """Fail the requests whose deadline has passed, and set the timer for the next deadline."""
        now = self._loop.time()
        waiting = [call for call in self._pending.values() if not call.future.done()]
        for call in waiting:
            if call.deadline <= now:
                call.future.set_exception(
                    RequestTimeoutError(
                        f"expected a reply within {self._timeout_s:g} s, got none yet; the session lives on and "
                        "drops the reply when it comes. Ask again, or raise message_timeout_s"
                    )
                )
        next_deadline = min((call.deadline for call in waiting if call.deadline > now), default=None)
        self._timer = None
        # At most timeout_s ahead, as later requests may be due sooner.
        if next_deadline is not None and self._timeout_s is not None:
            self._timer = self._loop.call_at(min(next_deadline, now + self._timeout_s), self._expire_calls)

    def _fail_calls(self, error: ClientError) -> None:
        """Refuse further requests, and fail the pending ones; the first error counts."""
        if self.error is None:
            self.error = error
        for timer in (self._timer, self._notice):
            if timer is not None:
                timer.cancel()
        pending, self._pending = self._pending, {}
        for call in pending.values():
            if not call.future.done():
                call.future.set_exception(self.error)

    def _abort_with(self, error: ClientError) -> None:
        """Fail all requests and abort the connection."""
        self._fail_calls(error)
        self.carrier.abort()

    def _handle_open_reply(self, reply: BatchReply) -> None:
        """Handle a reply to the open. Time in the server's queue does not count towards requests' deadlines."""
        if self._timeout_s is not None:
            wait_s = 0.0 if reply.last else self._opening.settings.queue_timeout_s
            deadline = self._loop.time() + self._timeout_s + wait_s
            for call in self._pending.values():
                call.deadline = deadline
        if self._notice is None and not reply.last:
            self._notice = self._opening.start_notice()
        elif self._notice is not None and reply.last:
            self._notice.cancel()
        if (error := error_of(reply.fields)) is not None:
            if not self._open_call.future.done():
                self._open_call.future.set_exception(error)
            self._abort_with(error)
        elif "session" in reply.fields:
            self._session, self._secret = str(reply.fields["session"]), str(reply.fields.get("secret"))

    async def _resume(self, error: ClientError) -> None:
        """Resume the sessions over a new connection; if that fails, fail the pending requests."""
        lease_s = self._opening.settings.lease_s
        backoff, refusals = Backoff(), 0
        reason: object
        try:
            async with asyncio.timeout(lease_s):
                while True:
                    try:
                        await self._reconnect()
                        return
                    except (AuthenticationError, AccessRefusedError):
                        raise
                    except ConnectionFailedError as failure:
                        refusals = (
                            refusals + 1 if isinstance(failure.__cause__, ConnectionRefusedError) else 0
                        )
                        can_move = self._opening.fail_fast or self.carrier.deterministic
                        if refusals >= (MAX_REFUSED_CONNECTS if can_move else MAX_REFUSED_CONNECTS_ALONE):
                            raise
                    except (ConnectionLostError, CapacityError):
                        # A gateway answers so while the server behind it is being replaced, for instance.
                        refusals = 0
                    await asyncio.sleep(backoff.next_s())
        except TimeoutError:
            reason = f"no connection within its lease of {lease_s:g} s"
        except Exception as failure:
            reason = failure
        self._resume_task = None
        self._fail_calls(ConnectionLostError(f"{error}. The session could not be resumed: {reason}"))

    async def _reconnect(self) -> None:
        """Connect again, and resend what the server has not received."""
        url, last_taken_id = self._opening.url, -1
        if self._session is not None:
            url = _add_query(url, RESUME, self._session)
        carrier = await open_socket(url, self._opening.settings)
        try:
            if not carrier.v1:
                raise ProtocolError(f"the server does not speak {SUBPROTOCOL} any more")
            if self._session is None:  # unanswered open: sessions it made cannot be named, so open again
                self._frames_read = 0
            else:
                credentials = {"session": self._session, "secret": self._secret, "read": self._frames_read}
                carrier.send(dumps({"id": 0, "op": "resume", **credentials}))
                fields = from_json(await carrier.receive())
                if (error := error_of(fields)) is not None:
                    raise error
                last_taken_id = fields["taken"]
        except BaseException:
            carrier.abort()  # with a close, unless it is broken: the client, or the server, has ended the sessions
            raise
        carrier.deterministic |= self.carrier.deterministic
        self.carrier, self._resume_task = carrier, None
        for call in self._pending.values():
            call.sent = call.request_id <= last_taken_id
        carrier.listen(self)
        self.on_writable()

    def _stop_resuming(self) -> None:
        if self._resume_task is not None:
            self._resume_task.cancel()
            self._resume_task = None


async def open_conversation(opening: Opening, *, wait: bool = False) -> Conversation:
    """Connect to a server and begin to open sessions.

    Args:
        opening: The sessions and the connection.
        wait: Require `ropewalk.v1`, and wait until the sessions are open.

    Returns:
        A conversation in `ropewalk.v1`, or in the released dialect if the server does not speak it.

    Raises:
        ClientError: As `open_socket` and `Conversation.wait_open`.
    """
    if opening.snapshot is not None:
        opening = replace(opening, url=_add_query(opening.url, SNAPSHOT, opening.snapshot))
    carrier = await open_socket(opening.url, opening.settings)
    conversation = Conversation(carrier, opening.settings.message_timeout_s, opening if carrier.v1 else None)
    if wait:
        try:
            if not carrier.v1:
                server = redact_url(opening.url)
                raise ConnectionFailedError(
                    f"expected {server} to speak {SUBPROTOCOL}, as servers of Ropewalk do; it does not"
                )
            await conversation.wait_open()
        except BaseException:
            await conversation.close(end_session=False)
            raise
    return conversation


def _add_query(url: str, key: str, value: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{key}={quote(value)}"


def error_of(fields: Any) -> ServerError | None:
    """Return the error in a decoded frame, if any."""
    if not isinstance(fields, dict):
        return None
    data = fields.get("error", fields.get("data") if fields.get("type") == "error" else None)
    return server_error(data) if isinstance(data, dict) else None
