"""/ws in the dialect `ropewalk.v1`: requests with ids, whose sessions and replies survive a broken connection.

A `Link` holds a client's state on the server: its sessions, running requests and unread replies. A `LinkConversation`
is the socket attached to a link; after a broken connection, a new one takes its place. See docs/protocol.md.
"""

import asyncio
import hmac
import logging
import math
import secrets
from collections import deque
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Final

from openenv_core.protocol import batch as wire
from openenv_core.protocol.batch import Array
from openenv_core.protocol.errors import (
    EXECUTION_ERROR,
    NOT_EXECUTED,
    SESSION_ERROR,
    VALIDATION_ERROR,
    RefusalError,
)
from openenv_core.protocol.frames import (
    Close,
    Mcp,
    NumberedFrame,
    RequestDecoder,
    RequestHead,
    encode_error,
)
from openenv_core.protocol.jsonio import dumps
from servers.execution import CLOSE_TIMEOUT_S, FATAL, keep
from servers.metrics import size_of
from servers.routes.batch import BatchDialect
from servers.routes.connection import Message, Receive, Send
from servers.routes.http import refusal_data, refusal_of
from servers.routes.jsonrpc import JsonRpc
from servers.routes.websocket import NORMAL_CLOSURE, Conversation, Sockets, answer_mcp
from servers.security import owner_of
from servers.sessions import EnvironmentSession, SessionBusyError, UnknownSessionError
from servers.sessions.batch import BatchRound, Member, MemberCall, SessionBatch
from servers.sessions.session import EnvironmentCall, RequestCall
from servers.threads import Outcome

logger = logging.getLogger("servers")

MAX_REQUESTS: Final = 32
"""Requests that one connection may have running at once."""

MAX_RUNNING_CHARS: Final = 16 * 1024 * 1024
"""Total characters of running requests above which no further request is read until one of them is answered."""

OPEN_TIMEOUT_S: Final = 60.0
"""Seconds within which a new connection must open a session."""

MAX_LEASE_S: Final = 600.0
"""Longest lease: seconds that sessions outlive a broken connection."""

MAX_KEPT_FRAMES: Final = 2048
MAX_KEPT_BYTES: Final = 64 * 1024 * 1024
MAX_ALL_KEPT_BYTES: Final = 1024 * 1024 * 1024
"""Limits on the frames kept for one client, and for all together.

Where all together keep more, none keeps more than an equal share. A client's latest frame is always kept.
"""


class SentFrames:
    """Frames in the order of sending, numbered from 0.

    Args:
        clients: The clients that share the memory for kept frames.

    Attributes:
        count: Frames sent so far, including those that are not kept.
        read: How many of them the client has read, which are dropped when the next one is sent.
    """

    def __init__(self, clients: Mapping[str, "Link"]) -> None:
        self.count = self.read = 0
        self._clients = clients
        self._kept: deque[str | bytes] = deque()  # the latest ones, without a gap
        self._kept_bytes = 0

    def keep(self, frame: str | bytes) -> None:
        """Count a frame and keep it; drop those that the client has read, and the oldest ones beyond the limits."""
        kept = self._kept
        if self.read == self.count:  # all of them, as usual
            kept.clear()
            self._kept_bytes = 0
        while kept and self.count - len(kept) < self.read:
            self._kept_bytes -= len(kept.popleft())
        self.count += 1
        kept.append(frame)
        self._kept_bytes += len(frame)
        while len(kept) > 1 and (len(kept) > MAX_KEPT_FRAMES or self._exceeds_bytes()):
            self._kept_bytes -= len(kept.popleft())

    def _exceeds_bytes(self) -> bool:
        if self._kept_bytes > MAX_KEPT_BYTES:
            return True
        if self._kept_bytes * len(self._clients) <= MAX_ALL_KEPT_BYTES:
            return False
        return sum(client.frames._kept_bytes for client in self._clients.values()) > MAX_ALL_KEPT_BYTES

    def unread(self) -> list[str | bytes]:
        """Return the kept frames that the client has not read, in order."""
        return list(self._kept)[len(self._kept) - (self.count - self.read) :]

    def has_all_after(self, read: int) -> bool:
        """Whether all frames after the first `read` are kept."""
        return self.count - len(self._kept) <= read <= self.count


