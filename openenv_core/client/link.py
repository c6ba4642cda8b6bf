"""A conversation in `ropewalk.v1`: requests with ids, and sessions that outlive a connection that breaks."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from openenv_core.client.carrier import CarrierOptions
from openenv_core.client.conversation import Conversation, PendingCall
from openenv_core.client.socket import WebSocketCarrier, open_socket
from openenv_core.client.waiting import Backoff
from openenv_core.errors import (
    AccessRefusedError,
    AuthenticationError,
    CapacityError,
    ClientError,
    ConfigurationError,
    ConnectionFailedError,
    ConnectionLostError,
    ProtocolError,
    ServerError,
)
from openenv_core.protocol.batch import (
    RESUME,
    SNAPSHOT,
    SUBPROTOCOL,
    Array,
    FrameError,
    decode_frame,
    encode_frame,
)
from openenv_core.protocol.jsonio import dumps
from openenv_core.protocol.replies import data_of, server_error

MAX_PENDING: Final = 64
"""Requests that wait for answers; a server takes half as many at once."""

MAX_REFUSED: Final = 4
"""Attempts in a row to connect where nobody listens any more: the server is likely gone, and its sessions with it.

Where they can go on elsewhere they do then."""

MAX_REFUSED_ALONE: Final = 8
"""Where they cannot: some four seconds, in which an ingress may be started again."""

_RETRY_S: Final = 0.05
_MAX_RETRY_S: Final = 2.0
_RESUME_ID: Final = 0
_RELEASED: Final = b'{"type":'


class BatchReply(NamedTuple):
    """One frame that answers a request.

    Attributes:
        request_id: Of the request.
        fields: The keys of its header.
        arrays: What these count from 0.
        last: No other answers the same request.
    """

    request_id: int
    fields: dict[str, Any]
    arrays: list[Array]
    last: bool


class Link(Conversation):
    """Asks in `ropewalk.v1`. A connection that breaks is replaced by another, as long as the server keeps the sessions.

    Args:
        carrier: The connection.
        url: Where others are made.
        options: How they are made.
        timeout_s: Seconds that an answer may take; None waits for ever.
        lease_s: Seconds that the server is asked to keep the sessions without a connection; 0: not at all.
        count: How many sessions are opened.
        snapshot: In whose state they begin, by its id.
        others: Nothing is gained by waiting for a server that does not listen: another can be asked, for instance.
    """

    def __init__(
        self,
        carrier: WebSocketCarrier,
        url: str,
        options: CarrierOptions,
        timeout_s: float | None,
        lease_s: float,
        count: int,
        snapshot: str | None,
        others: bool,
    ) -> None:
        self._url = url
        self._options = options
        self._others = others
        self._lease_s = lease_s
        self._read = 0
        self._session: str | None = None
        self._secret = ""
        self._resuming: asyncio.Task[None] | None = None
        self._resumed: asyncio.Future[None] | None = None  # whether the answer to a resume has come
        super().__init__(carrier, timeout_s)
        asked: dict[str, Any] = {"count": count, "wait_s": options.queue_timeout_s}
        if lease_s:
            asked["lease_s"] = lease_s
        if snapshot is not None:
            asked[SNAPSHOT] = snapshot
        self._opening = self.request("open", (), asked, self._opened)

    async def opened(self) -> None:
        """Wait until the sessions are open.

        Raises:
            CapacityError: The server has no room for so many; none is open.
            FactoryError: It could not make their environments.
        """
        await self._opening.answer

    def request(
        self,
        operation: str,
        arrays: Sequence[Array],
        fields: Mapping[str, Any],
        sink: Callable[[BatchReply], None],
    ) -> PendingCall:
        """Send a request about many sessions.

        Args:
            operation: What is to be done.
            arrays: What the fields count from 0.
            fields: Of the request's header.
            sink: Is given each frame that answers it; the call is over with the last.
        """
        header = {"id": self._next_id, "op": operation, "read": self._read, **fields}
        frame = encode_frame({name: dumps(value) for name, value in header.items()}, arrays)
        call = self._begin(
            frame if isinstance(frame, bytes) else frame.encode(), isinstance(frame, bytes), sink
        )
        # Where nobody waits, nobody is told.
        call.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        return call

    def abandon(self, call: PendingCall) -> None:
        """Wait for a request no more; the server does not begin it, if it has not."""
        super().abandon(call)
        waits = self._resuming is None and call.request_id in self._pending
        if self.error is None and waits and len(self._pending) < MAX_PENDING:
            self.request("cancel", (), {"request": call.request_id}, _nowhere).answer.cancel()

    def abort(self) -> None:
        """End the connection without waiting; whoever waits gets ConnectionLostError."""
        self._stop_resuming()
        super().abort()

    async def close(self, *, last: bool) -> None:
        """End the connection in order; see the base."""
        self._stop_resuming()
        await super().close(last=last)

    # What the carrier brings

    def on_frame(self, frame: bytes | bytearray) -> None:
        """Give an answer to whom it is for."""
        try:
            fields, arrays = decode_frame(frame if isinstance(frame, bytearray) else frame.decode())
        except (FrameError, UnicodeDecodeError) as error:
            self._break(ProtocolError(f"expected a frame of {SUBPROTOCOL}, got {frame[:100]!r}: {error}"))
            return
        request_id = fields.get("id")
        if request_id == _RESUME_ID and self._resuming is not None:
            self._go_on(fields)
            return
        self._read += 1
        if type(request_id) is not int:
            text = f"expected an answer with an id, got {str(fields)[:100]}"
            self._break(error_of(fields) or ProtocolError(text))
            return
        call = self._pending.get(request_id)
        if call is None:
            return
        if call.sink is None:
            del self._pending[request_id]
            call.reply = frame
            if not call.answer.done():
                call.answer.set_result(fields)
            return
        last = fields.get("last") is True
        if last:
            del self._pending[request_id]
        elif self._timeout_s is not None:
            call.deadline = self._loop.time() + self._timeout_s
        if call.answer.done():
            return
        call.sink(BatchReply(request_id, fields, arrays, last))
        if last and not call.answer.done():
            call.answer.set_result(None)

    def on_lost(self, error: ClientError) -> None:
        """Make another connection, where the server keeps the sessions; or tell whoever waits."""
        if self._resuming is not None:
            if self._resumed is not None and not self._resumed.done():
                self._resumed.set_exception(error)
        elif (
            self.carrier.broken
            and self._lease_s
            and self.error is None
            and (self._session is not None or self._opening.request_id in self._pending)
        ):
            self._resuming = asyncio.create_task(self._resume(error))
        else:
            self._fail(error)

    # What they need

    def _numbered(self, request_id: int, frame: bytes) -> bytes:
        if frame.startswith(_RELEASED):
            return b'{"id":%d,"read":%d,%b' % (request_id, self._read, frame[1:])
        return frame

    def _data_of(self, reply: Any, expected: str) -> dict[str, Any]:
        return data_of(reply, expected)

    def _begin(
        self, frame: bytes, binary: bool = False, sink: Callable[[Any], None] | None = None
    ) -> PendingCall:
        if len(self._pending) >= MAX_PENDING:
            raise ConfigurationError(f"{MAX_PENDING} requests wait for answers; wait for some of these first")
        return super()._begin(frame, binary, sink)

    def _transmit(self, call: PendingCall) -> None:
        if self._resuming is None:
            super()._transmit(call)

    def _opened(self, reply: BatchReply) -> None:
        """Take an answer to the open; the time in the server's queue is none of those of requests."""
        self._postpone(0.0 if reply.last else self._options.queue_timeout_s)
        if (error := error_of(reply.fields)) is not None:
            self._opening.answer.set_exception(error)
            self._break(error)
        elif "session" in reply.fields:
            self._session, self._secret = str(reply.fields["session"]), str(reply.fields.get("secret"))

    def _postpone(self, wait_s: float) -> None:
        if self._timeout_s is None:
            return
        deadline = self._loop.time() + self._timeout_s + wait_s
        for call in self._pending.values():
            call.deadline = deadline
        self._stop_watching()
        self._timer = self._loop.call_at(deadline, self._look)

    def _break(self, error: ClientError) -> None:
        """End a connection on which nothing can be asked any more."""
        self._fail(error)
        self.carrier.abort()

    async def _resume(self, error: ClientError) -> None:
        """Go on over another connection, or tell whoever waits why that cannot be."""
        deadline = self._loop.time() + self._lease_s
        backoff, refused = Backoff(_RETRY_S, _MAX_RETRY_S), 0
        reason: object = f"no connection within its lease of {self._lease_s:g} s"
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._reconnect()
                    return
                except CapacityError:  # a gateway says so, of a server that is being replaced for instance
                    refused = 0
                except (AuthenticationError, AccessRefusedError, ServerError, ProtocolError) as failure:
                    reason = failure
                    break
                except ConnectionFailedError as failure:
                    refused = refused + 1 if isinstance(failure.__cause__, ConnectionRefusedError) else 0
                    elsewhere = self._others or self.carrier.deterministic
                    if refused >= (MAX_REFUSED if elsewhere else MAX_REFUSED_ALONE):
                        reason = failure
                        break
                except (ConnectionLostError, TimeoutError):
                    refused = 0
                if self._loop.time() + (pause_s := backoff.next_s()) > deadline:
                    break
                await asyncio.sleep(pause_s)
        except Exception as failure:
            reason = failure
        self._resuming = None
        self._fail(ConnectionLostError(f"{error}. The session could not be resumed: {reason}"))

    async def _connect(self, session: str | None) -> WebSocketCarrier:
        return await open_socket(
            self._url if session is None else _with(self._url, RESUME, session), self._options
        )

    async def _reconnect(self) -> None:
        carrier = await self._connect(self._session)
        self._resumed = resumed = self._loop.create_future()
        try:
            if carrier.subprotocol != SUBPROTOCOL:
                raise ProtocolError(f"the server does not speak {SUBPROTOCOL} any more")
            carrier.deterministic |= self.carrier.deterministic
            self.carrier = carrier
            carrier.listen(self)
            if self._session is None:  # nobody knows of the sessions that there may be; they are opened anew
                self._read = 0
                self._go_on({})
            else:
                known = {"session": self._session, "secret": self._secret, "read": self._read}
                carrier.send(dumps({"id": _RESUME_ID, "op": "resume", **known}))
                await resumed
        except BaseException:
            carrier.broken = True  # the server is not to end the sessions for it
            carrier.abort()
            raise
        finally:
            self._resumed = None

    def _go_on(self, fields: Mapping[str, Any]) -> None:
        """Send again what the server has not taken."""
        resumed = self._resumed
        if resumed is None or resumed.done():
            return
        if (error := error_of(fields)) is not None:
            resumed.set_exception(error)
            return
        self._resuming = None
        resumed.set_result(None)
        taken = fields.get("taken", -1)
        self._unsent = [call for request_id, call in self._pending.items() if request_id > taken]
        self.on_room()

    def _stop_resuming(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None


async def open_conversation(
    url: str,
    options: CarrierOptions,
    timeout_s: float | None,
    lease_s: float,
    count: int = 1,
    snapshot: str | None = None,
    others: bool = False,
) -> Conversation:
    """Connect to a ws:// or wss:// URL, and begin to open sessions, in the state of a snapshot where one is named.

    With `others` a server that does not listen any more is soon given up, as by `Link`.

    Returns:
        A `Link`; where the server does not speak `ropewalk.v1`, a conversation in the released dialect.

    Raises:
        ClientError: As `open_socket`.
    """
    if snapshot is not None:
        url = _with(url, SNAPSHOT, snapshot)
    options = replace(options, subprotocol=SUBPROTOCOL)
    carrier = await open_socket(url, options)
    if carrier.subprotocol != SUBPROTOCOL:
        return Conversation(carrier, timeout_s)
    link = Link(carrier, url, options, timeout_s, lease_s, count, snapshot, others)
    if snapshot is not None:  # which may be gone by the first request
        try:
            await link.opened()
        except BaseException:
            await link.close(last=False)
            raise
    return link


def _with(url: str, key: str, value: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{key}={quote(value)}"


def _nowhere(reply: BatchReply) -> None: ...


def error_of(fields: Mapping[str, Any]) -> ServerError | None:
    """Return the error that a frame tells of, if it tells of one."""
    data = fields.get("error", fields.get("data") if fields.get("type") == "error" else None)
    return server_error(data) if isinstance(data, dict) else None
