"""One request of a link, while it is under way; and the id of what could not be read as one."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from openenv_core.protocol import batch as wire
from openenv_core.protocol.batch import Array, FrameError
from openenv_core.protocol.errors import RefusalError
from openenv_core.protocol.requests import RequestHead
from servers.sessions.batch import BatchRound, Member


def numbered(request_id: int, reply: str) -> str:
    """Return a reply of the released dialect with the id of what it answers."""
    return f'{{"id":{request_id},{reply[1:]}'


@dataclass(slots=True, eq=False)
class LinkRequest:
    """A request under way.

    Attributes:
        head: What it says.
        came: When its frame came, by `perf_counter`, where calls are timed.
        parsed: What of the released dialect it holds.
        arrays: Those of its frame.
        frame: As it came.
        begun: The environment is asked, or was.
        started: Its task runs.
        refusal: Why it is not to be begun.
        asks: The session that it is asking.
        expired: It has been answered, because its time is over.
        answering: Goes on with its answer, where that was begun.
        rest: What is left to do of it, where that waits for a thread and not in a task.
        round: Its calls, where it is about many sessions.
        task: What it runs in, once it does.
        timer: Of its deadline.
    """

    head: RequestHead
    parsed: Any
    arrays: list[Array]
    frame: str | bytes
    came: float
    begun: bool = False
    started: bool = False
    refusal: RefusalError | None = None
    asks: Member | None = None
    expired: bool = False
    answering: Coroutine[Any, Any, str | None] | None = None
    rest: Coroutine[Any, Any, None] | None = None
    round: BatchRound | None = None
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None


def id_in(frame: str | bytes) -> tuple[int | None, bool]:
    """Return the id of a request that is refused, and whether it is one of the released dialect."""
    try:
        header, _ = wire.decode_frame(frame)
    except FrameError:
        return None, False
    known = header.get("id")
    return (known, "type" in header) if type(known) is int and 0 <= known < 2**53 else (None, False)