@dataclass(eq=False)
class LinkRequest(RequestCall):
    """A request that has not been answered; one for a single session is also the call of that session.

    Attributes:
        link: The link that it came on.
        head: Its id, and its operation or member.
        parsed: The message of the released dialect in it, for a single request.
        arrays: The arrays of its frame.
        size: Length of its frame, which counts until it is decoded or answered.
        received_at: When its frame came, by `perf_counter`; 0 without metrics.
        request_id: Its id.
        refusal: Why it must not be executed, if so.
        executing: Whether it has begun, for a request that a task answers.
        called: The session that a single request calls.
        round: Its calls, for a batched request.
        answering: The task that answers it, if any.
        timer: Enforces the deadline by which it has to start.
    """

    link: "Link"
    head: RequestHead
    parsed: Any
    arrays: list[Array]
    size: int
    received_at: float
    request_id: int
    # Defaults that stay in the class are not set for each request.
    refusal: RefusalError | None = field(default=None, init=False)
    executing: bool = field(default=False, init=False)
    called: EnvironmentSession | None = field(default=None, init=False)
    round: BatchRound | None = field(default=None, init=False)
    answering: asyncio.Task[Any] | None = field(default=None, init=False)
    timer: asyncio.TimerHandle | None = field(default=None, init=False)

    def reply(self, reply: str | None = None) -> None:
        """Send the reply, if there is one left to send, and leave the running requests."""
        link = self.link
        if reply is not None:
            link.send(reply)
        if self not in link.running:
            return
        link.running.discard(self)
        link.running_chars -= self.size
        if self.timer is not None:
            self.timer.cancel()
        if link.conversation is not None and link.conversation.awaits_progress:
            link.conversation.update()

    def refuse(self, error: BaseException) -> None:
        """Send an error in place of the reply: a refusal, or what the environment raised."""
        link, head = self.link, self.head
        if link.closed:
            return
        if isinstance(error, UnknownSessionError) and isinstance(head, NumberedFrame):
            error = UnknownSessionError(f"member {head.member}, which has ended")
        if self in link.running:
            self.reply(link.links.encode_refusal(refusal_of(error), head.id, self.parsed is not None))


class _LinkClose(LinkRequest):
    """A request to close, which has its turn after those before it."""

    def deliver(self, _: Outcome) -> None:
        """Close the connection, and with it the link."""
        self.reply()
        self.link.close_connection()


