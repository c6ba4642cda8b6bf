"""What others feel while a session is attacked from: the loop's delay, and a neighbour's executions."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from openenv_core.sandbox import SandboxSession

FINE_S: Final = 0.01
COARSE_S: Final = 0.05


@dataclass
class Felt:
    """By how much a timer of the loop was late, what a neighbour's executions took, and what was wrong with them."""

    loop: list[float] = field(default_factory=list)
    neighbour: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def p99_s(self) -> dict[str, float]:
        """What one in a hundred was longer than, of the loop's delays and of the neighbour's executions."""
        return {name: percentile(getattr(self, name), 0.99) for name in ("loop", "neighbour")}


def percentile(values: Sequence[float], which: float) -> float:
    """Return the value below which that part of them lies; 0 where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(which * len(ordered)))] if ordered else 0.0


class Watch:
    """Measures for as long as it is entered, by a neighbour that is attacked from nowhere."""

    def __init__(self, neighbour: SandboxSession, *, period_s: float = FINE_S) -> None:
        self._period = period_s
        self.felt = Felt()
        self._neighbour = neighbour
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        planted = await self._neighbour.execute("mine = 'the neighbour'; n = 0")
        if planted.status != "ok":
            self.felt.wrong.append(f"a neighbour could not begin: {planted.status} {planted.reason}")
        self._tasks = [asyncio.create_task(look) for look in (self._feel_loop(), self._feel_neighbour())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _feel_loop(self) -> None:
        while True:
            due = time.monotonic() + self._period
            await asyncio.sleep(self._period)
            self.felt.loop.append(time.monotonic() - due)

    async def _feel_neighbour(self) -> None:
        number = 0
        while True:
            await asyncio.sleep(2 * self._period)
            number += 1
            began = time.perf_counter()
            done = await self._neighbour.execute("n += 1; (mine, n)")
            self.felt.neighbour.append(time.perf_counter() - began)
            if done.result != f"('the neighbour', {number})":
                self.felt.wrong.append(f"a neighbour got {done.status} {done.result} {done.reason}")
                return
