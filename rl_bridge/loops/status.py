"""How a run stands, for whoever asks."""

import os
import socket
import time

from rl_bridge.environments.servers import EnvironmentServers
from rl_bridge.loops.observation import (
    SpanCollector,
    event_rows,
    group_counts,
    lease_rows,
    service_rows,
)
from rl_bridge.loops.run import Run
from rl_bridge.metrics.status import StatusSnapshot
from rl_bridge.services import Fleet

BEGAN = time.time()
"""When this process was started, near enough."""


def snapshot(run: Run, fleet: Fleet, servers: EnvironmentServers, collector: SpanCollector) -> StatusSnapshot:
    """Take a snapshot; nothing is waited for."""
    return StatusSnapshot(
        name=run.folder.name,
        folder=str(run.folder.absolute()),
        host=socket.gethostname(),
        pid=os.getpid(),
        began=BEGAN,
        taken=time.time(),
        iterations=run.config.trainer.iterations,
        version=run.version,
        served=run.buffer.admission.served,
        max_staleness=run.config.rollout.max_staleness,
        services=service_rows(fleet, {}),
        groups=group_counts(run.buffer.ledger),
        leases=lease_rows(run.buffer.ledger, {}, now=time.monotonic()),
        events=event_rows(fleet),
        spans=collector.known,
        figures=run.newest,
    )
