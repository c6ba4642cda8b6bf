"""A run's status, served from a thread as a controller serves it from its loop."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_bridge.metrics.spans import SpanTotals
from rl_bridge.metrics.status import (
    PROCESS_STARTED_AT,
    EventRow,
    LeaseRow,
    ReplicaRow,
    ServiceRow,
    StatusServer,
    StatusSnapshot,
)


def snapshot(*, name: str = "seven", wall_s: float = 100.0, version: int = 12) -> StatusSnapshot:
    seconds: dict[tuple[str, str | None], float] = {
        ("train", None): 0.5 * wall_s,
        ("rest", "batches"): 0.49 * wall_s,
    }
    return StatusSnapshot(
        name=name,
        folder=f"runs/{name}",
        host="head",
        pid=4711,
        began=PROCESS_STARTED_AT,
        taken=PROCESS_STARTED_AT + 3725.0,
        iterations=150,
        version=version,
        served=11,
        max_staleness=1,
        services=(
            ServiceRow(
                name="policy",
                replicas=(
                    ReplicaRow(id=0, state="serving", host="one", pids=(31, 32), in_flight=7, version=11),
                    ReplicaRow(id=1, state="restarting [back-off]", restarts=2),
                ),
            ),
        ),
        groups={"leased": 2, "finished": 3, "trained": 96, "dropped": 1},
        leases=(
            LeaseRow(group=104, worker="rollout-0", attempt=1, age_s=2.0),
            LeaseRow(group=99, worker="rollout-1", attempt=2, age_s=61.0),
        ),
        events=(EventRow(at=1500.0, service="policy", replica=1, what="lost [signal 9]"),),
        spans={"trainer-0": SpanTotals(began=1.0, wall_s=wall_s, cpu_s=wall_s / 2, seconds=seconds)},
        metrics={"reward/mean": -0.25},
    )


@contextmanager
def served(take: Callable[[], StatusSnapshot], folder: Path | None = None) -> Iterator[str]:
    """Serve until the block ends; yields the address."""
    ready, address = threading.Event(), ""
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        nonlocal address
        async with StatusServer("127.0.0.1", 0, take, folder=folder) as server:
            address = server.address
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        yield address
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(60)
        loop.close()
