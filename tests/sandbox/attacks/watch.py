"""What others feel while a session is attacked from: the loop's delay, and a neighbour's executions."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from openenv_core.sandbox import Session

from .surroundings import descendants, resident

Spans = Sequence[tuple[float, float]]

FINE_S: Final = 0.01
COARSE_S: Final = 0.05
LONG_S: Final = 0.5
"""A timer that is later than this is held against what a process beside the loop felt."""

_BESIDE: Final = """
import json, select, sys, time
period, late, over = float(sys.argv[1]), [], False
print("ready", flush=True)
while not over:
    due = time.monotonic() + period
    over = bool(select.select([sys.stdin], [], [], period)[0])
    now = time.monotonic()
    if now - due > period:
        late.append((due, now))
json.dump(late, sys.stdout)
"""


@dataclass
class Felt:
    """Seconds, as they came.

    Attributes:
        loop: By how much a timer of the server's loop was late.
        held: How much of it a process beside the loop did not feel, for timers later than LONG_S.
        neighbour: A neighbour's executions.
        resident: The most that all interpreters together had in memory for themselves.
        wrong: What a neighbour got that was not its own.
    """

    loop: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    neighbour: list[float] = field(default_factory=list)
    resident: int = 0
    wrong: list[str] = field(default_factory=list)


def percentile(values: Sequence[float], which: float) -> float:
    """Return the value below which that part of them lies; 0 where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(which * len(ordered)))] if ordered else 0.0


def alone(loop: Spans, beside: Spans) -> list[float]:
    """Return for how long of each span the loop was late, and a process beside it was not."""
    return [
        until - since - sum(max(0.0, min(until, end) - max(since, begin)) for begin, end in beside)
        for since, until in loop
    ]


class Watch:
    """Measures for as long as it is entered.

    Args:
        neighbour: A session that is attacked from nowhere.
        zygote: Whose interpreters are weighed.
        period_s: Seconds between two looks.
    """

    def __init__(self, neighbour: Session, zygote: int | None, *, period_s: float = FINE_S) -> None:
        self._period = period_s
        self.felt = Felt()
        self._neighbour = neighbour
        self._zygote = zygote
        self._tasks: list[asyncio.Task[None]] = []
        self._late: list[tuple[float, float]] = []
        self._beside: subprocess.Popen[str] | None = None

    async def __aenter__(self) -> Self:
        planted = await self._neighbour.execute("mine = 'the neighbour'; n = 0")
        if planted.status != "ok":
            self.felt.wrong.append(f"a neighbour could not begin: {planted.status} {planted.reason}")
        self._beside = await asyncio.to_thread(_beside, self._period)
        looks = (self._feel_loop(), self._feel_neighbour(), self._weigh())
        self._tasks = [asyncio.create_task(look) for look in looks]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert self._beside is not None
        told, _ = await asyncio.to_thread(self._beside.communicate, "over\n")
        if self._beside.returncode == 0:
            self.felt.held = alone(self._late, json.loads(told))
        else:
            self.felt.wrong.append(f"a process beside the loop ended with {self._beside.returncode}")

    async def _feel_loop(self) -> None:
        while True:
            due = time.monotonic() + self._period
            await asyncio.sleep(self._period)
            now = time.monotonic()
            self.felt.loop.append(now - due)
            if now - due > LONG_S:
                self._late.append((due, now))

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

    async def _weigh(self) -> None:
        while True:
            weight = await asyncio.to_thread(lambda: resident(descendants(self._zygote)))
            self.felt.resident = max(self.felt.resident, weight)
            await asyncio.sleep(20 * self._period)


def _beside(period_s: float) -> "subprocess.Popen[str]":
    """Start a process that notes when its own timers are late: where they are, it is the machine."""
    words = [sys.executable, "-I", "-c", _BESIDE, str(period_s)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process
