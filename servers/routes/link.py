"""/ws in the dialect `ropewalk.v1`: requests with ids, whose sessions and answers outlive a connection that breaks.

A `Link` is what a client has here: its sessions, the requests under way, the answers that it may not have read. A
`LinkConversation` is the socket that speaks for one, until it breaks and another does. docs/protocol.md says how.
"""

import asyncio
import hmac
import logging
import math
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
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
from servers.execution import CLOSE_TIMEOUT_S, FATAL, begin_here, keep
from servers.metrics import size_of
from servers.routes.batch import BatchDialect, data_of
from servers.routes.http import reported
from servers.routes.link_request import LinkRequest, id_in, read_frame
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
"""Requests of one connection under way at once, those whose answers wait to be sent among them."""

MAX_HELD: Final = 16 * 1024 * 1024
"""Characters of requests under way above which no further one is read until one of them is answered."""

UNOPENED_S: Final = 60.0
"""Seconds that a connection may be without sessions from its beginning."""

MAX_LEASE_S: Final = 600.0
"""Seconds that a connection may be gone before its sessions end."""

MAX_KEPT_BYTES: Final = 64 * 1024 * 1024
MAX_KEPT_FRAMES: Final = 2048
"""What is kept of answers for a client that breaks off and comes back."""


class Link:
    """What one client has here.

    Args:
        links: Where it is found by who resumes it.
        owner: Whose they are.
        standing: A session that stands by itself, which is to be its only one.

    Attributes:
        id: By what it is found; empty where it does not outlive its connection.
        secret: What has to be known beside that.
        lease_s: Seconds that it outlives its connection.
        taken: The highest id of a request that has come.
        count: Frames written, those forgotten among them.
        running: Requests under way.
        conversation: The socket that speaks for it, while there is one.
        over: It has ended.
    """

    def __init__(self, links: "Links", owner: str, standing: str | None = None) -> None:
        self.owner = owner
        self.id = self.secret = ""
        self.lease_s = 0.0
        self.taken = -1
        self.count = 0
        self.running: set[LinkRequest] = set()
        self.conversation: LinkConversation | None = None
        self.over = False
        self.batch = SessionBatch(links.sessions, owner)
        self._sessions = links.sessions
        self._metrics = links.sessions.metrics
        self._inline = links.sessions.inline
        self._alone = Watchdog(None, lambda: None) if self._inline else None
        self._links = links
        self._standing = standing
        self._attached = AsyncExitStack()
        self._kept: deque[str | bytes] = deque()
        self._kept_bytes = 0
        self._opening = 0  # sessions
        self._deferred: deque[LinkRequest] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._progress: asyncio.Future[None] | None = None  # awaited by who waits for an answer

    @property
    def living(self) -> int:
        """Its sessions that have not ended."""
        return sum(not member.session.over for member in self.batch.members.values())

    # Frames to the client

    def put(self, frame: str | bytes) -> None:
        """Have a frame sent; keep it until it has been, or is read where a client may come back for it."""
        if self._metrics.enabled:  # `count_sent`, without its call
            whole = isinstance(frame, bytes) or frame.isascii()
            self._metrics.counts.sent += len(frame) if whole else size_of(frame)
        self.count += 1
        socket = self.conversation
        if socket is not None and socket.send_now(frame) and not self.id:
            return
        kept = self._kept
        kept.append(frame)
        self._kept_bytes += len(frame)
        while len(kept) > 1 and (self._kept_bytes > MAX_KEPT_BYTES or len(kept) > MAX_KEPT_FRAMES):
            self._kept_bytes -= len(kept.popleft())

    def frame(self, number: int) -> str | bytes | None:
        """Return the frame behind so many; None where it is kept no more."""
        at = number - self.count + len(self._kept)
        return self._kept[at] if at >= 0 else None

    def forget(self, read: int) -> None:
        """Keep no frames of these first ones."""
        kept = self._kept
        while kept and self.count - len(kept) < read:
            self._kept_bytes -= len(kept.popleft())

    # Coming and going

    def may_resume(self, read: int) -> bool:
        """Whether everything behind so many frames is kept."""
        return self.count - len(self._kept) <= read <= self.count

    def attach(self, conversation: "LinkConversation") -> None:
        """Let a socket speak for it, in the place of one that may not know yet that it is broken."""
        if self._timer is not None:
            self._timer.cancel()
        self._let_go(None)
        former, self.conversation = self.conversation, conversation
        if former is not None:
            former.drop()

    def detach(self) -> None:
        """Wait for another socket, as long as the lease is, and as long as anything is left to resume."""
        self.conversation = None
        if not self.living and not self.running:
            self._end()
            return
        self._let_go(self._given_up)
        self._timer = asyncio.get_running_loop().call_later(self.lease_s, self._expire)

    def _expire(self) -> None:
        logger.info("a client that broke off has not come back; its sessions are ended")
        self._end()

    def _let_go(self, how: Callable[[], Awaitable[None]] | None) -> None:
        """Tell a session that stands by itself how another socket comes in while this one is broken."""
        if self._standing is not None:
            for member in self.batch.members.values():
                member.session.let_go = how

    async def _given_up(self) -> None:
        await asyncio.shield(keep(asyncio.create_task(self.close())))

    def _end(self) -> None:
        self._links.remove(self)  # nobody is to resume what is about to end
        keep(asyncio.create_task(self.close()))

    async def close(self) -> None:
        """End its sessions, whatever is under way."""
        if self.over:
            return
        self.over = True
        self._links.remove(self)
        self._let_go(None)
        if self._timer is not None:
            self._timer.cancel()
        for request in self.running:
            if request.timer is not None:
                request.timer.cancel()
        if tasks := [request.cancel() for request in self.running if request.task or request.answering]:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
        self._stop_watching(self.batch.members.values())
        try:
            await self.batch.close()
        finally:
            await self._attached.aclose()

    # Requests

    async def take(self, frame: str | bytes) -> None:
        """Begin to answer a frame. What it waits for is that its client has read enough."""
        began = 0.0
        if self._metrics.enabled:
            began = perf_counter()
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
                request_id, single = id_in(frame)
                self.taken = max(self.taken, -1 if request_id is None else request_id)
                raise
            if head.id <= self.taken and self.id:
                raise RefusalError(
                    VALIDATION_ERROR,
                    f"expected an id above {self.taken}, got {head.id}; where sessions outlive a connection, ids rise",
                )
            self.taken = max(self.taken, head.id)
            if head.read is not None:
                self.forget(head.read)
            if isinstance(head, wire.CancelRequest):
                self._cancel(head)
                return
            if len(self.running) >= MAX_REQUESTS:
                request_id, single = head.id, parsed is not None
                text = f"expected at most {MAX_REQUESTS} requests at once; wait for their answers"
                raise RefusalError(EXECUTION_ERROR, text)
        except RefusalError as refusal:
            self.put(self._links.refusal(refusal, request_id, single))
            await self._flushed()
            return
        request = self._enter(LinkRequest(head, parsed, arrays, frame, began))
        if isinstance(head, wire.OpenRequest):
            self._opening += head.count
        elif self._opening:
            self._deferred.append(request)
            return
        if self._inline and isinstance(head, wire.MembersRequest):
            before = [
                other.task for other in self.running if other.round is not None and other.task is not None
            ]
            if before:  # begun by `answer_here`
                await asyncio.wait(before)
            await asyncio.wait([self._begin(request)])
        else:
            self._begin(request)

    def answer_here(self, frame: str | bytes) -> bool:
        """Begin to answer a request where it has been read, if nothing else is under way; return whether it is taken.

        What waits for nothing is answered then, and what waits for a thread as soon as that has ended; for the rest
        there is a task.
        """
        socket = self.conversation
        if self.running or socket is None or socket.sending is not None or socket.leaving or socket.over:
            return False
        began = perf_counter() if self._metrics.enabled else 0.0
        head: RequestHead
        arrays: list[Array] = []
        try:
            if isinstance(frame, str):
                head, asked = self._links.decoder.numbered_frame(frame)
            else:
                head, asked, arrays = self._links.read(frame)
                if not isinstance(head, wire.StepRequest):
                    return False
        except FATAL:  # a validator of the author's may raise anything
            return False  # it is read again, and refused, in its turn
        if head.id <= self.taken:
            return False
        self.taken = head.id
        if head.read is not None:
            self.forget(head.read)
        if began:  # `count_received`, without its call
            self._metrics.counts.received += len(frame) if frame.isascii() else size_of(frame)
        if (
            isinstance(head, NumberedFrame)
            and head.traceparent is None
            and not isinstance(asked, (Mcp, Close))
            and (member := self.batch.members.get(head.member)) is not None
            and not (member.session.shared or member.session.over)
            and (self._inline or member.session.runner.in_thread)
        ):
            self._ask_here(member, head, asked, frame, began)
            return True
        request = self._enter(LinkRequest(head, asked, arrays, frame, began))
        socket.busy = True
        rest = begin_here(self._answer(request)) if asked is None else None
        if rest is not None or asked is not None:
            self._begin(request, rest)
        return True

    def _ask_here(
        self, member: Member, head: NumberedFrame, asked: Any, frame: str | bytes, began: float
    ) -> None:
        """Ask a session where nothing else is under way; what is answered at once takes no turn and is no request."""
        request: LinkRequest | None = None
        resume = None
        if not self._inline:
            request = LinkRequest(head, asked, [], frame, began)
            resume = partial(self._go_on, request)
        reply = begin_here(
            self._links.single.answer(member.session, frame, asked, began, here=True, resume=resume)
        )
        if isinstance(reply, str):
            self.put(add_id(head.id, reply))
            return
        # It waits for its thread; or the environment promises not to wait, and does so all the same.
        request = request or LinkRequest(head, asked, [], frame, began)
        request.answering, request.begun, request.asks = reply, True, member
        begin_here(member.turn.acquire())  # it is free
        self.running.add(request)
        if self.conversation is not None:
            self.conversation.busy = True
        if resume is None:
            self._begin(request)
        elif (watch := member.session.watch) is not None and member.session.on_expiry is not None:
            watch.expect(self._sessions.step_timeout_s, member.session.on_expiry)

    def _enter(self, request: LinkRequest) -> LinkRequest:
        """Note that a request is under way."""
        self.running.add(request)
        if (limit_s := request.head.deadline_s) is not None:
            text = f"the request had not begun within its deadline of {limit_s:g} s; it was not executed"
            refusal = RefusalError(NOT_EXECUTED, text)
            request.timer = asyncio.get_running_loop().call_later(limit_s, self._give_up, request, refusal)
        return request

    def _go_on(self, request: LinkRequest, _: Outcome) -> None:
        """Go on with a request whose call has ended in its thread."""
        if request.task is not None:
            return  # it is being cancelled
        assert request.answering is not None
        reply = begin_here(request.answering)
        if isinstance(reply, str):
            request.end_turn()
            self.put(add_id(request.head.id, reply))
            self._leave(request)
        else:  # the method has returned what is to be awaited
            self._begin(request)

    def _resume(self, head: wire.ResumeRequest) -> None:
        """Hand the socket over to the link that it is to speak for."""
        if self.taken >= 0 or self.conversation is None:
            raise RefusalError(VALIDATION_ERROR, "expected resume as the first request of a connection")
        link = self._links.find(self.owner, head)
        conversation, self.conversation = self.conversation, None
        conversation.resume(link, head)

    def _begin(
        self, request: LinkRequest, rest: Coroutine[Any, Any, None] | None = None
    ) -> asyncio.Task[None]:
        """Answer a request in a task, or go there with the rest of its answer."""
        request.task = task = keep(asyncio.create_task(rest or self._answer(request)))
        return task

    async def _answer(self, request: LinkRequest) -> None:
        """Answer a request, whatever it is about, and note that it is answered."""
        head = request.head
        request.started = True
        try:
            if request.refusal is not None:
                raise request.refusal
            if request.parsed is not None:
                await self._ask_one(request)
            elif isinstance(head, wire.OpenRequest):
                await self._open(head)
            elif isinstance(head, wire.ForkRequest | wire.SnapshotRequest | wire.CloseRequest):
                request.begun = True
                answer = {"id": dumps(head.id), **await self._manage(head), "last": b"true"}
                self.put(wire.encode_frame(answer, []))
            else:
                await self._ask_many(request)
        except RefusalError as refusal:
            self._refuse(request, refusal)
        except asyncio.CancelledError:
            if (request.refusal is None and not request.expired) or self.over:
                raise
            if request.refusal is not None:
                self._refuse(request, request.refusal)
        except Exception:
            logger.exception("a connection ended by a fault of the server")
            self._refuse(request, RefusalError(SESSION_ERROR, "the server failed; its log tells why"))
            self._finish()
        finally:
            if request.timer is not None:
                request.timer.cancel()
            if isinstance(head, wire.OpenRequest):
                self._opening -= head.count
                while self._deferred and not self._opening and not self.over:
                    self._begin(self._deferred.popleft())
            try:
                await self._flushed()
            finally:
                self._leave(request)

    def _leave(self, request: LinkRequest) -> None:
        """Note that a request is answered."""
        self.running.discard(request)
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)
        if self.conversation is not None:
            self.conversation.note(bool(self.running))

    def _refuse(self, request: LinkRequest, refusal: RefusalError) -> None:
        if not request.expired:
            self.put(self._links.refusal(refusal, request.head.id, request.parsed is not None))

    async def _ask_one(self, request: LinkRequest) -> None:
        head = request.head
        assert isinstance(head, NumberedFrame)
        if request.asks is None:
            member = (
                self.batch.members.get(head.member) or self.batch.find([head.member])[0]
            )  # which tells why not
            await member.turn.acquire()
            request.asks = member
        member, timer = request.asks, None
        try:
            if member.busy:
                raise SessionBusyError(1)
            request.begun = True
            limit_s = self._sessions.step_timeout_s
            if self._inline and limit_s is not None:  # it promises not to wait, and may all the same
                timer = asyncio.get_running_loop().call_later(limit_s, self._expire_call, member)
            asked = request.frame, request.parsed, request.came, head.traceparent
            reply = await (
                self._links.single.answer(member.session, *asked)
                if request.answering is None
                else asyncio.create_task(request.answering)
            )
        finally:
            request.end_turn()
            if timer is not None:
                timer.cancel()
        if reply is None:
            self._finish()
        elif not request.expired:
            self.put(add_id(head.id, reply))

    async def _ask_many(self, request: LinkRequest) -> None:
        head, batches = request.head, self._links.batches
        assert isinstance(head, wire.ResetRequest | wire.StepRequest | wire.StateRequest)
        calls = batches.calls(head, request.arrays, self.batch.find(head.members), len(request.frame))
        request.arrays, request.frame = [], ""
        at_least = getattr(head, "at_least", None) or len(calls)
        request.round = asked = BatchRound(self._sessions, calls)
        request.begun = True
        try:
            await asked.start()
            while not asked.over:
                finished = await asked.next(at_least)
                for frame in batches.answers(head.id, finished, asked.over):
                    self.put(frame)
                    await self._flushed()
                if self._metrics.enabled:
                    self._metrics.observe_batch(finished, perf_counter() - request.came, self._inline)
        finally:
            asked.close()

    async def _open(self, head: wire.OpenRequest) -> None:
        if self._standing is not None:
            if self.batch.opened or head.count > 1:
                text = "expected to open one session, that which the address names; use another connection for more"
                raise RefusalError(VALIDATION_ERROR, text)
            session = await self._attached.enter_async_context(
                self._sessions.attach(self.owner, self._standing)
            )
            members = self.batch.hold([session])
        else:

            async def tell(place: dict[str, Any]) -> None:
                told = {"id": dumps(head.id), "queue": dumps(place), "last": b"false"}
                self.put(wire.encode_frame(told, []))

            self._check_count(0)
            wait_s = math.inf if head.wait_s is None else head.wait_s
            members = self._hold(await self.batch.open(head.count, head.snapshot, tell, wait_s))
        told = {"id": dumps(head.id), "members": dumps([member.number for member in members])}
        if head.lease_s is not None:
            if not self.id:
                self._links.add(self, min(head.lease_s, MAX_LEASE_S))
            told |= {"session": dumps(self.id), "secret": dumps(self.secret), "lease_s": dumps(self.lease_s)}
        self.put(wire.encode_frame({**told, "last": b"true"}, []))

    async def _manage(
        self, head: wire.ForkRequest | wire.SnapshotRequest | wire.CloseRequest
    ) -> dict[str, bytes]:
        """Fork, keep or end sessions; return what is told of it."""
        if isinstance(head, wire.CloseRequest):
            members = self.batch.find(head.members) if head.members else []
            await self.batch.end(members, head.snapshots)
            self._stop_watching(members)
            return {}
        (member,) = self.batch.find([head.member])
        if isinstance(head, wire.SnapshotRequest):
            return {"snapshot": dumps(await self.batch.snapshot(member))}
        self._check_count(head.count)
        forks = self._hold(await self.batch.fork(member, head.count))
        return {"members": dumps([fork.number for fork in forks])}

    def _hold(self, members: list[Member]) -> list[Member]:
        """Have sessions take no turns, since nobody else asks them; a coroutine may not heed its deadline otherwise."""
        for member in members:
            session = member.session
            if self._inline:
                session.watch = self._alone
            elif session.runner.in_thread:
                session.watch = Watchdog(self._sessions.step_timeout_s, lambda: None)
                session.on_expiry = partial(self._expire_call, member)
        return members

    def _stop_watching(self, members: Iterable[Member]) -> None:
        for member in members:
            if member.session.watch is not None:
                member.session.watch.close()

    def _expire_call(self, member: Member) -> None:
        """End a session whose environment takes too long, and answer the request with that, and those behind it."""
        refusal = self._sessions.expire(member.session)
        gone = UnknownSessionError(f"member {member.number}, which has ended")
        for request in list(self.running):
            if isinstance(request.head, NumberedFrame) and request.head.member == member.number:
                self._give_up(request, gone)  # if it has not begun
            if request.asks is member:
                self._refuse(request, refusal)
                request.expired = True
                task = request.cancel()
                task.add_done_callback(lambda _: self._sessions.drop(member.session))
                self._leave(request)  # it may not heed that, and is answered

    def _check_count(self, more: int) -> None:
        if self.living + self._opening + self.batch.forking + more > wire.MAX_MEMBERS:
            raise RefusalError(
                VALIDATION_ERROR,
                f"expected at most {wire.MAX_MEMBERS} sessions of one connection; open another",
            )

    def _cancel(self, head: wire.CancelRequest) -> None:
        for request in [request for request in self.running if request.head.id == head.request]:
            text = "the request was cancelled before it had begun; it was not executed"
            self._give_up(request, RefusalError(NOT_EXECUTED, text))
        self.put(wire.encode_frame({"id": dumps(head.id), "last": b"true"}, []))

    def _give_up(self, request: LinkRequest, refusal: RefusalError) -> None:
        """Do not begin a request, if it has not begun."""
        if request.round is not None:
            request.round.cancel(refusal)
        elif not request.begun and request.refusal is None:
            request.refusal = refusal
            if request in self._deferred:
                self._deferred.remove(request)
                self._begin(request)
            elif request.started and request.task is not None:
                request.task.cancel()

    def _finish(self) -> None:
        """Close the connection, and end with it, after what has been written."""
        if self.conversation is not None:
            self.conversation.finish()

    async def progress(self) -> None:
        """Wait until one of the requests under way is answered."""
        if self._progress is None or self._progress.done():
            self._progress = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._progress])

    async def _flushed(self) -> None:
        """Wait until a client that is there has been sent everything."""
        if self.conversation is not None and (sending := self.conversation.sending) is not None:
            await asyncio.sleep(0)  # first, as `begin_here` needs it
            await asyncio.wait([sending])


