"""The sections of a run; each function adds its measurements."""

import asyncio
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

from benchmarks.containers.measures import percentile
from benchmarks.sandbox import peers
from benchmarks.sandbox.abandon import abandon as abandon_all
from benchmarks.sandbox.plan import Plan
from benchmarks.sandbox.served import executions, server
from benchmarks.sandbox.served import throughput as served_throughput
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.processes import ROOT, StartError, run

Progress = Callable[[str], None]

JUPYTER: Final = "Jupyter kernel"
RUN: Final = "docker run"
EXEC: Final = "docker exec"


def start(plan: Plan, measurements: Measurements, progress: Progress) -> None:
    """Start sessions, kernels and containers."""
    for round_ in range(plan.rounds):
        for level, preload in _contestants(plan):
            progress(f"start: {level}, {preload}, round {round_ + 1} of {plan.rounds}")
            result = _engine("start", level, preload, plan.starts)
            _times(measurements, level, _loaded(preload), result["ms"])
            measurements.add("CPU ms", level, _loaded(preload), result["cpu"])
        if plan.jupyter is not None:
            progress(f"start: {JUPYTER}, round {round_ + 1} of {plan.rounds}")
            result = peers.kernel(plan.jupyter, plan.peer_starts, 0)
            _times(measurements, JUPYTER, "", result["start_ms"])
        if plan.image is not None:
            progress(f"start: {RUN}, round {round_ + 1} of {plan.rounds}")
            _times(measurements, RUN, "", [peers.docker_run(plan.image) for _ in range(plan.peer_starts)])


def burst(plan: Plan, measurements: Measurements, progress: Progress) -> None:
    """Start many sessions at once and use each; then as many containers and jails, once only, as they take long."""

    def add(subject: str, load: str, durations: Sequence[float]) -> None:
        measurements.add("burst p50 ms", subject, load, statistics.median(durations))
        measurements.add("burst p99 ms", subject, load, percentile(durations, 99))
        measurements.add("machine's load", subject, load, os.getloadavg()[0])

    for round_ in range(plan.rounds):
        for level, preload in _contestants(plan):
            progress(f"burst: {level}, {preload}, round {round_ + 1} of {plan.rounds}")
            load = f"{plan.burst} at once, {_loaded(preload)}"
            result = _engine("burst", level, preload, plan.burst)
            add(level, load, result["ms"])
            measurements.add("burst CPU ms", level, load, result["cpu"])
    for name, command in peers.jails().items() if plan.jails else ():
        if command is None:
            measurements.notes.append(f"{name}: it is not installed here")
            continue
        progress(f"burst: {name}")
        add(name, f"{plan.burst} at once", peers.burst(command, plan.burst))
    if plan.image is not None:
        progress(f"burst: {RUN}")
        add(RUN, f"{plan.burst} at once", peers.docker_burst(plan.image, plan.burst))


