"""An event loop whose clock jumps to whatever happens next: hours of waiting in milliseconds, and no hang unseen."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(AssertionError):
    """Everybody waits, and nobody is left who could end it."""


class _Jump(selectors.DefaultSelector):
    """Sleeps by moving the clock on."""

    loop: "SimulatedTime"

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise DeadlockError(f"nothing is left to happen at {self.loop.time():g} s")
        self.loop.now += timeout
        return []


class SimulatedTime(asyncio.SelectorEventLoop):
    """For what does no input or output."""

    def __init__(self) -> None:
        selector = _Jump()
        selector.loop = self
        self.now = 0.0
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end.

    Raises:
        DeadlockError: Everybody waits for something that will not come.
    """
    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        return runner.run(main)