class Links:
    """Begins conversations, reads their frames, and knows the links that outlive them.

    Attributes:
        decoder: Reads frames of the released dialect that have ids.
        single: Answers them.
        batches: Reads and writes what is asked of many sessions.
    """

    def __init__(
        self,
        sessions: SessionTable,
        decoder: RequestDecoder[Any],
        single: FrameDialect,
        batches: BatchDialect,
        *,
        production: bool,
        send_timeout_s: float,
    ) -> None:
        self.sessions = sessions
        self.decoder = decoder
        self.single = single
        self.batches = batches
        self._operations = wire.PRODUCTION_OPERATIONS if production else wire.OPERATIONS
        self._send_timeout_s = send_timeout_s
        self._links: dict[str, Link] = {}

    def __call__(
        self, scope: Message, receive: Receive, send: Send, standing: str | None
    ) -> "LinkConversation":
        """Return what serves a socket, of a session that stands by itself where one is named."""
        link = Link(self, owner_of(scope), standing)
        return LinkConversation(link, scope, receive, send, self.sessions, self, self._send_timeout_s)

    def read(self, frame: str | bytes) -> tuple[RequestHead, Any, list[Array]]:
        """Return a request, what of the released dialect it holds, and its arrays.

        Raises:
            RefusalError: It is none.
        """
        try:
            return read_frame(frame, self.decoder, self._operations)
        except RefusalError:
            raise
        except FATAL as error:  # a validator of the author's may raise anything
            raise RefusalError(EXECUTION_ERROR, reported(error)) from None

    def refusal(self, refusal: RefusalError, request_id: int | None = None, single: bool = False) -> str:
        """Return the frame that refuses a request; the id is null where it could not be read."""
        self.sessions.metrics.count_error(refusal.code)
        if single:
            return add_id(request_id or 0, encode_error(refusal.code, refusal.message, refusal.extra))
        frame = wire.encode_frame(
            {"id": dumps(request_id), "error": dumps(data_of(refusal)), "last": b"true"}, []
        )
        assert isinstance(frame, str)
        return frame

    def add(self, link: Link, lease_s: float) -> None:
        """Let a link be resumed from now on."""
        link.id, link.secret, link.lease_s = self.sessions.new_id(), secrets.token_urlsafe(16), lease_s
        self._links[link.id] = link

    def remove(self, link: Link) -> None:
        """Let it be found no more."""
        self._links.pop(link.id, None)

    def find(self, owner: str, request: wire.ResumeRequest) -> Link:
        """Return the link that a client wants to resume.

        Raises:
            RefusalError: There is none, or it is somebody else's: the answer is the same.
        """
        link = self._links.get(request.session)
        known = "" if link is None else link.secret
        same = hmac.compare_digest(known.encode(), request.secret.encode(errors="replace"))
        if link is None or not same or link.owner != owner or not link.may_resume(request.read):
            raise RefusalError(
                SESSION_ERROR,
                "expected a session of yours that is open, or broke off within its lease, got none; open a new one",
            )
        return link

    async def close(self) -> None:
        """End those that no socket speaks for: the server stops."""
        left = [link.close() for link in self._links.values() if link.conversation is None]
        await asyncio.gather(*left)