def execute(plan: Plan, measurements: Measurements, progress: Progress) -> None:
    """Execute in a running session, directly and through a server; in a kernel; and in containers."""
    for round_ in range(plan.rounds):
        round_label = f"round {round_ + 1} of {plan.rounds}"
        preload = plan.preloads[-1]  # makes no difference to an execution
        for level in plan.levels:
            progress(f"execute: {level}, directly, {round_label}")
            result = _engine("execute", level, preload, plan.executions)
            _executions(measurements, level, "directly", result["ms"], result["cpu"])
            progress(f"execute: {level}, through the WebSocket, {round_label}")
            with server(level, preload) as (running, _):
                _executions(
                    measurements,
                    level,
                    "through the WebSocket",
                    *asyncio.run(executions(running, plan.executions)),
                )
        if plan.jupyter is not None:
            progress(f"execute: {JUPYTER}, {round_label}")
            result = peers.kernel(plan.jupyter, 1, max(2, plan.executions // 5))
            _executions(measurements, JUPYTER, "its own client", result["ms"], result["cpu"])
            measurements.add("MB a session", JUPYTER, "one", result["mb"])
        if plan.image is not None:
            progress(f"execute: {EXEC}, {RUN}, {round_label}")
            with peers.container(plan.image) as name:
                durations = [peers.docker_exec(name) for _ in range(plan.peer_executions)]
            _executions(measurements, EXEC, "python -c", durations)
            durations = [peers.docker_run(plan.image) for _ in range(plan.peer_executions)]
            _executions(measurements, RUN, "python -c", durations)


def throughput(plan: Plan, measurements: Measurements, progress: Progress) -> None:
    """Execute in many sessions of a server at once."""
    load = f"{plan.concurrent} sessions at once"
    for round_ in range(plan.rounds):
        for level in plan.levels:
            progress(f"throughput: {level}, round {round_ + 1} of {plan.rounds}")
            with server(level) as (running, _):
                rate, cpu = asyncio.run(served_throughput(running, plan.concurrent, plan.seconds))
            measurements.add("executions/s", level, load, rate)
            measurements.add("server and sandbox µs", level, load, cpu)


def memory(plan: Plan, measurements: Measurements, progress: Progress) -> None:
    """Measure the memory of many sessions at once."""
    for level, preload in _contestants(plan):
        progress(f"memory: {plan.live} sessions, {level}, {preload}")
        result = _engine("memory", level, preload, plan.live)
        load = f"{plan.live} live, {_loaded(preload)}"
        measurements.add("MB a session", level, load, result["mb"])
        measurements.add("server kB a session", level, load, result["server_kb"])


def loops(plan: Plan, measurements: Measurements, progress: Progress) -> None:
    """Run pure Python inside and outside the sandbox."""
    for round_ in range(plan.rounds):
        for level in plan.levels:
            progress(f"loops: {level}, round {round_ + 1} of {plan.rounds}")
            result = _engine("loops", level, "none", max(1, int(plan.loop_s * 1e3)))
            measurements.add("inside µs a turn", level, "", result["inside_us"])
            measurements.add("plain python µs a turn", level, "", result["plain_us"])
            measurements.add("inside / plain", level, "", result["inside_us"] / result["plain_us"])


def abandon(plan: Plan, measurements: Measurements, progress: Progress) -> None:
    """Open sessions, kill their clients, and measure what is left."""
    for level in plan.levels:
        left = abandon_all(level, plan.abandoned, plan.wave, progress)
        load = f"{left.sessions} abandoned, {plan.wave} at once"
        measurements.add("opened and used s", level, load, left.opened_s)
        if left.reclaimed_s is not None:
            measurements.add("reclaimed s", level, load, left.reclaimed_s)
        for name, value in (
            ("processes left", left.processes),
            ("files left", left.files),
            ("descriptors left", left.descriptors),
        ):
            measurements.add(name, level, load, value)


def with_available_levels(plan: Plan, measurements: Measurements, progress: Progress) -> Plan:
    """Return the plan with the levels available on this machine, and note why others are not."""
    levels = []
    for level in plan.levels:
        progress(f"does {level} hold here?")
        result = _run("start", level, "none", 1)
        if "refused" in result:
            measurements.notes.append(f"{level}: {result['refused']}")
        else:
            levels.append(level)
    return replace(plan, levels=tuple(levels))


def _contestants(plan: Plan) -> Iterator[tuple[str, str]]:
    return product(plan.levels, plan.preloads)


def _engine(kind: str, level: str, preload: str, count: int) -> dict[str, Any]:
    result = _run(kind, level, preload, count)
    if "refused" in result:
        raise StartError(f"expected {level} to hold with {preload} preloaded, got: {result['refused']}")
    return result


def _run(kind: str, level: str, preload: str, count: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.sandbox.engine", kind, level, preload, str(count)]
    result: dict[str, Any] = json.loads(run(command, {"PYTHONPATH": str(ROOT)}, None, 300.0))
    return result


def _loaded(preload: str) -> str:
    return "nothing preloaded" if preload == "none" else f"{preload.replace('+', ', ')} preloaded"


def _times(measurements: Measurements, subject: str, load: str, durations: Sequence[float]) -> None:
    measurements.add("start p50 ms", subject, load, statistics.median(durations))
    measurements.add("start p95 ms", subject, load, percentile(durations, 95))


def _executions(
    measurements: Measurements, subject: str, load: str, durations: Sequence[float], cpu: float | None = None
) -> None:
    measurements.add("execute p50 ms", subject, load, statistics.median(durations))
    measurements.add("execute p95 ms", subject, load, percentile(durations, 95))
    if cpu is not None:
        measurements.add("CPU µs", subject, load, cpu)
