"""How a run stands, for whoever asks."""

import math
import os
import socket
import time

from rl_bridge.environments.servers import EnvironmentServers
from rl_bridge.loops.observation import event_rows, group_counts, lease_rows, server_row, service_rows
from rl_bridge.loops.run import Run
from rl_bridge.metrics.status import StatusSnapshot
from rl_bridge.services import Fleet

BEGAN = time.time()
"""When this process was started, near enough."""


def snapshot(run: Run, fleet: Fleet, servers: EnvironmentServers | None) -> StatusSnapshot:
    """Take a snapshot; nothing is waited for. Figures that are not finite are left out."""
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
        services=(
            *service_rows(fleet, run.observer.versions),
            *(() if servers is None else (server_row(servers),)),
        ),
        groups=group_counts(run.buffer.ledger),
        leases=lease_rows(run.buffer.ledger, run.observer.workers, now=time.monotonic()),
        events=event_rows(fleet),
        spans=run.observer.spans.known,
        # What is no number JSON has no word for, and whoever asks would not understand the rest either.
        figures={name: value for name, value in run.newest.items() if math.isfinite(value)},
    )
