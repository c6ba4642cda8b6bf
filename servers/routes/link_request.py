"""One request of a link: decoding its frame, and its state while it runs."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from openenv_core.protocol import batch as wire
from openenv_core.protocol.batch import Array, FrameError
from openenv_core.protocol.errors import INVALID_JSON, RefusalError
from openenv_core.protocol.requests import RequestDecoder, RequestHead
from servers.execution import keep, start_eagerly
from servers.sessions.batch import BatchRound, Member


@dataclass(eq=False)
class LinkRequest:
    """A request that has not been answered.

    Attributes:
        head: Its id, and its operation or member.
        parsed: The message of the released dialect in it, for a single request.
        arrays: The arrays of its frame.
        frame: The frame itself.
        received_at: When its frame came, by `perf_counter`; 0 without metrics.
        executing: Whether the call of the environment has started.
        started: Whether `Link._answer` has started.
        refusal: Why it must not be executed, if so.
        member: The session that it calls.
        has_lock: Whether it holds the session's lock, which it needs once it is not the only request any more.
        expired: Whether its call exceeded its deadline, which has been answered.
        reply_coroutine: Continues a reply that was started outside of a task.
        round: Its calls, for a batched request.
        task: The task that answers it, if any.
        timer: Enforces the deadline by which it has to start.
    """

    head: RequestHead
    parsed: Any
    arrays: list[Array]
    frame: str | bytes
    received_at: float
    # Defaults that stay in the class are not set for each request.
    executing: bool = field(default=False, init=False)
    started: bool = field(default=False, init=False)
    refusal: RefusalError | None = field(default=None, init=False)
    member: Member | None = field(default=None, init=False)
    has_lock: bool = field(default=False, init=False)
    expired: bool = field(default=False, init=False)
    reply_coroutine: Coroutine[Any, Any, str | None] | None = field(default=None, init=False)
    round: BatchRound | None = field(default=None, init=False)
    task: asyncio.Task[Any] | None = field(default=None, init=False)
    timer: asyncio.TimerHandle | None = field(default=None, init=False)

    def cancel(self) -> asyncio.Task[Any]:
        """Cancel the request and return its task; a started `reply_coroutine` gets one, in which it ends."""
        task = self.task
        if task is None:
            assert self.reply_coroutine is not None
            self.task = task = keep(asyncio.create_task(self.reply_coroutine))
            task.add_done_callback(lambda _: self.release_member())
        task.cancel()
        return task

    def take_lock(self) -> None:
        """Take the lock of the session, if any, which was called without it; it is free, and so this does not wait."""
        if self.member is not None and not self.has_lock:
            start_eagerly(self.member.lock.acquire())
            self.has_lock = True

    def release_member(self) -> None:
        """Release the session's lock, if held, and stop its watchdog."""
        if (member := self.member) is not None:
            self.member = None
            if self.has_lock:
                member.lock.release()
            if member.session.watchdog is not None:
                member.session.watchdog.stop()


def read_frame(
    frame: str | bytes, decoder: RequestDecoder[Any], operations: Sequence[str]
) -> tuple[RequestHead, Any, list[Array]]:
    """Return a request's head, its message of the released dialect if any, and its arrays; RefusalError: invalid."""
    if type(frame) is str and '"op"' not in frame:
        return *decoder.numbered_frame(frame), []
    try:
        header, arrays = wire.decode_frame(frame)
    except FrameError as error:
        raise RefusalError(INVALID_JSON, str(error)) from None
    if type(frame) is str and "op" not in header:
        return *decoder.numbered_frame(frame), []
    return wire.read_request(header, len(frame), operations), None, arrays


def read_request_id(frame: str | bytes) -> tuple[int | None, bool]:
    """Return the id of an invalid request, if readable, and whether it is in the released dialect (has a `type`)."""
    try:
        header, _ = wire.decode_frame(frame)
    except FrameError:
        return None, False
    request_id = header.get("id")
    return (
        (request_id, "type" in header)
        if type(request_id) is int and 0 <= request_id < 2**53
        else (None, False)
    )
