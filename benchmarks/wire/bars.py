"""Bounds that results are checked against, each computed from the measurements of a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.wire.measurements import Measurements
from benchmarks.wire.plan import BOTH_CORES, ONE_CORE


@dataclass(frozen=True, slots=True)
class Bar:
    """A measured value and the bound that it is compared with.

    Attributes:
        label: Name of the value.
        value: Measured value.
        bound: The limit.
        kind: Whether the value must be at most or at least the bound.
    """

    label: str
    value: float
    bound: float
    kind: Literal["at most", "at least"]

    @property
    def met(self) -> bool:
        """Whether the value is within the bound."""
        return self.value <= self.bound if self.kind == "at most" else self.value >= self.bound


def bars(measurements: Measurements) -> list[Bar]:
    """Return every bar that this run has measurements for."""
    return [
        *_steps(measurements),
        *_metrics(measurements),
        *_clients(measurements),
        *_concurrency(measurements),
        *_start(measurements),
    ]


def _steps(measurements: Measurements) -> Iterator[Bar]:
    for placement in (ONE_CORE, BOTH_CORES):
        for sessions in (64, 256):
            load = f"{sessions} sessions, {placement}"
            inline, v1, blocking, blocking_v1, released = (
                measurements.median("over the floor", subject, load)
                for subject in (
                    "ours, inline",
                    "ours, inline, v1",
                    "ours, blocking",
                    "ours, blocking, v1",
                    "released, sync",
                )
            )
            if inline:
                bound = 1.0 if sessions == 64 else 1.5
                yield Bar(f"server CPU, {load}: ours / floor", inline, bound, "at most")
            label = f"server CPU, {load}: ropewalk.v1 / released dialect"
            if inline and v1:
                yield Bar(label, v1 / inline, 1.25, "at most")
            if blocking and blocking_v1:
                yield Bar(f"{label}, blocking", blocking_v1 / blocking, 1.25, "at most")
            if blocking and sessions == 64:
                yield Bar(f"server CPU, {load}: ours / floor, blocking", blocking, 1.3, "at most")
            if inline and released:
                yield Bar(f"server CPU, {load}: released / ours", released / inline, 4, "at least")
            if blocking and released:
                label = f"server CPU, {load}: released / ours, blocking"
                yield Bar(label, released / blocking, 1.5, "at least")


def _metrics(measurements: Measurements) -> Iterator[Bar]:
    for load in measurements.loads("metrics on / off"):
        for kind in ("inline", "blocking"):
            value = measurements.median("metrics on / off", f"ours, {kind}", load)
            if value is not None:
                yield Bar(f"server CPU, metrics on / off, {kind}", value, 1.03, "at most")


def _clients(measurements: Measurements) -> Iterator[Bar]:
    for load in measurements.loads("client µs a step"):
        ours, released = (
            measurements.median("client µs a step", subject, load) for subject in ("ours", "released")
        )
        if ours and released:
            yield Bar(f"client CPU, {load}: ours / released", ours / released, 0.5, "at most")


def _concurrency(measurements: Measurements) -> Iterator[Bar]:
    mine, floor = "ours, waiting", "floor, waiting"
    for sessions in (8192, 16384):
        load = f"{sessions} waiting"
        succeed, p99, kb, floor_kb = (
            measurements.median(metric, subject, load)
            for metric, subject in (
                ("% succeed", mine),
                ("p99 s", mine),
                ("kB a connection", mine),
                ("kB a connection", floor),
            )
        )
        if succeed is not None:
            yield Bar(f"{sessions} sessions that wait 1 s: % succeed", succeed, 100, "at least")
        if p99 is not None and sessions == 8192:
            yield Bar(f"{sessions} sessions that wait 1 s: p99, s", p99, 1.3, "at most")
        if kb and floor_kb and sessions == 8192:
            yield Bar(f"{sessions} sessions: kB a connection, ours / floor", kb / floor_kb, 2, "at most")


def _start(measurements: Measurements) -> Iterator[Bar]:
    for metric, subject, label, bound in (
        ("import s", "ours", "import of openenv_core and EnvClient over a bare interpreter, s", 0.2),
        ("start s", "ours, inline", "server: start to healthy, s", 0.5),
        ("memory MB", "ours, inline", "server: memory after start, MB", 80.0),
    ):
        value = measurements.median(metric, subject)
        if value is not None:
            yield Bar(label, value, bound, "at most")
