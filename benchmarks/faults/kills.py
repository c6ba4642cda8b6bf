"""Kills processes of a run at random times and watches it recover."""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import psutil

from benchmarks.faults.job import Job
from benchmarks.harness import BenchmarkError, progress
from rl_bridge.metrics.status import SERVING, ReplicaRow, StatusSnapshot

KINDS = ("policy", "rollout", "reward", "environment")
"""Services of which a replica is killed: two generators, two rollout workers, the reward pool, the server."""
POLL_INTERVAL_S = 0.2
START_TIMEOUT_S = 300.0
RECOVERY_TIMEOUT_S = 180.0


@dataclass(kw_only=True, slots=True)
class Kill:
    """One SIGKILL.

    Attributes:
        kind: The service.
        replica: Number of the replica.
        version: Iterations trained at the time.
        noticed_s: Seconds until the run reported the replica as lost.
        serving_s: Seconds until the replica served again.
    """

    kind: str
    replica: int
    version: int
    noticed_s: float | None = None
    serving_s: float | None = None


@dataclass(slots=True)
class Killer:
    """Kills one process after another, each once the previous one's replica serves again.

    Args:
        job: The run.
        seed: Seed of the pauses between a recovery and the next kill, and of the replicas.
        pause_s: Shortest and longest pause.
    """

    job: Job
    seed: int
    pause_s: tuple[float, float] = (1.0, 4.0)
    kills: list[Kill] = field(default_factory=list)
    cold_start_s: float | None = None

    def all(self, kinds: Sequence[str]) -> list[Kill]:
        """Kill one replica for each entry of `kinds`, in random order; fewer if the run ends first."""
        rng = random.Random(self.seed)
        order = list(kinds)
        rng.shuffle(order)
        status = self._wait_until(lambda now: now is not None and now.version >= 1, START_TIMEOUT_S)
        if status is not None:
            self.cold_start_s = _cold_start(status)
        for number, kind in enumerate(order):
            time.sleep(rng.uniform(*self.pause_s))
            status = self._wait_until(partial(_serving, kind=kind), RECOVERY_TIMEOUT_S)
            if status is None:
                if self.job.process.poll() is None:
                    raise BenchmarkError(f"no replica of {kind} serves: {self.job.status()}")
                break
            victim = rng.choice(_serving(status, kind))
            kill = Kill(kind=kind, replica=victim.id, version=status.version)
            began = time.time()
            _kill(rng.choice(victim.pids), kind)
            self.kills.append(kill)
            self._watch(kill, victim.restarts, began)
            progress(f"{number + 1} of {len(order)}: {kill}")
        return self.kills

    def _watch(self, kill: Kill, restarts: int, began: float) -> None:
        def serves_again(status: StatusSnapshot | None) -> bool:
            if status is None:
                return self.job.process.poll() is not None
            (now,) = [row for row in _replicas(status, kill.kind) if row.id == kill.replica]
            if kill.noticed_s is None and (now.state != SERVING or now.restarts > restarts):
                kill.noticed_s = _event(status, kill, "lost", began) or time.time() - began
            if now.restarts > restarts and now.state == SERVING:
                kill.serving_s = _event(status, kill, "serving", began) or time.time() - began
                return True
            return False

        self._wait_until(serves_again, RECOVERY_TIMEOUT_S)

    def _wait_until(
        self, condition: Callable[[StatusSnapshot | None], object], timeout_s: float
    ) -> StatusSnapshot | None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.job.process.poll() is None:
            status = self.job.status()
            if condition(status):
                return status
            time.sleep(POLL_INTERVAL_S)
        return None


def _serving(status: StatusSnapshot | None, kind: str) -> list[ReplicaRow]:
    rows = () if status is None else _replicas(status, kind)
    return [row for row in rows if row.state == SERVING and row.pids]


def _replicas(status: StatusSnapshot, kind: str) -> Sequence[ReplicaRow]:
    return next((service.replicas for service in status.services if service.name == kind), ())


def _event(status: StatusSnapshot, kill: Kill, kind: str, began: float) -> float | None:
    """Return the seconds from the kill to the first event of a kind, by the run's timestamps."""
    key = (kill.kind, kill.replica, kind)
    times = (
        event.at - began
        for event in status.events
        if event.at >= began and (event.service, event.replica, event.what.partition(":")[0]) == key
    )
    return next(times, None)


def _cold_start(status: StatusSnapshot) -> float | None:
    """Return the longest time in seconds from starting a generator's process to serving, at the run's start."""
    first = {
        (event.replica, event.what): event.at
        for event in reversed(status.events)
        if event.service == "policy"
    }
    durations = [
        first[replica, "serving"] - at
        for (replica, what), at in first.items()
        if what == "starting" and (replica, "serving") in first
    ]
    return max(durations, default=None)


def _kill(pid: int, kind: str) -> None:
    if kind == "environment":  # the status has the guard's pid; the server is its child
        children = psutil.Process(pid).children()
        pid = children[0].pid if children else pid
    os.kill(pid, signal.SIGKILL)
