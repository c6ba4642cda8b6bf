"""VectorClient: many sessions on one server over one connection, in the dialect `ropewalk.v1` (docs/protocol.md)."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from openenv_core.client.conversation import BatchReply, Conversation, Opening, error_of, open_conversation
from openenv_core.client.servers import Servers
from openenv_core.client.settings import ClientSettings
from openenv_core.client.waiting import SlotWait
from openenv_core.errors import ClientError, ConfigurationError
from openenv_core.protocol.batch import Array
from openenv_core.protocol.http import websocket_url


class VectorClient:
    """An asyncio client with many sessions on one server, made by `EnvClient.vector`.

    docs/protocol.md describes the fields of requests and replies. `ask` sends a request and waits for its replies;
    `send` and `recv` allow several requests at once, whose replies come as they complete.

    Args:
        conversation: The conversation with the server, in `ropewalk.v1`.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._outstanding: set[asyncio.Future[Any]] = set()
        self._unread: deque[BatchReply | BaseException] = deque()
        self._reply_ready = asyncio.Event()

    @classmethod
    async def open(cls, base_url: str, settings: ClientSettings, count: int) -> "VectorClient":
        """Connect and open sessions, all or none; wait for them if the server is full.

        Args:
            base_url: URL of the server.
            settings: Settings of the client.
            count: Number of sessions, numbered from 0.

        Raises:
            ConnectionFailedError: The server does not answer, or does not speak this dialect.
            CapacityError: The server had no room for all of them in time.
            FactoryError: The server could not create their environments.
        """
        wait = SlotWait(settings.queue_timeout_s)

        async def attempt() -> VectorClient:
            attempt = replace(settings, queue_timeout_s=wait.attempt_s(1))
            opening = Opening(websocket_url(base_url), attempt, wait.start_notice, count)
            return cls(await open_conversation(opening, wait=True))

        return await Servers([base_url]).attempt(attempt, wait)

    async def ask(self, operation: str, arrays: Sequence[Array] = (), **fields: Any) -> list[BatchReply]:
        """Send a request and return its replies.

        Args:
            operation: The header's `op`.
            arrays: Arrays of the frame; header fields refer to them by index.
            fields: Further header fields.

        Raises:
            ServerError: The server refused the whole request; the subclass tells why.
            RequestTimeoutError: No reply came in time; a late one is dropped.
            ConnectionLostError: The connection broke and could not be resumed: the sessions are gone.
        """
        replies: list[BatchReply] = []
        call = self._conversation.request(operation, arrays, fields, replies.append)
        try:
            await call.future
        except BaseException:
            self._conversation.abandon(call)
            raise
        return [_check_reply(reply) for reply in replies]

    async def send(self, operation: str, arrays: Sequence[Array] = (), **fields: Any) -> None:
        """Send a request whose replies `recv` returns.

        Args:
            operation: The header's `op`.
            arrays: Arrays of the frame; header fields refer to them by index.
            fields: Further header fields.

        Raises:
            ConnectionLostError: The connection broke and could not be resumed.
        """
        future = self._conversation.request(operation, arrays, fields, self._receive).future
        self._outstanding.add(future)
        future.add_done_callback(self._finish)

    async def recv(self) -> BatchReply:
        """Return the next reply to a request of `send`.

        Raises:
            ConfigurationError: No request of `send` is unanswered.
            ServerError: As in `ask`, and so are RequestTimeoutError and ConnectionLostError.
        """
        while not self._unread:
            if not self._outstanding:
                raise ConfigurationError("nothing was sent that is still to be answered; call send first")
            self._reply_ready.clear()
            await self._reply_ready.wait()
        reply = self._unread.popleft()
        if isinstance(reply, BaseException):
            raise reply
        return _check_reply(reply)

    async def fork(self, member: int, count: int) -> list[int]:
        """Open sessions in the state of a session, all or none; return their numbers.

        Args:
            member: Number of the session to fork.
            count: Number of sessions to open.

        Raises:
            ServerError: The session is busy, its environment cannot be forked, or the server has no room for all.
        """
        return (await self.ask("fork", member=member, count=count))[0].fields["members"]  # type: ignore[no-any-return]

    async def snapshot(self, member: int) -> str:
        """Have the server keep the state of a session; return the snapshot's id, for `restore`.

        The server drops it on `end`, or once it has been unused for as long as a session may be idle.

        Raises:
            ServerError: As in `fork`, or the server has no room for another snapshot.
        """
        return (await self.ask("snapshot", member=member))[0].fields["snapshot"]  # type: ignore[no-any-return]

    async def restore(self, snapshot: str, count: int = 1) -> list[int]:
        """Open sessions in the state of a snapshot, all or none; return their numbers.

        Raises:
            ServerError: The server has no such snapshot, or no room for all sessions.
        """
        # The last: before it may come frames that report the place in the queue.
        return (await self.ask("open", snapshot=snapshot, count=count))[-1].fields["members"]  # type: ignore[no-any-return]

    async def end(self, members: Sequence[int] = (), snapshots: Sequence[str] = ()) -> None:
        """End sessions and drop snapshots, all or none.

        Raises:
            ServerError: A session is busy, or a session or snapshot does not exist.
        """
        request_fields: dict[str, Any] = {"members": list(members)} if members else {}
        await self.ask("close", **request_fields, snapshots=list(snapshots))

    async def fork_clients(self, count: int, connect: Callable[[str], Awaitable[Any]]) -> list[Any]:
        """Return clients that start in the state of session 0, all or none.

        Args:
            count: Number of clients.
            connect: Connects a client in the state of a snapshot, given its id.
        """
        snapshot = await self.snapshot(0)
        tasks = [asyncio.ensure_future(connect(snapshot)) for _ in range(count)]
        try:
            try:
                return await asyncio.gather(*tasks)
            finally:
                with suppress(ClientError):  # after a broken connection it expires by itself
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
        await self._conversation.close(end_session=False)

    def _finish(self, future: asyncio.Future[Any]) -> None:
        self._outstanding.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            self._unread.append(error)
        self._reply_ready.set()

    def _receive(self, reply: BatchReply) -> None:
        self._unread.append(reply)
        self._reply_ready.set()


def _check_reply(reply: BatchReply) -> BatchReply:
    if (error := error_of(reply.fields)) is not None:
        raise error
    return reply
