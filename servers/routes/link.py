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
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, nullcontext
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
from openenv_core.protocol.jsonio import dumps
from openenv_core.protocol.replies import add_id, encode_error
from openenv_core.protocol.requests import Close, Mcp, NumberedFrame, RequestDecoder, RequestHead
from openenv_core.watchdog import Watchdog
from servers.execution import CLOSE_TIMEOUT_S, FATAL, keep, start_eagerly
from servers.metrics import size_of
from servers.routes.batch import BatchDialect, error_data
from servers.routes.http import report_error
from servers.routes.link_request import LinkRequest, read_frame, read_request_id
from servers.routes.sent_frames import SentFrames
from servers.routes.websocket import (
    GOING_AWAY,
    NORMAL_CLOSURE,
    Conversation,
    FrameDialect,
    Message,
    Receive,
    Send,
)
from servers.security import owner_of
from servers.sessions import SessionBusyError, SessionTable, UnknownSessionError
from servers.sessions.batch import BatchRound, Member, SessionBatch
from servers.threads import Outcome

logger = logging.getLogger("servers")

MAX_REQUESTS: Final = 32
"""Requests that one connection may have running at once, including those whose replies wait to be sent."""

MAX_RUNNING_CHARS: Final = 16 * 1024 * 1024
"""Total characters of running requests above which no further request is read until one of them is answered."""

OPEN_TIMEOUT_S: Final = 60.0
"""Seconds within which a new connection must open a session."""