class Link:
    """One client's sessions, running requests and unread replies, independent of its current socket.

    Args:
        links: The registry in which a resume finds it.
        owner: Owner of its sessions.
        session_id: Id of a standing session to attach to, which is then the only one.

    Attributes:
        id: Its id in the registry; empty if it ends with its connection.
        secret: The secret that a resume has to present with the id.
        lease_s: Seconds that it outlives its connection.
        last_id: The highest request id received.
        frames: The frames sent, kept with a lease until the client has read them.
        running: Requests that have not been answered.
        running_chars: Total length of the frames of these requests.
        conversation: The attached socket, if any.
        closed: Whether it has ended.
    """

    def __init__(self, links: "Links", owner: str, session_id: str | None = None) -> None:
        self.owner = owner
        self.id = self.secret = ""
        self.lease_s = 0.0
        self.last_id = -1
        self.frames = SentFrames(links.registered)
        self.running: set[LinkRequest] = set()
        self.running_chars = 0
        self.conversation: LinkConversation | None = None
        self.closed = False
        self.batch = SessionBatch(links.sessions, owner)
        self.metrics = links.sessions.metrics
        self._sessions = links.sessions
        self.links = links
        self._session_id = session_id
        self._attachment = AsyncExitStack()
        self._opening_count = 0  # sessions
        self._blockers = 0  # requests that those after them have to wait for
        self._deferred_requests: deque[LinkRequest] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def live_sessions(self) -> int:
        """Number of sessions that have not ended."""
        return sum(not member.session.ended for member in self.batch.members.values())

    def send(self, frame: str | bytes) -> None:
        """Send a frame, and keep it if a client may have to read it again."""
        if self.metrics.enabled:  # `count_sent`, inlined for speed
            size_is_length = isinstance(frame, bytes) or frame.isascii()
            self.metrics.counts.sent_bytes += len(frame) if size_is_length else size_of(frame)
        if self.id:
            self.frames.keep(frame)
        else:
            self.frames.count += 1
        if self.conversation is not None:
            self.conversation.connection.send(frame)

    # Its sockets

    def attach(self, conversation: "LinkConversation") -> None:
        """Attach a socket, and abort the previous one, whose break may not have been detected yet."""
        if self._timer is not None:
            self._timer.cancel()
        previous, self.conversation = self.conversation, conversation
        if previous is not None:
            previous.connection.abort()

    def lose_connection(self) -> None:
        """Wait for another socket until the lease ends; close if nothing is left to resume."""
        self.conversation = None
        if not self.live_sessions and not self.running:
            self._end()
            return
        self._timer = asyncio.get_running_loop().call_later(self.lease_s, self._expire)

    async def detach(self) -> None:
        """Leave a standing session if the socket is broken, since another client wants it."""
        if self.conversation is None:
            await asyncio.shield(keep(asyncio.create_task(self.close())))

    def _expire(self) -> None:
        logger.info("a client has not reconnected within its lease; its sessions are ended")
        self._end()

    def _end(self) -> None:
        self.links.registered.pop(self.id, None)  # from now on it cannot be resumed
        keep(asyncio.create_task(self.close()))

    async def close(self) -> None:
        """Cancel running requests and end all sessions."""
        if self.closed:
            return
        self.closed = True
        self.links.registered.pop(self.id, None)
        if self._timer is not None:
            self._timer.cancel()
        tasks = []
        for request in self.running:
            if request.timer is not None:
                request.timer.cancel()
            if request.round is not None:
                request.round.close()
            if request.called is not None:
                request.called.leave(request)
            if request.answering is not None:
                request.answering.cancel()
                tasks.append(request.answering)
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
        try:
            await self.batch.close()
        finally:
            await self._attachment.aclose()

    # Requests

    def receive(self, frame: str | bytes) -> None:
        """Start to answer a frame."""
        conversation = self.conversation
        if conversation is not None and conversation.draining:
            return  # the requests before it are answered
        received_at = 0.0
        if self.metrics.enabled:
            received_at = perf_counter()
            self.metrics.counts.received_bytes += len(frame) if frame.isascii() else size_of(frame)
        request_id: int | None = None
        single = False
        head: RequestHead
        arrays: list[Array] = []
        try:
            try:
                if type(frame) is str and '"op"' not in frame:  # as `read_frame` finds too, for speed
                    head, parsed = self.links.decoder.numbered_frame(frame)
                else:
                    head, parsed, arrays = wire.read_frame(frame, self.links.decoder, self.links.operations)
                if isinstance(head, wire.ResumeRequest):
                    self._resume(head)
                    return
            except FATAL as error:  # the author's validators may raise anything
                request_id, single = wire.read_request_id(frame)
                self.last_id = max(self.last_id, -1 if request_id is None else request_id)
                raise refusal_of(error) from None
            if head.id <= self.last_id and self.id:
                raise RefusalError(
                    VALIDATION_ERROR,
                    f"expected an id above {self.last_id}, got {head.id}; "
                    "where sessions outlive a connection, ids rise",
                )
            self.last_id = max(self.last_id, head.id)
            if head.read is not None and self.id:
                self.frames.read = head.read
            if isinstance(head, wire.CancelRequest):
                self._cancel(head)
                return
            if len(self.running) >= MAX_REQUESTS:
                request_id, single = head.id, parsed is not None
                text = f"expected at most {MAX_REQUESTS} requests at once; wait for their answers"
                raise RefusalError(EXECUTION_ERROR, text)
        except RefusalError as refusal:
            self.send(self.links.encode_refusal(refusal, request_id, single))
            return
        kind = _LinkClose if type(parsed) is Close else LinkRequest
        request = kind(self, head, parsed, arrays, len(frame), received_at, head.id)
        self.running.add(request)
        self.running_chars += request.size
        if (limit_s := head.deadline_s) is not None:
            text = f"the request had not begun within its deadline of {limit_s:g} s; it was not executed"
            request.timer = asyncio.get_running_loop().call_later(
                limit_s, self._cancel_unstarted, request, RefusalError(NOT_EXECUTED, text)
            )
        if self._blockers and not isinstance(head, wire.OpenRequest):
            self._deferred_requests.append(request)
        else:
            self._start(request)
        if self.running_chars > MAX_RUNNING_CHARS and self.conversation is not None:
            self.conversation.pause()

    def _start(self, request: LinkRequest) -> None:
        head = request.head
        try:
            if isinstance(head, NumberedFrame):
                # `find` raises the refusal of an unknown member.
                member = self.batch.members.get(head.member) or self.batch.find([head.member])[0]
                parsed = request.parsed
                if member.in_batch:
                    raise SessionBusyError(1)
                if type(parsed) is Mcp:
                    self._start_mcp(request, member, parsed)
                    return
                request.called = member.session
                if type(parsed) is Close:
                    EnvironmentCall.__init__(request, _do_nothing, on_loop=True)
                else:
                    request.bind(member.session, parsed, traceparent=head.traceparent)
                member.session.submit(request)
            elif isinstance(head, wire.BatchRequest):
                self._start_batch(request)
            else:
                if isinstance(head, wire.OpenRequest):
                    self._opening_count += head.count
                    self._blockers += 1
                request.answering = keep(asyncio.create_task(self._answer_in_task(request)))
        except RefusalError as refusal:
            request.refuse(refusal)

    def _start_mcp(self, request: LinkRequest, member: Member, parsed: Mcp) -> None:
        request.executing = True
        request.answering = keep(asyncio.create_task(self._answer_mcp(request, member, parsed)))
        # Requests after it may be for the same session, which its task calls once it runs.
        self._blockers += 1
        asyncio.get_running_loop().call_soon(self._unblock)

    async def _answer_mcp(self, request: LinkRequest, member: Member, parsed: Mcp) -> None:
        rpc = self.links.rpc
        request.reply(await answer_mcp(rpc, member.session, parsed, request.size, request.request_id))

    def _start_batch(self, request: LinkRequest) -> None:
        head = request.head
        assert isinstance(head, wire.ResetRequest | wire.StepRequest | wire.StateRequest)
        calls = self.links.batch_dialect.calls(
            head, request.arrays, self.batch.find(head.members), request.size
        )
        request.arrays = []
        self.running_chars -= request.size
        request.size = 0
        min_count = getattr(head, "at_least", None) or len(calls)
        self._blockers += 1
        request.round = BatchRound(calls, min_count, partial(self._answer_batch, request), self._unblock)
        request.round.start()

    def _answer_batch(self, request: LinkRequest, finished: list[MemberCall]) -> None:
        batch_round = request.round
        assert batch_round is not None
        for frame in self.links.batch_dialect.encode_replies(request.head.id, finished, batch_round.is_done):
            self.send(frame)
        if self.metrics.enabled:
            sequential = finished[0].member.session.plan.never_waits
            self.metrics.observe_batch(finished, perf_counter() - request.received_at, sequential)
        if batch_round.is_done:
            request.reply()

    def _unblock(self) -> None:
        """Start the requests that waited for another one, unless there are more of that kind."""
        self._blockers -= 1
        while self._deferred_requests and not self._blockers and not self.closed:
            self._start(self._deferred_requests.popleft())

    async def _answer_in_task(self, request: LinkRequest) -> None:
        head = request.head
        try:
            if isinstance(head, wire.OpenRequest):
                await self._open(head)
            else:
                assert isinstance(head, wire.ForkRequest | wire.SnapshotRequest | wire.CloseRequest)
                request.executing = True
                self.send(wire.encode_reply(head.id, await self._manage_sessions(head)))
        except RefusalError as refusal:
            request.refuse(refusal)
        except asyncio.CancelledError:
            if request.refusal is None or self.closed:
                raise
            request.refuse(request.refusal)
        except Exception:
            logger.exception("a connection ended because of an error in the server")
            request.refuse(RefusalError(SESSION_ERROR, "the server failed; see its log"))
            self.close_connection()
        finally:
            if isinstance(head, wire.OpenRequest):
                self._opening_count -= head.count
                self._unblock()
            request.reply()

    def _resume(self, head: wire.ResumeRequest) -> None:
        """Attach this link's socket to the link that a client resumes."""
        if self.last_id >= 0 or self.conversation is None:
            raise RefusalError(VALIDATION_ERROR, "resume must be the first request of a connection")
        link = self.links.find(self.owner, head)
        conversation, self.conversation = self.conversation, None
        conversation.resume(link, head)

    async def _open(self, head: wire.OpenRequest) -> None:
        if self._session_id is not None:
            if self.batch.opened_count or head.count > 1:
                text = "the address names the one session of this connection; use another connection for more"
                raise RefusalError(VALIDATION_ERROR, text)
            session = await self._attachment.enter_async_context(
                self._sessions.attach(self.owner, self._session_id, self)
            )
            members = self.batch.add([session])
        else:

            async def notify(place: dict[str, Any]) -> None:
                self.send(wire.encode_reply(head.id, {"queue": dumps(place)}, last=False))

            self._check_count(0)
            wait_s = math.inf if head.wait_s is None else head.wait_s
            members = await self.batch.open(head.count, head.snapshot, notify, wait_s)
        fields = {"members": dumps([member.number for member in members])}
        if head.lease_s is not None:
            if not self.id:
                self.links.add(self, min(head.lease_s, MAX_LEASE_S))
            fields |= {
                "session": dumps(self.id),
                "secret": dumps(self.secret),
                "lease_s": dumps(self.lease_s),
            }
        self.send(wire.encode_reply(head.id, fields))

    async def _manage_sessions(
        self, head: wire.ForkRequest | wire.SnapshotRequest | wire.CloseRequest
    ) -> dict[str, bytes]:
        """Fork, snapshot or end sessions; return the encoded fields of the reply."""
        if isinstance(head, wire.CloseRequest):
            members = self.batch.find(head.members) if head.members else []
            await self.batch.end(members, head.snapshots)
            return {}
        (member,) = self.batch.find([head.member])
        if isinstance(head, wire.SnapshotRequest):
            return {"snapshot": dumps(await self.batch.snapshot(member))}
        self._check_count(head.count)
        forks = await self.batch.fork(member, head.count)
        return {"members": dumps([fork.number for fork in forks])}

    def _check_count(self, count: int) -> None:
        if self.live_sessions + self._opening_count + self.batch.forking_count + count > wire.MAX_MEMBERS:
            text = f"expected at most {wire.MAX_MEMBERS} sessions of one connection; open another"
            raise RefusalError(VALIDATION_ERROR, text)

    def _cancel(self, head: wire.CancelRequest) -> None:
        for request in [request for request in self.running if request.head.id == head.request]:
            text = "the request was cancelled before it had begun; it was not executed"
            self._cancel_unstarted(request, RefusalError(NOT_EXECUTED, text))
        self.send(wire.encode_reply(head.id, {}))

    def _cancel_unstarted(self, request: LinkRequest, refusal: RefusalError) -> None:
        """Refuse a request unless its call has started; in a batch, each call that has not."""
        if request.round is not None:
            request.round.cancel(refusal)
        elif request in self._deferred_requests:
            self._deferred_requests.remove(request)
            request.refuse(refusal)
        elif request.called is not None:
            if request.called.withdraw(request):
                request.refuse(refusal)
        elif request.answering is not None and not request.executing and request.refusal is None:
            request.refusal = refusal
            request.answering.cancel()

    def close_connection(self) -> None:
        """Close the connection once what is unsent is sent, and with it this link; if it is broken, at once."""
        if self.conversation is None:
            self._end()
        else:
            self.conversation.finish()


