"""Who may send next, and the wait for a reply: what asyncio's own tools do, at the price of a step's budget."""

import asyncio
from collections import deque
from types import TracebackType


class Turn:
    """A fair lock that costs next to nothing while nobody else wants it.

    with turn if turn.take() else await turn.wait():
        ...
    """

    __slots__ = ("_taken", "_waiting")

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def taken(self) -> bool:
        """Whether somebody has it."""
        return self._taken

    def take(self) -> bool:
        """Take it if nobody has it; return whether that is so."""
        if self._taken:
            return False
        self._taken = True
        return True

    async def wait(self) -> "Turn":
        """Take it once those have had it who asked before."""
        if self.take():
            return self
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # it was handed over just now
                self._give()
            raise
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give()

    def _give(self) -> None:
        while self._waiting:
            heir = self._waiting.popleft()
            if not heir.done():
                heir.set_result(None)  # and it stays taken: nobody may come in between
                return
        self._taken = False
