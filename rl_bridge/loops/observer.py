"""Finds out what only the processes of a run know."""

import asyncio
from typing import TYPE_CHECKING

from rl_bridge.loops.observation import SpanCollector, ask_all
from rl_bridge.types import PolicyVersion

if TYPE_CHECKING:
    from rl_bridge.services.fleet import Fleet


class RunObserver:
    """How processes spend their time, which weights a replica serves, which leases a worker has: as last heard of.

    Args:
        fleet: Has the processes.
    """

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self.spans = SpanCollector(fleet)
        """How each process has spent its time."""
        self.versions: dict[str, dict[int, PolicyVersion]] = {}
        """The weights that replicas serve, by service and replica."""
        self.workers: dict[int, str] = {}
        """Who is at work on which lease, by its id."""

    async def refresh(self) -> None:
        """Ask all processes; within `ANSWER_TIMEOUT_S`."""
        _, self.versions, playing = await asyncio.gather(
            self.spans.collect(), ask_all(self._fleet, "version"), ask_all(self._fleet, "playing")
        )
        self.workers = {
            lease: f"{name}-{replica}"
            for name, workers in playing.items()
            for replica, leases in workers.items()
            for lease in leases
        }