def _do_nothing() -> None:
    """What a request to close does in its turn."""


class Links:
    """Creates conversations, decodes their frames, and registers the links that can be resumed.

    Attributes:
        decoder: Decodes single requests: frames of the released dialect with an id.
        sockets: The set of open conversations.
        sessions: Opens the sessions.
        rpc: Answers JSON-RPC requests.
        batch_dialect: Decodes and encodes batched requests.
        operations: The operations that are served.
        registered: The links that can be resumed, by id.
    """

    def __init__(
        self,
        sockets: Sockets,
        decoder: RequestDecoder[Any],
        rpc: JsonRpc,
        batch_dialect: BatchDialect,
        *,
        production: bool,
    ) -> None:
        self.sockets = sockets
        self.sessions = sockets.sessions
        self.decoder = decoder
        self.rpc = rpc
        self.batch_dialect = batch_dialect
        self.operations = wire.PRODUCTION_OPERATIONS if production else wire.OPERATIONS
        self.registered: dict[str, Link] = {}

    def __call__(
        self, scope: Message, receive: Receive, send: Send, session_id: str | None
    ) -> "LinkConversation":
        """Return the conversation for a new socket, attached to a standing session if `session_id` names one."""
        return LinkConversation(scope, receive, send, self, session_id)

    def encode_refusal(
        self, refusal: RefusalError, request_id: int | None = None, single: bool = False
    ) -> str:
        """Return the error frame of a refusal, and count it; the id is null (0 if `single`) if it could not be read."""
        self.sessions.metrics.count_error(refusal.code)
        if single:
            return encode_error(refusal.code, refusal.message, refusal.extra, request_id or 0)
        frame = wire.encode_reply(request_id, {"error": dumps(refusal_data(refusal))})
        assert isinstance(frame, str)
        return frame

    def add(self, link: Link, lease_s: float) -> None:
        """Register a link, so that it can be resumed."""
        link.id, link.secret, link.lease_s = self.sessions.new_id(), secrets.token_urlsafe(16), lease_s
        self.registered[link.id] = link

    def find(self, owner: str, request: wire.ResumeRequest) -> Link:
        """Return the link that a client resumes.

        Raises:
            RefusalError: It does not exist, has another owner or secret, or lacks the frames; always the same error.
        """
        link = self.registered.get(request.session)
        secret = "" if link is None else link.secret
        authorized = hmac.compare_digest(secret.encode(), request.secret.encode(errors="replace"))
        if (
            link is None
            or not authorized
            or link.owner != owner
            or not link.frames.has_all_after(request.read)
        ):
            text = "no session of yours with this id is open or within its lease; open a new one"
            raise RefusalError(SESSION_ERROR, text)
        return link

    async def close(self) -> None:
        """Close all links without a socket, at shutdown."""
        await asyncio.gather(
            *(link.close() for link in self.registered.values() if link.conversation is None)
        )


