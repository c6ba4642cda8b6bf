"""Takes the snapshots of a run that others may ask for."""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rl_bridge.buffer.replay import ReplayBuffer
from rl_bridge.loops.observation import (
    SpanCollector,
    ask_all,
    event_rows,
    group_counts,
    lease_rows,
    service_rows,
)
from rl_bridge.metrics.status import StatusSnapshot
from rl_bridge.types import PolicyVersion

if TYPE_CHECKING:
    from rl_bridge.services.fleet import Fleet


class RunObserver:
    """Sees a run from the controller's process.

    What has to be asked for (how processes spend their time, which weights a replica serves, which leases a worker
    has) is looked for by `refresh`: a `StatusServer` does that when somebody asks.

    Args:
        fleet: The run's.
        buffer: The run's.
        spans: Who knows how processes spend their time.
        folder: The run's; its name is the run's.
        iterations: How many there will be.
        version: Tells how many have been trained.
    """

    def __init__(
        self,
        fleet: "Fleet",
        buffer: ReplayBuffer,
        spans: SpanCollector,
        *,
        folder: Path,
        iterations: int,
        version: Callable[[], PolicyVersion],
    ) -> None:
        self._fleet = fleet
        self._buffer = buffer
        self._spans = spans
        self._folder = folder
        self._iterations = iterations
        self._version = version
        self._began = time.time()
        self._versions: dict[str, dict[int, PolicyVersion]] = {}
        self._workers: dict[int, str] = {}

    async def refresh(self) -> None:
        """Ask the processes; within `ANSWER_TIMEOUT_S`."""
        _, self._versions, playing = await asyncio.gather(
            self._spans.collect(), ask_all(self._fleet, "version"), ask_all(self._fleet, "playing")
        )
        self._workers = {
            lease: f"{name}-{replica}"
            for name, workers in playing.items()
            for replica, leases in workers.items()
            for lease in leases
        }

    def snapshot(self) -> StatusSnapshot:
        """How the run stands, by what was found last."""
        buffer = self._buffer
        return StatusSnapshot(
            name=self._folder.name,
            folder=str(self._folder.absolute()),
            host=socket.gethostname(),
            pid=os.getpid(),
            began=self._began,
            taken=time.time(),
            iterations=self._iterations,
            version=self._version(),
            served=buffer.admission.served,
            max_staleness=buffer.admission.max_staleness,
            services=service_rows(self._fleet, self._versions),
            groups=group_counts(buffer.ledger),
            leases=lease_rows(buffer.ledger, self._workers, now=asyncio.get_running_loop().time()),
            events=event_rows(self._fleet),
            spans=self._spans.known,
        )