MAX_LEASE_S: Final = 600.0
"""Longest lease: seconds that sessions outlive a broken connection."""


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
        frames: The frames sent, kept until they are sent or, with a lease, until the client has read them.
        running: Requests that have not been answered.
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
        self.conversation: LinkConversation | None = None
        self.closed = False
        self.batch = SessionBatch(links.sessions, owner)
        self._sessions = links.sessions
        self._metrics = links.sessions.metrics
        self._inline = links.sessions.inline
        self._watchdog = Watchdog(None, lambda: None) if self._inline else None
        self._links = links
        self._frame_dialect = links.frame_dialect
        self._session_id = session_id
        self._attachment = AsyncExitStack()
        self._opening_count = 0  # sessions
        self._deferred_requests: deque[LinkRequest] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._progress: asyncio.Future[None] | None = None  # done when a request is answered
        self._turn = asyncio.Lock()  # held by a batch on the event loop, which yields before it ends

    @property
    def live_sessions(self) -> int:
        """Number of sessions that have not ended."""
        return sum(not member.session.ended for member in self.batch.members.values())

    def send(self, frame: str | bytes) -> None:
        """Send a frame."""
        if self._metrics.enabled:  # `count_sent`, inlined for speed
            size_is_length = isinstance(frame, bytes) or frame.isascii()
            self._metrics.counts.sent_bytes += len(frame) if size_is_length else size_of(frame)
        self.frames.count += 1
        socket = self.conversation
        if socket is not None and socket.sending is None and not socket.closed:
            if socket.fast_path is None or not socket.fast_path.send_frame(frame):
                socket.send_remaining(self.frames.count - 1)
            elif not self.id:
                return
        self.frames.keep(frame)

    def attach(self, conversation: "LinkConversation") -> None:
        """Attach a socket, and abort the previous one, whose break may not have been detected yet."""
        if self._timer is not None:
            self._timer.cancel()
        self._set_detach(None)
        previous, self.conversation = self.conversation, conversation
        if previous is not None:
            previous.abort()

    def detach(self) -> None:
        """Detach the broken socket, and wait for another until the lease ends; close if nothing is left to resume."""
        self.conversation = None
        if not self.live_sessions and not self.running:
            self._end()
            return
        self._set_detach(self._close_detached)
        self._timer = asyncio.get_running_loop().call_later(self.lease_s, self._expire)

    def _expire(self) -> None:
        logger.info("a client has not reconnected within its lease; its sessions are ended")
        self._end()

    def _set_detach(self, detach: Callable[[], Awaitable[None]] | None) -> None:
        """Set the callback by which another socket takes over a standing session while this one is broken."""
        if self._session_id is not None:
            for member in self.batch.members.values():
                member.session.detach = detach

    async def _close_detached(self) -> None:
        await asyncio.shield(keep(asyncio.create_task(self.close())))

    def _end(self) -> None:
        self._links.remove(self)  # from now on it cannot be resumed
        keep(asyncio.create_task(self.close()))

    async def close(self) -> None:
        """Cancel running requests and end all sessions."""
        if self.closed:
            return
        self.closed = True
        self._links.remove(self)
        self._set_detach(None)
        if self._timer is not None:
            self._timer.cancel()
        for request in self.running:
            if request.timer is not None:
                request.timer.cancel()
        if tasks := [request.cancel() for request in self.running if request.task or request.reply_coroutine]:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
        self._stop_watching(self.batch.members.values())
        try:
            await self.batch.close()
        finally:
            await self._attachment.aclose()

    async def receive(self, frame: str | bytes) -> None:
        """Start answering a frame; wait only until a refusal has been sent, or an inline batch has been answered."""
        received_at = 0.0
        if self._metrics.enabled:
            received_at = perf_counter()
            self._metrics.count_received(frame)
        request_id: int | None = None
        single = False
        try:
            try:
                head, parsed, arrays = self._links.read(frame)
                if isinstance(head, wire.ResumeRequest):
                    self._resume(head)
                    return
            except RefusalError:
                request_id, single = read_request_id(frame)
                self.last_id = max(self.last_id, -1 if request_id is None else request_id)
                raise
            if head.id <= self.last_id and self.id:
                raise RefusalError(
                    VALIDATION_ERROR,
                    f"expected an id above {self.last_id}, got {head.id}; "
                    "where sessions outlive a connection, ids rise",
                )
            self.last_id = max(self.last_id, head.id)
            if head.read is not None:
                self.frames.discard(head.read)
            if isinstance(head, wire.CancelRequest):
                self._cancel(head)
                return
            if len(self.running) >= MAX_REQUESTS:
                request_id, single = head.id, parsed is not None
                text = f"expected at most {MAX_REQUESTS} requests at once; wait for their answers"
                raise RefusalError(EXECUTION_ERROR, text)
        except RefusalError as refusal:
            self.send(self._links.encode_refusal(refusal, request_id, single))
            await self._wait_sent()
            return
        request = self._add_request(LinkRequest(head, parsed, arrays, frame, received_at))
        if isinstance(head, wire.OpenRequest):
            self._opening_count += head.count
        elif self._opening_count:
            self._deferred_requests.append(request)
            return
        task = self._start(request)
        if self._inline and isinstance(head, wire.MembersRequest):
            # All waits are in its task: if another socket takes over, this one is cancelled and the request goes on.
            await asyncio.wait([task])

    def answer_eagerly(self, frame: str | bytes) -> bool:
        """Start answering a frame directly from the read callback if no request is running; return whether it did.

        A request that does not wait is answered before this returns, one that waits for a thread from the thread's
        completion callback. Others continue in a task.
        """
        socket = self.conversation
        if self.running or socket is None or socket.sending is not None or socket.draining or socket.closed:
            return False
        received_at = perf_counter() if self._metrics.enabled else 0.0
        numbered: NumberedFrame | None = None
        arrays: list[Array] = []
        try:
            if isinstance(frame, str):
                numbered, parsed = self._links.decoder.numbered_frame(frame)
                head: RequestHead = numbered
            else:
                head, parsed, arrays = self._links.read(frame)
                if not isinstance(head, wire.StepRequest):
                    return False
        except FATAL:  # the author's validators may raise anything
            return False  # `receive` decodes it again and refuses it
        if head.id <= self.last_id:
            return False
        self.last_id = head.id
        if head.read is not None:
            self.frames.discard(head.read)
        if received_at:  # `count_received`, inlined for speed
            self._metrics.counts.received_bytes += len(frame) if frame.isascii() else size_of(frame)
        if (
            numbered is not None
            and numbered.traceparent is None
            and not isinstance(parsed, (Mcp, Close))
            and (member := self.batch.members.get(numbered.member)) is not None
            and not (member.session.shared or member.session.ended)
            and (self._inline or member.session.runner.in_thread)
        ):
            self._call_eagerly(member, numbered, parsed, frame, received_at)
            return True
        request = self._add_request(LinkRequest(head, parsed, arrays, frame, received_at))
        socket.busy = True
        coroutine = start_eagerly(self._answer(request)) if parsed is None else None
        if coroutine is not None or parsed is not None:
            self._start(request, coroutine)
        return True

    def _call_eagerly(
        self, member: Member, head: NumberedFrame, parsed: Any, frame: str | bytes, received_at: float
    ) -> None:
        """Call a session while no request is running; if answered at once, it takes no lock and is not registered."""
        session = member.session
        request = resume = None
        if not self._inline:
            request = LinkRequest(head, parsed, [], frame, received_at)
            resume = partial(self._continue, request)
        reply = start_eagerly(
            self._frame_dialect.answer(session, frame, parsed, received_at, inline=True, resume=resume)
        )
        if isinstance(reply, str):
            self.send(add_id(head.id, reply))
            return
        # It waits for its thread, or the environment waits although it promises not to.
        request = request or LinkRequest(head, parsed, [], frame, received_at)
        request.reply_coroutine, request.executing, request.member = reply, True, member
        self.running.add(request)
        if self.conversation is not None:
            self.conversation.busy = True
        if resume is None:
            self._start(request)
        elif session.watchdog is not None and session.on_expiry is not None:
            session.watchdog.expect(self._sessions.step_timeout_s, session.on_expiry)

    def _add_request(self, request: LinkRequest) -> LinkRequest:
        """Register a running request and start the timer of its deadline, if any."""
        for other in self.running:
            other.take_lock()
        self.running.add(request)
        if (limit_s := request.head.deadline_s) is not None:
            text = f"the request had not begun within its deadline of {limit_s:g} s; it was not executed"
            refusal = RefusalError(NOT_EXECUTED, text)
            request.timer = asyncio.get_running_loop().call_later(
                limit_s, self._cancel_unstarted, request, refusal
            )
        return request

    def _continue(self, request: LinkRequest, _: Outcome) -> None:
        """Continue a request whose call in a thread has ended."""
        if request.task is not None:
            return  # it is being cancelled
        assert request.reply_coroutine is not None
        reply = start_eagerly(request.reply_coroutine)
        if isinstance(reply, str):
            request.release_member()
            self.send(add_id(request.head.id, reply))
            self._remove_request(request)
        else:  # the method returned an awaitable
            self._start(request)

    def _resume(self, head: wire.ResumeRequest) -> None:
        """Attach this link's socket to the link that a client resumes."""
        if self.last_id >= 0 or self.conversation is None:
            raise RefusalError(VALIDATION_ERROR, "resume must be the first request of a connection")
        link = self._links.find(self.owner, head)
        conversation, self.conversation = self.conversation, None
        conversation.resume(link, head)

    def _start(
        self, request: LinkRequest, coroutine: Coroutine[Any, Any, None] | None = None
    ) -> asyncio.Task[None]:
        """Answer a request in a task; `coroutine` continues an answer that has already started."""
        request.task = task = keep(asyncio.create_task(coroutine or self._answer(request)))
        return task

    async def _answer(self, request: LinkRequest) -> None:
        """Answer a request of any kind, and remove it from the running ones."""
        head = request.head
        request.started = True
        try:
            if request.refusal is not None:
                raise request.refusal
            if isinstance(head, wire.OpenRequest):
                await self._open(head)
            elif isinstance(head, wire.BatchRequest):
                async with self._turn if self._inline else nullcontext():
                    await self._call_batch(request)
            else:
                async with self._turn:
                    pass  # the batches before it have ended
                if request.parsed is not None:
                    await self._call_member(request)
                else:
                    assert isinstance(head, wire.ForkRequest | wire.SnapshotRequest | wire.CloseRequest)
                    request.executing = True
                    answer = {"id": dumps(head.id), **await self._manage_sessions(head), "last": b"true"}
                    self.send(wire.encode_frame(answer, []))
        except RefusalError as refusal:
            self._refuse(request, refusal)
        except asyncio.CancelledError:
            if (request.refusal is None and not request.expired) or self.closed:
                raise
            if request.refusal is not None:
                self._refuse(request, request.refusal)
        except Exception:
            logger.exception("a connection ended because of an error in the server")
            self._refuse(request, RefusalError(SESSION_ERROR, "the server failed; see its log"))
            self._close_connection()
        finally:
            if request.timer is not None:
                request.timer.cancel()
            if isinstance(head, wire.OpenRequest):
                self._opening_count -= head.count
                while self._deferred_requests and not self._opening_count and not self.closed:
                    self._start(self._deferred_requests.popleft())
            try:
                await self._wait_sent()
            finally:
                self._remove_request(request)

    def _remove_request(self, request: LinkRequest) -> None:
        """Remove an answered request, and wake the callers of `wait_progress`."""
        self.running.discard(request)
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)
        if self.conversation is not None:
            self.conversation.set_busy(bool(self.running))

    def _refuse(self, request: LinkRequest, refusal: RefusalError) -> None:
        if not request.expired:
            self.send(self._links.encode_refusal(refusal, request.head.id, request.parsed is not None))

    async def _call_member(self, request: LinkRequest) -> None:
        head = request.head
        assert isinstance(head, NumberedFrame)
        if request.member is None:
            # `find` raises the refusal of an unknown member.
            member = self.batch.members.get(head.member) or self.batch.find([head.member])[0]
            member.waiting += 1
            try:
                await member.lock.acquire()
            finally:
                member.waiting -= 1
            request.member, request.has_lock = member, True
        member, timer = request.member, None
        try:
            if member.busy:
                raise SessionBusyError(1)
            request.executing = True
            limit_s = self._sessions.step_timeout_s
            if self._inline and limit_s is not None:  # the environment may wait although it promises not to
                timer = asyncio.get_running_loop().call_later(limit_s, self._expire_call, member)
            arguments = request.frame, request.parsed, request.received_at, head.traceparent
            reply = await (
                self._frame_dialect.answer(member.session, *arguments)
                if request.reply_coroutine is None
                else asyncio.create_task(request.reply_coroutine)
            )
        finally:
            request.release_member()
            if timer is not None:
                timer.cancel()
        if reply is None:
            self._close_connection()
        elif not request.expired:
            self.send(add_id(head.id, reply))

    async def _call_batch(self, request: LinkRequest) -> None:
        head, batches = request.head, self._links.batch_dialect
        assert isinstance(head, wire.ResetRequest | wire.StepRequest | wire.StateRequest)
        calls = batches.calls(head, request.arrays, self.batch.find(head.members), len(request.frame))
        request.arrays, request.frame = [], ""
        min_count = getattr(head, "at_least", None) or len(calls)
        request.round = batch_round = BatchRound(self._sessions, calls)
        request.executing = True
        try:
            await batch_round.start()
            while not batch_round.is_done:
                finished = await batch_round.wait_finished(min_count)
                for frame in batches.encode_replies(head.id, finished, batch_round.is_done):
                    self.send(frame)
                    await self._wait_sent()
                if self._metrics.enabled:
                    self._metrics.observe_batch(finished, perf_counter() - request.received_at, self._inline)
        finally:
            batch_round.close()

    async def _open(self, head: wire.OpenRequest) -> None:
        if self._session_id is not None:
            if self.batch.opened_count or head.count > 1:
                text = "the address names the one session of this connection; use another connection for more"
                raise RefusalError(VALIDATION_ERROR, text)
            session = await self._attachment.enter_async_context(
                self._sessions.attach(self.owner, self._session_id)
            )
            members = self.batch.add([session])
        else:

            async def notify(place: dict[str, Any]) -> None:
                fields = {"id": dumps(head.id), "queue": dumps(place), "last": b"false"}
                self.send(wire.encode_frame(fields, []))

            self._check_count(0)
            wait_s = math.inf if head.wait_s is None else head.wait_s
            members = self._watch_members(await self.batch.open(head.count, head.snapshot, notify, wait_s))
        fields = {"id": dumps(head.id), "members": dumps([member.number for member in members])}
        if head.lease_s is not None:
            if not self.id:
                self._links.add(self, min(head.lease_s, MAX_LEASE_S))
            fields |= {
                "session": dumps(self.id),
                "secret": dumps(self.secret),
                "lease_s": dumps(self.lease_s),
            }
        self.send(wire.encode_frame({**fields, "last": b"true"}, []))

    async def _manage_sessions(
        self, head: wire.ForkRequest | wire.SnapshotRequest | wire.CloseRequest
    ) -> dict[str, bytes]:
        """Fork, snapshot or end sessions; return the encoded fields of the reply."""
        if isinstance(head, wire.CloseRequest):
            members = self.batch.find(head.members) if head.members else []
            await self.batch.end(members, head.snapshots)
            self._stop_watching(members)
            return {}
        (member,) = self.batch.find([head.member])
        if isinstance(head, wire.SnapshotRequest):
            return {"snapshot": dumps(await self.batch.snapshot(member))}
        self._check_count(head.count)
        forks = self._watch_members(await self.batch.fork(member, head.count))
        return {"members": dumps([fork.number for fork in forks])}

    def _watch_members(self, members: list[Member]) -> list[Member]:
        """Use a watchdog in place of a session's lock, as it has one caller; not if coroutines may ignore deadlines."""
        for member in members:
            session = member.session
            if self._inline:
                session.watchdog = self._watchdog
            elif session.runner.in_thread:
                session.watchdog = Watchdog(self._sessions.step_timeout_s, lambda: None)
                session.on_expiry = partial(self._expire_call, member)
        return members

    def _stop_watching(self, members: Iterable[Member]) -> None:
        for member in members:
            if member.session.watchdog is not None:
                member.session.watchdog.close()

    def _expire_call(self, member: Member) -> None:
        """End a session whose call exceeded its deadline; refuse that request and those queued behind it."""
        refusal = self._sessions.expire(member.session)
        refusal_of_others = UnknownSessionError(f"member {member.number}, which has ended")
        for request in list(self.running):
            if isinstance(request.head, NumberedFrame) and request.head.member == member.number:
                self._cancel_unstarted(request, refusal_of_others)
            if request.member is member:
                request.take_lock()
                self._refuse(request, refusal)
                request.expired = True
                task = request.cancel()
                task.add_done_callback(lambda _: self._sessions.drop(member.session))
                self._remove_request(request)  # it is answered, even if its task ignores the cancellation

    def _check_count(self, count: int) -> None:
        if self.live_sessions + self._opening_count + self.batch.forking_count + count > wire.MAX_MEMBERS:
            text = f"expected at most {wire.MAX_MEMBERS} sessions of one connection; open another"
            raise RefusalError(VALIDATION_ERROR, text)

    def _cancel(self, head: wire.CancelRequest) -> None:
        for request in [request for request in self.running if request.head.id == head.request]:
            text = "the request was cancelled before it had begun; it was not executed"
            self._cancel_unstarted(request, RefusalError(NOT_EXECUTED, text))
        self.send(wire.encode_frame({"id": dumps(head.id), "last": b"true"}, []))

    def _cancel_unstarted(self, request: LinkRequest, refusal: RefusalError) -> None:
        """Refuse a request unless its call has started; in a batch, each call that has not."""
        if request.round is not None:
            request.round.cancel(refusal)
        elif not request.executing and request.refusal is None:
            request.refusal = refusal
            if request in self._deferred_requests:
                self._deferred_requests.remove(request)
                self._start(request)
            elif request.started and request.task is not None:
                request.task.cancel()

    def _close_connection(self) -> None:
        """Close the connection once pending frames are sent, and with it this link; if it is broken, at once."""
        if self.conversation is None:
            self._end()
        else:
            self.conversation.finish()

    async def wait_progress(self) -> None:
        """Wait until a running request is answered."""
        if self._progress is None or self._progress.done():
            self._progress = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._progress])

    async def _wait_sent(self) -> None:
        """Wait until all pending frames are sent, if a socket is attached."""
        if self.conversation is not None and (sending := self.conversation.sending) is not None:
            await asyncio.sleep(0)  # the first wait, as `start_eagerly` requires
            await asyncio.wait([sending])