class LinkConversation(Conversation):
    """One socket in this dialect, which speaks for its link until a resume tells of another.

    Attributes:
        sending: Sends what could not be sent at once.
    """

    accept: Message = {"type": "websocket.accept", "subprotocol": wire.SUBPROTOCOL}  # noqa: RUF012 - as its base's

    def __init__(self, link: Link, *args: Any) -> None:
        super().__init__(*args)
        link.conversation = self
        self._link = link
        self.sending: asyncio.Task[None] | None = None

    async def _talk(self, held: None) -> int:
        self._listen()
        unopened = asyncio.get_running_loop().call_later(UNOPENED_S, self._look)
        try:
            while not self.leaving:
                self.busy = bool(self._link.running)
                while self.busy and sum(len(request.frame) for request in self._link.running) > MAX_HELD:
                    await self._link.progress()
                frame = await self._next_frame()
                self.busy = True
                await self._link.take(frame)
            while self._link.running:
                await self._link.progress()
            return GOING_AWAY
        finally:
            unopened.cancel()
            if self.sending is not None and self.over:
                self.sending.cancel()
            link = self._link
            if link.conversation is self:
                if link.id and self.broken and not self.leaving:
                    link.detach()
                else:
                    await asyncio.shield(keep(asyncio.create_task(link.close())))

    def _listen(self) -> None:
        if self._lane is not None:
            self._lane.on_frame = self._link.answer_here

    def resume(self, link: Link, request: wire.ResumeRequest) -> None:
        """Speak for a link that has lost its socket, or is about to hear that it has."""
        told = {"id": request.id, "taken": link.taken, "lease_s": link.lease_s, "last": True}
        self._link = link
        link.attach(self)
        link.forget(request.read)
        self._listen()
        self.sending = keep(asyncio.create_task(self._send_rest(request.read, dumps(told).decode())))

    def _look(self) -> None:
        """End a conversation that has opened nothing."""
        if not self._link.batch.opened and not self._link.running:
            self.end(NORMAL_CLOSURE)

    def drop(self) -> None:
        """Say and hear nothing more: another socket speaks for the link."""
        self.over = True
        if self._abort is not None:
            self._abort()
        self._interrupt()

    def finish(self) -> None:
        """Close in order, after what has been written."""
        self.broken = False
        self.end(NORMAL_CLOSURE)

    def note(self, busy: bool) -> None:
        """Note whether requests are under way."""
        self.busy = busy
        if self.leaving:
            self.leave()

    def send_now(self, frame: str | bytes) -> bool:
        """Send the frame that is being written; where it has to wait, it is sent later, and False returned."""
        if self.sending is not None or self.over:
            return False
        if self._lane is not None and self._lane.send_frame(frame):
            return True
        self.sending = keep(asyncio.create_task(self._send_rest(self._link.count - 1)))
        return False

    async def _send_rest(self, sent: int, first: str | None = None) -> None:
        """Send what comes after so many frames, until nothing is left; before it one that counts among none."""
        link = self._link
        try:
            while not self.over and (first is not None or sent < link.count):
                frame = link.frame(sent) if first is None else first
                if frame is None:
                    self._drop()  # it reads so slowly that what it should read next is kept no more
                    return
                self._watch.expect(self._patience_s, self._drop)
                await self._send(
                    {"type": "websocket.send", "text" if isinstance(frame, str) else "bytes": frame}
                )
                self._watch.stop()
                if first is not None:
                    first = None
                    continue
                sent += 1
                if not link.id:
                    link.forget(sent)
        except OSError:
            pass  # whoever reads hears of the end too, and whether it was in order
        finally:
            self.sending = None

    async def _close(self, code: int, last: str | None) -> None:
        if self.sending is not None:
            await asyncio.wait([self.sending])
        await super()._close(code, last)
