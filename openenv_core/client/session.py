"""The session of a client: opened, lost, replayed and closed, over any number of connections."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from openenv_core.client.carrier import SESSION_ENDED, StuckError
from openenv_core.client.replay import Journal
from openenv_core.client.servers import Servers
from openenv_core.client.settings import ClientSettings
from openenv_core.client.waiting import SlotWait
from openenv_core.errors import (
    CapacityError,
    ClientClosedError,
    ClientError,
    ConfigurationError,
    ConnectionFailedError,
    ConnectionLostError,
    EpisodeLostError,
    ProtocolError,
    RequestTimeoutError,
    ServerError,
)
from openenv_core.protocol.frames import data_of, encode_request
from openenv_core.protocol.http import http_url, websocket_url
from openenv_core.tracing import EpisodeSpans

if TYPE_CHECKING:
    from openenv_core.client.conversation import Conversation

T = TypeVar("T")

_ENDED: Final = "this client has closed the session"


@dataclass(frozen=True, slots=True)
class Unopened:
    """No session is open; the next request opens one."""


@dataclass(slots=True)
class Open:
    """A session is open, or waits for room on its server.

    Attributes:
        conversation: The conversation with the server.
        answered: A request was answered, so that the session has its slot.
    """

    conversation: "Conversation"
    answered: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """The session is over; its episode can be replayed in another, unless the journal says why not.

    Attributes:
        reason: Why it is over.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    """This client has ended the session; requests that were in progress fail.

    Attributes:
        for_good: The client is closed. Otherwise the state is Unopened once the session has ended.
    """

    for_good: bool


SessionState: TypeAlias = Unopened | Open | Lost | Closed