class Links:
    """Creates conversations, decodes their frames, and registers the links that can be resumed.

    Attributes:
        decoder: Decodes single requests: frames of the released dialect with an id.
        frame_dialect: Answers single requests.
        batch_dialect: Decodes and encodes batched requests.
        registered: The links that can be resumed, by id.
    """

    def __init__(
        self,
        sessions: SessionTable,
        decoder: RequestDecoder[Any],
        frame_dialect: FrameDialect,
        batch_dialect: BatchDialect,
        *,
        production: bool,
        send_timeout_s: float,
    ) -> None:
        self.sessions = sessions
        self.decoder = decoder
        self.frame_dialect = frame_dialect
        self.batch_dialect = batch_dialect
        self._operations = wire.PRODUCTION_OPERATIONS if production else wire.OPERATIONS
        self._send_timeout_s = send_timeout_s
        self.registered: dict[str, Link] = {}

    def __call__(
        self, scope: Message, receive: Receive, send: Send, session_id: str | None
    ) -> "LinkConversation":
        """Return the conversation for a new socket, attached to a standing session if `session_id` names one."""
        link = Link(self, owner_of(scope), session_id)
        return LinkConversation(link, scope, receive, send, self.sessions, self, self._send_timeout_s)

    def read(self, frame: str | bytes) -> tuple[RequestHead, Any, list[Array]]:
        """Decode a request as `read_frame` does.

        Raises:
            RefusalError: The frame is not a valid request.
        """
        try:
            return read_frame(frame, self.decoder, self._operations)
        except RefusalError:
            raise
        except FATAL as error:  # the author's validators may raise anything
            raise RefusalError(EXECUTION_ERROR, report_error(error)) from None

    def encode_refusal(
        self, refusal: RefusalError, request_id: int | None = None, single: bool = False
    ) -> str:
        """Return the error frame of a refusal, and count it; the id is null (0 if `single`) if it could not be read."""
        self.sessions.metrics.count_error(refusal.code)
        if single:
            return add_id(request_id or 0, encode_error(refusal.code, refusal.message, refusal.extra))
        frame = wire.encode_frame(
            {"id": dumps(request_id), "error": dumps(error_data(refusal)), "last": b"true"}, []
        )
        assert isinstance(frame, str)
        return frame

    def add(self, link: Link, lease_s: float) -> None:
        """Register a link, so that it can be resumed."""
        link.id, link.secret, link.lease_s = self.sessions.new_id(), secrets.token_urlsafe(16), lease_s
        self.registered[link.id] = link

    def remove(self, link: Link) -> None:
        """Unregister a link, if it is registered."""
        self.registered.pop(link.id, None)

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
        sending: The task that sends the frames that could not be sent at once.
    """

    accept: Message = {"type": "websocket.accept", "subprotocol": wire.SUBPROTOCOL}  # noqa: RUF012 - never modified

    def __init__(self, link: Link, *args: Any) -> None:
        super().__init__(*args)
        link.conversation = self
        self._link = link
        self.sending: asyncio.Task[None] | None = None

    async def _answer_requests(self, session: None) -> int:
        self._set_frame_handler()
        self._start_open_timer()
        try:
            while not self.draining:
                self.busy = bool(self._link.running)
                while (
                    self.busy
                    and sum(len(request.frame) for request in self._link.running) > MAX_RUNNING_CHARS
                ):
                    await self._link.wait_progress()
                frame = await self._next_frame()
                self.busy = True
                await self._link.receive(frame)
            while self._link.running:
                await self._link.wait_progress()
            return GOING_AWAY
        finally:
            self._open_timer.cancel()
            if self.sending is not None and self.closed:
                self.sending.cancel()
            link = self._link
            if link.conversation is self:
                if link.id and self.broken and not self.draining:
                    link.detach()
                else:
                    await asyncio.shield(keep(asyncio.create_task(link.close())))

    def _set_frame_handler(self) -> None:
        if self.fast_path is not None:
            self.fast_path.on_frame = self._link.answer_eagerly

    def resume(self, link: Link, request: wire.ResumeRequest) -> None:
        """Attach to an existing link, and send the frames that the client has not read."""
        fields = {"id": request.id, "taken": link.last_id, "lease_s": link.lease_s, "last": True}
        self._link = link
        link.attach(self)
        link.frames.discard(request.read)
        self._set_frame_handler()
        self.send_remaining(request.read, dumps(fields).decode())

    def _start_open_timer(self) -> None:
        self._open_timer = asyncio.get_running_loop().call_later(OPEN_TIMEOUT_S, self._close_if_unopened)

    def _close_if_unopened(self) -> None:
        """Close the socket if its link has opened no session; check again later if it may be opening one."""
        if self._link.running:
            self._start_open_timer()
        elif not self._link.batch.opened_count:
            self.end(NORMAL_CLOSURE)

    def abort(self) -> None:
        """Drop the connection at once: another socket has replaced it."""
        self.closed = True
        if self._abort is not None:
            self._abort()
        self._interrupt()

    def finish(self) -> None:
        """Close the socket in order once pending frames are sent."""
        self.broken = False
        self.end(NORMAL_CLOSURE)

    def set_busy(self, busy: bool) -> None:
        """Set whether requests are running, and continue draining."""
        self.busy = busy
        if self.draining:
            self.drain()

    def send_remaining(self, sent_count: int, preamble: str | None = None) -> None:
        """Send all frames after the first `sent_count`, as `_send_remaining` does."""
        self.sending = keep(asyncio.create_task(self._send_remaining(sent_count, preamble)))

    async def _send_remaining(self, sent_count: int, preamble: str | None = None) -> None:
        """Send all frames after the first `sent_count`; before them `preamble`, which is not counted as a frame."""
        link = self._link
        try:
            while not self.closed and (preamble is not None or sent_count < link.frames.count):
                frame = link.frames.get(sent_count) if preamble is None else preamble
                if frame is None:
                    self._drop_client()  # it reads so slowly that its next frame is no longer retained
                    return
                self._watchdog.expect(self._send_timeout_s, self._drop_client)
                await self._send(
                    {"type": "websocket.send", "text" if isinstance(frame, str) else "bytes": frame}
                )
                self._watchdog.stop()
                if preamble is not None:
                    preamble = None
                    continue
                sent_count += 1
                if not link.id:
                    link.frames.discard(sent_count)
        except OSError:
            pass  # the reading side learns of the end too, and whether it was in order
        finally:
            self.sending = None

    async def _close(self, code: int, last_frame: str | None) -> None:
        if self.sending is not None:
            await asyncio.wait([self.sending])
        await super()._close(code, last_frame)
