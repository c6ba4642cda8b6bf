"""One request of a link: how it is read, what it is while it is under way, and the id of what could not be read."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from openenv_core.protocol import batch as wire
from openenv_core.protocol.batch import Array, FrameError
from openenv_core.protocol.errors import INVALID_JSON, RefusalError
from openenv_core.protocol.requests import RequestDecoder, RequestHead
from servers.execution import keep
from servers.sessions.batch import BatchRound, Member


@dataclass(slots=True, eq=False)
class LinkRequest:
    """A request under way.

    Attributes:
        head: What it says.
        received_at: When its frame came, by `perf_counter`, where calls are timed.
        parsed: What of the released dialect it holds.
        arrays: Those of its frame.
        frame: As it came.
        executing: The environment is asked, or was.
        started: Its task runs.
        refusal: Why it is not to be begun.
        member: The session that it is asking.
        expired: It has been answered, because its time is over.
        reply_coroutine: Goes on with its answer, where that was begun.
        round: Its calls, where it is about many sessions.
        task: What it runs in, once it does.
        timer: Of its deadline.
    """

    head: RequestHead
    parsed: Any
    arrays: list[Array]
    frame: str | bytes
    received_at: float
    executing: bool = False
    started: bool = False
    refusal: RefusalError | None = None
    member: Member | None = None
    expired: bool = False
    reply_coroutine: Coroutine[Any, Any, str | None] | None = None
    round: BatchRound | None = None
    task: asyncio.Task[Any] | None = None
    timer: asyncio.TimerHandle | None = None

    def cancel(self) -> asyncio.Task[Any]:
        """Cancel what has begun of it; where that waits for a thread, its end comes in a task."""
        task = self.task
        if task is None:
            assert self.reply_coroutine is not None
            self.task = task = keep(asyncio.create_task(self.reply_coroutine))
            task.add_done_callback(lambda _: self.release_member())
        task.cancel()
        return task

    def release_member(self) -> None:
        """Let the next request ask the session that this one has asked."""
        if (member := self.member) is not None:
            self.member = None
            member.lock.release()
            if member.session.watch is not None:
                member.session.watch.stop()


def read_frame(
    frame: str | bytes, decoder: RequestDecoder[Any], operations: Sequence[str]
) -> tuple[RequestHead, Any, list[Array]]:
    """Return a request, what of the released dialect it holds, and its arrays; RefusalError: it is none."""
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
    """Return the id of a request that is refused, and whether it is one of the released dialect."""
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
