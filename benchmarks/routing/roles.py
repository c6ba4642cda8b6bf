"""A replica that works on one job at a time."""

import asyncio
import os

from monarch.actor import endpoint

from rl_bridge.services.actor import ServiceActor


class Worker(ServiceActor):
    """Sleeps for the duration of each job, one after another."""

    def __init__(self) -> None:
        self._slowness = 1.0

    @endpoint  # type: ignore[untyped-decorator]
    async def slow_down(self, pid: int, slowness: float) -> None:
        """Multiply the duration of further jobs by `slowness` in process `pid`, by 1 in others."""
        self._slowness = slowness if pid == os.getpid() else 1.0

    @endpoint  # type: ignore[untyped-decorator]
    async def work(self, seconds: float) -> None:
        """Work on one job."""
        await asyncio.sleep(seconds * self._slowness)

    @endpoint  # type: ignore[untyped-decorator]
    async def nothing(self) -> None:
        """Return at once."""