class ClientSession:
    """One session on one of several equal servers. Requests are sent one at a time.

    It does not refer to its client, whose end can therefore end it.

    Args:
        settings: The client's settings.
        servers: The servers that it may be on.
        session_id: Id of a standing session, which `close` leaves open; None for one of its own.

    Attributes:
        settings: The client's settings.
        servers: The servers that it may be on.
        state: Unopened, Open, Lost or Closed.
        journal: The requests of the current episode.
        loop: The event loop that it is bound to since its first use.
        children: Sessions that end with this one.
    """

    def __init__(self, settings: ClientSettings, servers: Servers, session_id: str | None) -> None:
        self.settings = settings
        self.servers = servers
        self.state: SessionState = Unopened()
        self.journal = Journal(attached=session_id is not None)
        self.children: list[ClientSession] = []
        self._session_id = session_id
        self._snapshot: str | None = None  # id of the snapshot that the first session starts from
        self.loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._wait: SlotWait | None = None  # of the request in progress, until the session has its slot
        self._ending: Conversation | None = None  # left, and perhaps not closed yet

    @property
    def conversation(self) -> "Conversation | None":
        """The conversation of an open session."""
        return self.state.conversation if isinstance(self.state, Open) else None

    @property
    def closed(self) -> bool:
        """Whether the client is closed."""
        return isinstance(self.state, Closed) and self.state.for_good

    async def connect(self) -> None:
        """Open a session if none is open; see `EnvClient.connect`."""
        self._begin()
        async with self._lock:
            if not isinstance(self.state, Open):
                self._wait = None
                await self._open(fresh=self.journal.obstacle is not None)

    async def locate(self) -> str:
        """Return the URL of a server, which the provider starts first if need be."""
        self._begin()
        async with self._lock:
            return await self.servers.locate()

    async def request(
        self, frame: bytes, expected: str, *, reset: Mapping[str, Any] | None = None, read_only: bool = False
    ) -> dict[str, Any]:
        """Send a request and return its reply's data. A lost session is opened again, and its episode replayed.

        Args:
            frame: The encoded request; ignored with `reset`.
            expected: The type of its reply.
            reset: Options of a reset to send.
            read_only: The request cannot change the episode, so that it is not replayed.
        """
        if self.loop is not asyncio.get_running_loop() or isinstance(self.state, Closed):
            self._begin()
        await (lock := self._lock).acquire()
        try:
            losses, journal, state = 0, self.journal, self.state
            answered = isinstance(state, Open) and state.answered
            self._wait = None if answered else SlotWait(self.settings.queue_timeout_s)
            is_complete = reset is None
            while True:
                state = self.state
                if not isinstance(state, Open):
                    state = await self._open(fresh=reset is not None)
                conversation = state.conversation
                if reset is not None and not is_complete:  # once: the seed that it draws is one of a series
                    reset, is_complete = journal.complete(reset, conversation.carrier.deterministic), True
                    frame = encode_request("reset", reset)
                call = None
                try:
                    call = conversation.send(frame)
                    data = data_of(await call.future, expected)
                except asyncio.CancelledError:  # the server may execute it nevertheless
                    assert call is not None
                    conversation.abandon(call)
                    if not read_only:
                        journal.record(frame, expected, call)
                    raise
                except StuckError as stuck:
                    if reset is None:
                        raise
                    self._lose(str(stuck))
                except ClientError as error:
                    if call is not None and isinstance(error, RequestTimeoutError):
                        conversation.abandon(call)
                    if conversation.error is None and not isinstance(error, (*SESSION_ENDED, ProtocolError)):
                        if call is not None and not read_only:
                            journal.record(frame, expected, call)
                        if losses and reset is not None and isinstance(error, ServerError):
                            self._lose(str(error))  # no episode began here; the last one is lost
                        raise
                    if isinstance(self.state, Closed):
                        raise
                    self._lose(str(error))
                    losses = await self._survive(error, losses, fresh=reset is not None)
                else:
                    state.answered = True
                    if reset is not None:
                        journal.record_reset(frame, call)
                    elif not read_only and journal.obstacle is None:
                        journal.record(frame, expected, call)
                    return data
        finally:
            lock.release()

    async def disconnect(self) -> None:
        """End the session, aborting a request in progress. A later request opens a new one."""
        self._bind_loop()
        if self.closed:
            return
        self._leave(closed := Closed(for_good=False))
        try:
            await self._end()
        finally:
            self.journal.clear()
            if self.state is closed:
                self.state = Unopened()

    async def close(self) -> None:
        """End the session, its children, and the server of the provider. Idempotent."""
        try:
            if self.loop is not None and self.loop.is_closed():  # the connections have ended with it
                self.state = Closed(for_good=True)
                return
            self._bind_loop()
            self._leave(Closed(for_good=True))
            self.servers.abort_start()
            children, self.children = self.children, []
            await asyncio.gather(*(child.close() for child in children), return_exceptions=True)
            await self._end()
        finally:
            await self.servers.stop()

    def add_child(self, child: "ClientSession", snapshot: str | None) -> None:
        """Have a session end with this one, and start from a snapshot on this one's server, if one is given."""
        self.children = [*(known for known in self.children if not known.closed), child]
        child.servers.list_urls = self.servers.list_urls
        if snapshot is not None:
            child._snapshot = snapshot
            child.servers.urls, child.servers.url = self.servers.urls, self.servers.url

    async def fork(self, count: int, connect: Callable[[str], Awaitable[T]]) -> list[T]:
        """Return clients that start in this session's state, all or none.

        Args:
            count: Number of clients.
            connect: Connects a client in the state of a snapshot, given its id.

        Raises:
            ConfigurationError: The server has no forks.
        """
        from openenv_core.client.vector import VectorClient

        self._begin()
        async with self._lock:
            if (known := self.conversation) is not None and known.error is not None:
                self._lose(str(known.error))
            self._wait = None
            conversation = self.conversation or (await self._open(fresh=False)).conversation
            if not conversation.v1:
                raise ConfigurationError(
                    "expected a server of Ropewalk's over WebSocket, which alone has forks, got the released dialect"
                )
            return await VectorClient(conversation).fork_clients(count, connect)

    # Internals

    async def _open(self, *, fresh: bool) -> Open:
        """Open a session. Unless `fresh` (a reset follows), replay the episode of a lost one in it."""
        self._wait = wait = self._wait or SlotWait(self.settings.queue_timeout_s)
        if self._snapshot is not None:  # only this server has the snapshot, and a fork does not wait for room
            return await self._connect()
        journal, state = self.journal, self.state
        if fresh or not isinstance(state, Lost):
            return await self.servers.attempt(self._connect, wait)
        if journal.obstacle is not None:
            raise (ConnectionLostError if journal.attached else EpisodeLostError)(state.reason)
        lasting = self.servers.provider is None or self.servers.list_urls is not None
        retry_for_s = self.settings.connect_timeout_s if lasting else 0.0
        try:
            return await self.servers.attempt(partial(self._replay, state.reason), wait, retry_for_s)
        except ClientError as error:
            if isinstance(self.state, Closed):
                raise ConnectionLostError(f"{_ENDED}; before, {state.reason}") from None
            known = isinstance(error, EpisodeLostError | CapacityError)
            reason = "" if known else f"no server was found to play it again on, within {retry_for_s:g} s: "
            journal.clear(f"{reason}{error}")
            self.state = Lost(f"{state.reason}. The episode is lost: {journal.obstacle}")
            raise await self.servers.explain(EpisodeLostError(self.state.reason)) from error

    async def _replay(self, reason: str) -> Open:
        """Replay the episode on the current server; raises ConnectionFailedError if another attempt may succeed."""
        try:
            opened = await self._connect()
            await self.journal.replay(opened.conversation)
        except BaseException as error:
            self._lose(reason)
            final = isinstance(error, EpisodeLostError | CapacityError) or isinstance(self.state, Closed)
            if final or not isinstance(error, ClientError):
                raise
            raise ConnectionFailedError(str(error)) from error
        return opened

    async def _connect(self) -> Open:
        """Open a session on the current server."""
        from openenv_core.client.conversation import Conversation, Opening, open_conversation

        if isinstance(self.state, Closed):
            raise ConnectionLostError(_ENDED)
        await self._finish_ending()  # a server with a single slot has to release it first
        base_url = await self.servers.locate()
        settings, wait = self.settings, self._wait
        assert wait is not None
        try:
            if settings.transport == "websocket":
                snapshot, self._snapshot = self._snapshot, None
                several = len(self.servers.urls) != 1
                attempt = replace(settings, queue_timeout_s=wait.attempt_s(len(self.servers.urls)))
                url = websocket_url(base_url, self._session_id)
                opening = Opening(url, attempt, wait.start_notice, 1, snapshot, several)
                # Wait for the open: the snapshot may be gone by the first request.
                conversation = await open_conversation(opening, wait=snapshot is not None)
            else:
                from openenv_core.client.http import open_http  # lazily: it imports httpx

                carrier = await open_http(http_url(base_url), self._session_id, settings)
                conversation = Conversation(carrier, settings.message_timeout_s)
        except ConnectionFailedError as error:
            raise await self.servers.explain(error) from error.__cause__
        if isinstance(self.state, Closed):
            self._ending = conversation
            raise ConnectionLostError(_ENDED)
        self.state = opened = Open(conversation)
        return opened

    async def _survive(self, error: ClientError, losses: int, *, fresh: bool) -> int:
        """Prepare to repeat a request whose session is lost; return how many sessions it has lost.

        Raises:
            ClientError: The request cannot be repeated.
        """
        if isinstance(error, CapacityError) and self._wait is not None:  # it was not executed
            self.servers.use_next()
            await self._wait.pause(error, len(self.servers.urls))
            return losses
        lost = self.journal.record_loss(error, losses + 1, fresh=fresh)
        if lost is not None:
            self._lose(str(lost))
            raise await self.servers.explain(lost) from None
        self.servers.use_next()
        return losses + 1

    def _lose(self, reason: str) -> None:
        """End the session without waiting, unless the client has closed it."""
        if isinstance(self.state, Open):
            self._ending = self.state.conversation
            self._ending.abort()
        if not isinstance(self.state, Closed):
            self.state = Lost(reason)

    def _leave(self, closed: Closed) -> None:
        """Take the session out of use; a request in progress fails, and stops waiting for room."""
        if self._wait is not None:
            self._wait.stop()
        if isinstance(self.state, Open):
            self._ending = self.state.conversation
            if self._lock.locked():
                self._ending.abort()
        self.state = closed

    async def _end(self) -> None:
        """Wait until the request in progress has failed and the session has ended."""
        async with self._lock:
            await self._finish_ending()

    async def _finish_ending(self) -> None:
        """Close the connection of the session that was left, if any; one that this client owns is ended first."""
        ending, self._ending = self._ending, None
        if ending is not None:
            await ending.close(end_session=self._session_id is None)

    def _begin(self) -> None:
        """Bind the session to the running event loop for a call; raise ClientClosedError if it is closed for good."""
        self._bind_loop()
        if self.closed:
            raise ClientClosedError("this client is closed; make a new one")

    def _bind_loop(self) -> None:
        """Bind the session to the running event loop, on which its connections are."""
        loop = asyncio.get_running_loop()
        if self.loop is not None and self.loop is not loop:
            raise ConfigurationError(
                "expected every call of a client on one event loop, got a second loop; make a client for each, as for "
                "each asyncio.run(). (A client that was first called where no loop runs, or by sync(), has a loop of "
                "its own.)"
            )
        self.loop = loop


class TracedSession(ClientSession):
    """A session whose episodes are traced."""

    def __init__(self, settings: ClientSettings, servers: Servers, session_id: str | None) -> None:
        super().__init__(settings, servers, session_id)
        self._spans = EpisodeSpans()

    async def request(
        self, frame: bytes, expected: str, *, reset: Mapping[str, Any] | None = None, read_only: bool = False
    ) -> dict[str, Any]:
        """Send a request as `ClientSession.request`; a reset or step in a span."""
        work = super().request(frame, expected, reset=reset, read_only=read_only)
        if expected != "observation":
            return await work
        return await self._spans.request("step" if reset is None else "reset", work)

    async def _end(self) -> None:
        await super()._end()
        self._spans.end()
