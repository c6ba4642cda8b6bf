"""An event loop whose clock jumps to the next timer: hours pass in milliseconds, and hangs are detected."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(AssertionError):
    """Every task waits, and no timer is left."""


class _Jump(selectors.DefaultSelector):
    """A selector that advances the clock instead of sleeping."""

    loop: "SimulatedTime"

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise DeadlockError(f"nothing is left to happen at {self.loop.time():g} s")
        self.loop.now += timeout
        return []


class SimulatedTime(asyncio.SelectorEventLoop):
    """An event loop for code without I/O."""

    def __init__(self) -> None:
        selector = _Jump()
        selector.loop = self
        self.now = 0.0
        super().__init__(selector)

    def time(self) -> float:
        """Return the simulated seconds so far."""
        return self.now


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in simulated time.

    Raises:
        DeadlockError: Every task waits, and no timer is left.
    """
    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        return runner.run(main)


def simulated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in simulated time."""

    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        simulate(test(*arguments, **options))

    return run
