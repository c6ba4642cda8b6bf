"""A replica that works on one job at a time, for as long as the job takes."""

import asyncio
import os

from monarch.actor import endpoint

from rl_bridge.services.actor import ServiceActor


class Worker(ServiceActor):
    """Sleeps through its jobs, one after the other."""

    def __init__(self) -> None:
        self._slowness = 1.0

    @endpoint  # type: ignore[untyped-decorator]
    async def slow_down(self, pid: int, slowness: float) -> None:
        """From now on jobs take so many times as long, where this is that process; as long as they say elsewhere."""
        self._slowness = slowness if pid == os.getpid() else 1.0

    @endpoint  # type: ignore[untyped-decorator]
    async def work(self, seconds: float) -> None:
        """One job."""
        await asyncio.sleep(seconds * self._slowness)

    @endpoint  # type: ignore[untyped-decorator]
    async def nothing(self) -> None:
        """A job that is none."""