class LinkConversation(Conversation):
    """One socket in this dialect, attached to a new link until a resume attaches it to an existing one.

    Attributes:
        awaits_progress: Whether it has to be told of answered requests: it does not read, or is to end.
    """

    subprotocol = wire.SUBPROTOCOL

    def __init__(
        self, scope: Message, receive: Receive, send: Send, links: Links, session_id: str | None
    ) -> None:
        super().__init__(scope, receive, send, links.sockets)
        self._link = Link(links, owner_of(scope), session_id)
        self._link.conversation = self
        self._is_open = False
        self.awaits_progress = False

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return bool(self._link.running) or not self._is_open

    async def _open(self, stack: AsyncExitStack) -> None:
        self._open_timer = asyncio.get_running_loop().call_later(OPEN_TIMEOUT_S, self._close_if_unopened)
        self.connection.on_frame = self._link.receive
        self._is_open = True
        if self.draining:
            self.drain()

    async def _leave(self) -> None:
        self._open_timer.cancel()
        link = self._link
        if link.conversation is self:
            if link.id and self.connection.broken and not self.draining:
                link.lose_connection()
            else:
                await asyncio.shield(keep(asyncio.create_task(link.close())))

    def _encode_error(self, error: BaseException) -> str:
        return self._link.links.encode_refusal(refusal_of(error))

    def on_frame(self, frame: str | bytes) -> None:
        """Answer a frame."""
        self._link.receive(frame)

    def pause(self) -> None:
        """Read no further frame until some of the running requests are answered."""
        self.awaits_progress = True
        self.connection.pause()

    def drain(self) -> None:
        """End the conversation after the running requests."""
        self.awaits_progress = True
        super().drain()

    def update(self) -> None:
        """Go on after a request has ended: read again; end if the server stops."""
        if self._link.running_chars <= MAX_RUNNING_CHARS:
            self.awaits_progress = self.draining
            self.connection.resume()
        if self.draining:
            self.drain()

    def resume(self, link: Link, request: wire.ResumeRequest) -> None:
        """Attach to an existing link, and send the frames that the client has not read."""
        fields = {"taken": dumps(link.last_id), "lease_s": dumps(link.lease_s)}
        self._link = link
        self.connection.on_frame = link.receive
        link.attach(self)
        link.frames.read = request.read
        self.connection.send(wire.encode_reply(request.id, fields))
        for frame in link.frames.unread():
            self.connection.send(frame)
        self.update()

    def _close_if_unopened(self) -> None:
        """Close the socket if its link has opened no session; check again later if it may be opening one."""
        if self._link.running:
            loop = asyncio.get_running_loop()
            self._open_timer = loop.call_later(OPEN_TIMEOUT_S, self._close_if_unopened)
        elif not self._link.batch.opened_count:
            self.end(NORMAL_CLOSURE)

    def finish(self) -> None:
        """Close the socket in order once what is unsent is sent."""
        self.connection.broken = False
        self.end(NORMAL_CLOSURE)
