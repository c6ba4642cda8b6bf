"""VectorClient: many sessions of one server over one connection, in the dialect `ropewalk.v1` (docs/protocol.md)."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from openenv_core.client.carrier import CarrierOptions
from openenv_core.client.conversation import BatchReply, Conversation, Opening, error_of, open_conversation
from openenv_core.client.waiting import SlotWait, one_of
from openenv_core.errors import ClientError, ConfigurationError
from openenv_core.protocol.batch import Array
from openenv_core.protocol.http import websocket_url


class VectorClient:
    """Many sessions of one server, for asyncio. `EnvClient.vector` opens one.

    What a request may carry, and what an answer has, docs/protocol.md says. `ask` is one after the other; with `send`
    and `recv` several requests are under way at once, and are answered as they end.

    Args:
        conversation: With the server, in that dialect.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._outstanding: set[asyncio.Future[Any]] = set()
        self._unread: deque[BatchReply | BaseException] = deque()
        self._arrived = asyncio.Event()

    @classmethod
    async def open(
        cls, base_url: str, options: CarrierOptions, timeout_s: float | None, lease_s: float, count: int
    ) -> "VectorClient":
        """Connect, and open sessions: all, or none; wait for them where the server is full.

        Args:
            base_url: The server's.
            options: How the connection is made.
            timeout_s: Seconds for an answer; None waits for ever.
            lease_s: Seconds for which the sessions outlive a connection that breaks.
            count: How many sessions, numbered from 0.

        Raises:
            ConnectionFailedError: The server does not answer, or does not speak this dialect.
            CapacityError: It had no room for so many in time.
            FactoryError: It could not make their environments.
        """
        wait = SlotWait(options.queue_timeout_s)

        async def attempt() -> VectorClient:
            waiting = replace(options, queue_timeout_s=wait.attempt_s(1))
            opening = Opening(websocket_url(base_url), waiting, lease_s, count)
            return cls(await open_conversation(opening, timeout_s, opened=True))

        return await one_of((base_url,), attempt, lambda: None, wait)

    async def ask(self, operation: str, arrays: Sequence[Array] = (), **fields: Any) -> list[BatchReply]:
        """Send a request and return all that answers it.

        Args:
            operation: What is to be done.
            arrays: What the fields count from 0.
            fields: Of the request's header.

        Raises:
            ServerError: The server refused the whole of it; the subclass tells why.
            RequestTimeoutError: No answer came in time; the late one is dropped.
            ConnectionLostError: The connection has broken, and could not be resumed: the sessions are gone.
        """
        replies: list[BatchReply] = []
        call = self._conversation.request(operation, arrays, fields, replies.append)
        try:
            await call.answer
        except BaseException:
            self._conversation.abandon(call)
            raise
        return [_check_reply(reply) for reply in replies]

    async def send(self, operation: str, arrays: Sequence[Array] = (), **fields: Any) -> None:
        """Send a request whose answers `recv` returns.

        Args:
            operation: As of `ask`, and so are arrays and fields.
            arrays: What the fields count from 0.
            fields: Of the request's header.

        Raises:
            ConnectionLostError: The connection has broken, and could not be resumed.
        """
        answer = self._conversation.request(operation, arrays, fields, self._receive).answer
        self._outstanding.add(answer)
        answer.add_done_callback(self._finish)

    async def recv(self) -> BatchReply:
        """Return the next answer to what was sent by `send`.

        Raises:
            ConfigurationError: There is none to come.
            ServerError: As of `ask`; so are RequestTimeoutError and ConnectionLostError.
        """
        while not self._unread:
            if not self._outstanding:
                raise ConfigurationError("nothing was sent that is still to be answered; call send first")
            self._arrived.clear()
            await self._arrived.wait()
        reply = self._unread.popleft()
        if isinstance(reply, BaseException):
            raise reply
        return _check_reply(reply)

    async def fork(self, member: int, count: int) -> list[int]:
        """Open sessions in the state of one; return their numbers.

        Args:
            member: The number of the one.
            count: How many to open: all, or none.

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
        request_fields: dict[str, Any] = {"members": list(members)} if members else {}
        await self.ask("close", **request_fields, snapshots=list(snapshots))

    async def fork_clients(self, count: int, connect: Callable[[str], Awaitable[Any]]) -> list[Any]:
        """Return what is made of the state of member 0: all, or none.

        Args:
            count: How many.
            connect: Makes one, to be closed, in the state of a snapshot.
        """
        snapshot = await self.snapshot(0)
        tasks = [asyncio.ensure_future(connect(snapshot)) for _ in range(count)]
        try:
            try:
                return await asyncio.gather(*tasks)
            finally:
                with suppress(ClientError):  # where the connection has broken its lease ends it
                    await self.end(snapshots=[snapshot])
        except BaseException:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(result, BaseException):
                    await result.close()
            raise

    async def close(self) -> None:
        """End the sessions and the connection. Idempotent."""
        await self._conversation.close(last=False)

    def _finish(self, answer: asyncio.Future[Any]) -> None:
        self._outstanding.discard(answer)
        if not answer.cancelled() and (error := answer.exception()) is not None:
            self._unread.append(error)
        self._arrived.set()

    def _receive(self, reply: BatchReply) -> None:
        self._unread.append(reply)
        self._arrived.set()


def _check_reply(reply: BatchReply) -> BatchReply:
    if (error := error_of(reply.fields)) is not None:
        raise error
    return reply
