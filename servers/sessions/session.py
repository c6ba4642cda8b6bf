"""One session: an environment, whose it is, and the order of those who ask it."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from servers.execution import Runner
from servers.sessions.refusals import Busy

MAX_WAITING = 32
"""Calls that may wait for one session while another is under way."""


class UnderWay(Protocol):
    """A call that is under way.

    Attributes:
        task: It runs in this.
        expired: Its deadline has passed; it closes the session's environment when it ends at last.
    """

    task: asyncio.Task[Any]
    expired: bool


class Session:
    """One environment under an identity of its own. It knows no socket.

    Attributes:
        runner: The environment and where it runs.
        owner: Fingerprint of the token that opened it; empty where there are no tokens.
        standing: It lives until it is closed or goes unused; otherwise as long as the block that opened it.
        id: By what it is found; empty until it has been handed out.
        attached: A socket speaks for it.
        closing: It ends when its socket leaves.
        ending: Its environment is being closed.
        over: It has ended, or is about to; nobody finds it any more.
        holds_slot: Its slot has not been given back yet.
        used: It has been asked for something.
        last_use: When that was, or when it was opened, by the loop's clock.
        listeners: Requests under way beside its calls, streams that stay open among them; they keep it in use.
        on_over: Called once when it has ended.
        call: The call that is under way, in a task of its own.
    """

    __slots__ = (
        "_turn",
        "_waiting",
        "attached",
        "call",
        "closing",
        "ending",
        "holds_slot",
        "id",
        "last_use",
        "listeners",
        "on_over",
        "over",
        "owner",
        "runner",
        "standing",
        "used",
    )

    def __init__(self, runner: Runner, owner: str = "", session_id: str = "", standing: bool = False) -> None:
        self.runner = runner
        self.owner = owner
        self.id = session_id
        self.standing = standing
        self.attached = not standing
        self.closing = self.ending = self.over = self.used = False
        self.holds_slot = True
        self.last_use = 0.0
        self.listeners = 0
        self.on_over: Callable[[], None] | None = None
        self.call: UnderWay | None = None
        self._turn: asyncio.Lock | None = None
        self._waiting = 0

    @property
    def shared(self) -> bool:
        """Whether others than the socket that opened it may ask it."""
        return self.standing or bool(self.id)

    @property
    def busy(self) -> bool:
        """Whether a call is under way or waits."""
        return self._turn is not None and self._turn.locked()

    async def take_turn(self) -> None:
        """Wait until no other call is under way.

        Raises:
            Refusal: `Busy`; too many wait.
        """
        if self._turn is None:
            self._turn = asyncio.Lock()
        if self._waiting >= MAX_WAITING:
            raise Busy(self._waiting)
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1

    def give_turn(self) -> None:
        """Let the next call come."""
        assert self._turn is not None
        self._turn.release()
