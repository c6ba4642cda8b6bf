"""VectorClient: many sessions of one server over one connection, in the dialect `ropewalk.v1` (docs/protocol.md)."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openenv_core.client.carrier import CarrierOptions
from openenv_core.client.settings import websocket_url
from openenv_core.client.socket import WebSocketCarrier, open_socket
from openenv_core.errors import (
    ClientClosedError,
    ClientError,
    ConfigurationError,
    ProtocolError,
    RequestTimeoutError,
    ServerError,
)
from openenv_core.protocol.batch import SUBPROTOCOL, Array, FrameError, decode_frame, encode_frame
from openenv_core.protocol.jsonio import dumps
from openenv_core.protocol.replies import server_error


@dataclass(frozen=True, slots=True)
class BatchReply:
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


class VectorClient:
    """Many sessions of one server, for asyncio. `EnvClient.vector` opens one.

    What a request may carry, and what an answer has, docs/protocol.md says. `ask` is one after the other; with `send`
    and `recv` several requests are under way at once, and are answered as they end.

    Args:
        carrier: The connection.
        timeout_s: Seconds that an answer may take; None waits for ever.
    """

    def __init__(self, carrier: WebSocketCarrier, timeout_s: float | None) -> None:
        self._carrier = carrier
        self._timeout_s = timeout_s
        self._next_id = 1
        self._waiting: dict[int, list[BatchReply]] = {}
        self._ahead: set[int] = set()
        self._unread: deque[BatchReply] = deque()
        self._error: ClientError | None = None
        self._arrived = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(
        cls, base_url: str, options: CarrierOptions, timeout_s: float | None, count: int
    ) -> "VectorClient":
        """Connect, and open sessions: all, or none.

        Raises:
            ConnectionFailedError: The server does not answer, or does not speak this dialect.
            CapacityError: It has no room for so many.
            FactoryError: It could not make their environments.
        """
        carrier = await open_socket(websocket_url(base_url), replace(options, subprotocol=SUBPROTOCOL))
        client = cls(carrier, timeout_s)
        try:
            await client.ask("open", count=count)
        except BaseException:
            await client.close()
            raise
        return client

    async def ask(self, operation: str, arrays: Sequence[Array] = (), **fields: Any) -> list[BatchReply]:
        """Send a request and return all that answers it.

        Args:
            operation: What is to be done.
            arrays: What the fields count from 0.
            fields: Of the request's header.

        Raises:
            ServerError: The server refused the whole of it; the subclass tells why.
            RequestTimeoutError: No answer came in time; the late one is dropped.
            ConnectionLostError: The connection has broken, and the sessions are gone.
        """
        request_id = self._send(operation, arrays, fields)
        replies = self._waiting[request_id] = []
        try:
            await self._until(lambda: bool(replies) and replies[-1].last)
        finally:
            del self._waiting[request_id]
        return [_checked(reply) for reply in replies]

    async def send(self, operation: str, arrays: Sequence[Array] = (), **fields: Any) -> None:
        """Send a request whose answers `recv` returns. Raises what `ask` does."""
        self._ahead.add(self._send(operation, arrays, fields))

    async def recv(self) -> BatchReply:
        """Return the next answer to what was sent by `send`. Raises what `ask` does.

        Raises:
            ConfigurationError: There is none to come.
        """
        if not self._unread and not self._ahead:
            raise ConfigurationError("nothing was sent that is still to be answered; call send first")
        await self._until(lambda: bool(self._unread))
        return _checked(self._unread.popleft())

    async def fork(self, member: int, count: int) -> list[int]:
        """Open sessions in the state of one; return their numbers.

        Raises:
            ServerError: It is under way, its environment cannot be forked, or there is no room for so many; then none
                is opened.
        """
        return (await self.ask("fork", member=member, count=count))[0].fields["members"]  # type: ignore[no-any-return]

    async def snapshot(self, member: int) -> str:
        """Have the server keep the state of a session; return the id that `restore` takes.

        The server forgets it when it goes unused for as long as a session may, and when it is told to by `end`.

        Raises:
            ServerError: As `fork`, or there is no room for another.
        """
        return (await self.ask("snapshot", member=member))[0].fields["snapshot"]  # type: ignore[no-any-return]

    async def restore(self, snapshot: str, count: int = 1) -> list[int]:
        """Open sessions in a state that is kept; return their numbers.

        Raises:
            ServerError: The server has no such snapshot, or no room for so many.
        """
        return (await self.ask("open", snapshot=snapshot, count=count))[0].fields["members"]  # type: ignore[no-any-return]

    async def end(self, members: Sequence[int] = (), snapshots: Sequence[str] = ()) -> None:
        """End some sessions, and drop snapshots.

        Raises:
            ServerError: One is under way, or there is no such; nothing is ended then.
        """
        asked: dict[str, Any] = {"members": list(members)} if members else {}
        await self.ask("close", **asked, snapshots=list(snapshots))

    async def close(self) -> None:
        """End the sessions and the connection. Idempotent."""
        self._fail(ClientClosedError("this client is closed; make a new one"))
        self._reader.cancel()
        await asyncio.wait([self._reader])
        await self._carrier.close()

    def _send(self, operation: str, arrays: Sequence[Array], fields: Mapping[str, Any]) -> int:
        if self._error is not None:
            raise self._error.with_traceback(None)
        request_id, self._next_id = self._next_id, self._next_id + 1
        header = {"id": dumps(request_id), "op": dumps(operation)}
        frame = encode_frame(header | {name: dumps(value) for name, value in fields.items()}, arrays)
        # A server takes so few requests at once that what waits to leave is bounded.
        if isinstance(frame, str):
            self._carrier.send(frame.encode())
        else:
            self._carrier.send_binary(frame)
        return request_id

    async def _until(self, come: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                while not come():
                    if self._error is not None:
                        raise self._error.with_traceback(None)
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError as error:
            if isinstance(error, ClientError):
                raise
            raise RequestTimeoutError(
                f"expected an answer within {self._timeout_s:g} s, got none yet; the sessions live on. Raise "
                "message_timeout_s"
            ) from None

    async def _read(self) -> None:
        try:
            while True:
                reply = _reply(await self._carrier.recv())
                if (asked := self._waiting.get(reply.request_id)) is not None:
                    asked.append(reply)
                elif reply.request_id in self._ahead:
                    self._unread.append(reply)
                    if reply.last:
                        self._ahead.discard(reply.request_id)
                self._arrived.set()
        except ClientError as error:
            self._fail(error)
            self._carrier.abort()

    def _fail(self, error: ClientError) -> None:
        if self._error is None:
            self._error = error
        self._arrived.set()


def _reply(frame: bytes | bytearray) -> BatchReply:
    """Read a frame; one that was refused before its id was known ends the connection.

    Raises:
        ProtocolError: It is no answer of this dialect.
        ServerError: The server says why it ends the connection.
    """
    try:
        fields, arrays = decode_frame(frame if isinstance(frame, bytearray) else frame.decode())
    except (FrameError, UnicodeDecodeError) as error:
        raise ProtocolError(f"expected a frame of {SUBPROTOCOL}, got {frame[:100]!r}: {error}") from None
    request_id = fields.pop("id", None)
    if type(request_id) is not int:
        raise _error_of(fields) or ProtocolError(f"expected an answer with an id, got {str(fields)[:100]}")
    return BatchReply(request_id, fields, arrays, fields.pop("last", False) is True)


def _checked(reply: BatchReply) -> BatchReply:
    if (error := _error_of(reply.fields)) is not None:
        raise error
    return reply


def _error_of(fields: Mapping[str, Any]) -> ServerError | None:
    data = fields.get("error")
    return server_error(data) if isinstance(data, dict) else None
