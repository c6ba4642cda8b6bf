"""Requests and replies over one connection: which reply is whose."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from openenv_core.client.carrier import Carrier
from openenv_core.errors import (
    CapacityError,
    ClientClosedError,
    ClientError,
    ConnectionLostError,
    FactoryError,
    ProtocolError,
    RequestTimeoutError,
    ServerError,
    SessionError,
)
from openenv_core.protocol.replies import decode_reply
from openenv_core.protocol.requests import encode_request

SESSION_ENDED: Final = (CapacityError, FactoryError, SessionError)
"""What a server says last."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """A request whose answer is still to come, whether or not somebody waits for it.

    Attributes:
        request_id: By what it is known.
        frame: What was sent, or is to be.
        binary: It is no text.
        deadline: On the loop's clock, where there is one.
        answer: What answers it. It is done before where nobody waits any more.
        sink: Takes the frames that answer it, where there may be several.
        reply: The frame that has answered it, also where nobody waited; empty where it never left.
    """

    request_id: int
    frame: bytes
    binary: bool
    deadline: float
    answer: "asyncio.Future[Any]"
    sink: Callable[[Any], None] | None = None
    reply: bytes | bytearray | None = None


class Conversation:
    """Asks in the released dialect, where replies have no ids: the oldest request that is unanswered gets the next.

    Args:
        carrier: Carries the frames.
        timeout_s: Seconds that a reply may take; None waits for ever.

    Attributes:
        carrier: That of this moment.
        error: Why nothing can be asked any more.
        last: The request that was made last.
    """

    last: PendingCall

    def __init__(self, carrier: Carrier, timeout_s: float | None) -> None:
        self.carrier = carrier
        self.error: ClientError | None = None
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._pending: dict[int, PendingCall] = {}  # in the order of their requests
        self._unsent: list[PendingCall] = []  # of these, as there is no room
        self._next_id = 1
        self._dropped: bytes | bytearray = b""
        carrier.listen(self)

    async def ask(self, frame: bytes, expected: str) -> dict[str, Any]:
        """Send a frame of the released dialect, and return the data of what answers it.

        Cancelled, or out of time, the reply is dropped when it comes.

        Args:
            frame: The frame.
            expected: The type of its reply.

        Raises:
            RequestTimeoutError: No reply came in time.
            ConnectionLostError: The connection has broken.
            ServerError: The reply is an error, or the server has said unasked why the session is over.
            ProtocolError: The server said something else.
        """
        return self._data_of(await self.exchange(frame), expected)

    async def exchange(self, frame: bytes) -> Any:
        """Send a frame and return what answers it, unread; as `ask`."""
        self.last = call = self._begin(frame)
        try:
            return await call.answer
        except (asyncio.CancelledError, RequestTimeoutError):
            self.abandon(call)
            raise

    def abandon(self, call: PendingCall) -> None:
        """Wait for a request no more; where it has not left yet, it never does."""
        call.answer.cancel()
        if call in self._unsent:
            self._unsent.remove(call)
            self._forget(call)

    def abort(self) -> None:
        """End the connection without waiting; whoever waits gets ConnectionLostError."""
        self.carrier.abort()
        self._fail(ConnectionLostError("the connection was broken off by this client"))

    async def close(self, *, last: bool) -> None:
        """End the connection in order.

        Args:
            last: Say before that the session is to end.
        """
        self._stop_watching()
        try:
            if last and self.error is None and not self.carrier.full:
                self.carrier.send(self._numbered(self._next_id, encode_request("close")))
            self._fail(ClientClosedError("this client is closed; make a new one"))
            await self.carrier.close()
        except ConnectionLostError:
            self.carrier.abort()
            await self.carrier.close()
        except BaseException:
            self.carrier.abort()
            raise

    # What the carrier brings

    def on_frame(self, frame: bytes | bytearray) -> None:
        """Give a reply to whom it is for."""
        if not self._pending:
            self._fail(_unasked(frame))
            return
        call = self._pending.pop(next(iter(self._pending)))
        call.reply = frame
        if call.answer.done():
            self._dropped = frame
        else:
            call.answer.set_result(frame)

    def on_room(self) -> None:
        """Send what could not leave before."""
        unsent, self._unsent = self._unsent, []
        for call in unsent:
            if call.answer.done():  # nobody waits for it, and it has not begun
                self._forget(call)
            else:
                self._transmit(call)

    def on_lost(self, error: ClientError) -> None:
        """Tell whoever waits."""
        if self._dropped:  # by who had not waited for it; it may say why
            try:
                decode_reply(self._dropped, "")
            except SESSION_ENDED as reason:
                error = reason
            except ClientError:
                pass
        self._fail(error)

    # What they need

    def _begin(
        self, frame: bytes, binary: bool = False, sink: Callable[[Any], None] | None = None
    ) -> PendingCall:
        """Send a request; raise why nothing can be asked any more."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        request_id, self._next_id = self._next_id, self._next_id + 1
        deadline = 0.0
        if self._timeout_s is not None:
            deadline = self._loop.time() + self._timeout_s
            if self._timer is None:
                self._timer = self._loop.call_at(deadline, self._look)
        frame = self._numbered(request_id, frame)
        call = PendingCall(request_id, frame, binary, deadline, self._loop.create_future(), sink)
        self._pending[request_id] = call
        self._transmit(call)
        return call

    def _numbered(self, request_id: int, frame: bytes) -> bytes:
        return frame

    def _data_of(self, reply: Any, expected: str) -> dict[str, Any]:
        return decode_reply(reply, expected)

    def _transmit(self, call: PendingCall) -> None:
        if self._unsent or self.carrier.full:
            self._unsent.append(call)
            return
        with suppress(ConnectionLostError):  # which has been heard of
            self.carrier.send(call.frame, binary=call.binary)

    def _forget(self, call: PendingCall) -> None:
        """Note that a request has never left."""
        self._pending.pop(call.request_id, None)
        call.reply = b""

    def _look(self) -> None:
        """Tell those whose time is over; the timer of one request is left running for the next."""
        now = self._loop.time()
        waiting = [call for call in self._pending.values() if not call.answer.done()]
        for call in waiting:
            if call.deadline <= now:
                call.answer.set_exception(
                    RequestTimeoutError(
                        f"expected a reply within {self._timeout_s:g} s, got none yet; the session lives on and "
                        "drops the reply when it comes. Ask again, or raise message_timeout_s"
                    )
                )
        soonest = min((call.deadline for call in waiting if call.deadline > now), default=None)
        self._timer = None if soonest is None else self._loop.call_at(soonest, self._look)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _fail(self, error: ClientError) -> None:
        """Ask nothing more, and tell whoever waits why; the first reason counts."""
        if self.error is None:
            self.error = error
        self._stop_watching()
        pending, self._pending, self._unsent = self._pending, {}, []
        for call in pending.values():
            if not call.answer.done():
                call.answer.set_exception(self.error)


def _unasked(frame: bytes | bytearray) -> ClientError:
    """Return what follows from a frame that nobody has asked for. Whoever counts replies cannot go on behind that.

    Servers that have no room say so unasked; anything else, a second reply to one request for instance, is an error.
    """
    try:
        decode_reply(frame, "")
    except ServerError as reason:
        return reason
    except ProtocolError:
        pass
    return ProtocolError(
        f"expected one answer to each request, got {frame[:200]!r} unasked; the session is over, since replies "
        "could be taken for those of other requests"
    )
