"""What is measured, each section into the figures of the run."""

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
from benchmarks.wire.figures import Figures
from benchmarks.wire.processes import ROOT, StartError, run

Progress = Callable[[str], None]

JUPYTER: Final = "Jupyter kernel"
RUN: Final = "docker run"
EXEC: Final = "docker exec"


def start(plan: Plan, figures: Figures, progress: Progress) -> None:
    """Start sessions, kernels and containers."""
    for round_ in range(plan.rounds):
        for level, preload in _contestants(plan):
            progress(f"start: {level}, {preload}, round {round_ + 1} of {plan.rounds}")
            found = _engine("start", level, preload, plan.starts)
            _times(figures, level, _loaded(preload), found["ms"])
            figures.add("CPU ms", level, _loaded(preload), found["cpu"])
        if plan.jupyter is not None:
            progress(f"start: {JUPYTER}, round {round_ + 1} of {plan.rounds}")
            found = peers.kernel(plan.jupyter, plan.peer_starts, 0)
            _times(figures, JUPYTER, "", found["start_ms"])
        if plan.image is not None:
            progress(f"start: {RUN}, round {round_ + 1} of {plan.rounds}")
            _times(figures, RUN, "", [peers.docker_run(plan.image) for _ in range(plan.peer_starts)])


def burst(plan: Plan, figures: Figures, progress: Progress) -> None:
    """Start many sessions at once and use each, beside as many containers and jails; those once, they take long."""

    def add(who: str, load: str, took: Sequence[float]) -> None:
        figures.add("burst p50 ms", who, load, statistics.median(took))
        figures.add("burst p99 ms", who, load, percentile(took, 99))
        figures.add("machine's load", who, load, os.getloadavg()[0])

    for round_ in range(plan.rounds):
        for level, preload in _contestants(plan):
            progress(f"burst: {level}, {preload}, round {round_ + 1} of {plan.rounds}")
            load = f"{plan.burst} at once, {_loaded(preload)}"
            found = _engine("burst", level, preload, plan.burst)
            add(level, load, found["ms"])
            figures.add("burst CPU ms", level, load, found["cpu"])
    there = peers.jails()
    figures.notes += [
        f"{name}: it is not installed here" for name in ("bubblewrap", "nsjail") if name not in there
    ]
    for name, command in there.items():
        progress(f"burst: {name}")
        add(name, f"{plan.burst} at once", peers.burst(command, plan.burst))
    if plan.image is not None:
        progress(f"burst: {RUN}")
        add(RUN, f"{plan.burst} at once", peers.docker_burst(plan.image, plan.burst))


def execute(plan: Plan, figures: Figures, progress: Progress) -> None:
    """Execute in a session that is there, directly and through a server, in a kernel, and in containers."""
    for round_ in range(plan.rounds):
        told = f"round {round_ + 1} of {plan.rounds}"
        preload = plan.preloads[-1]  # makes no difference to it
        for level in plan.levels:
            progress(f"execute: {level}, directly, {told}")
            found = _engine("execute", level, preload, plan.executions)
            _executions(figures, level, "directly", found["ms"], found["cpu"])
            progress(f"execute: {level}, through the WebSocket, {told}")
            with server(level, preload) as (running, _):
                _executions(
                    figures,
                    level,
                    "through the WebSocket",
                    *asyncio.run(executions(running, plan.executions)),
                )
        if plan.jupyter is not None:
            progress(f"execute: {JUPYTER}, {told}")
            found = peers.kernel(plan.jupyter, 1, max(2, plan.executions // 5))
            _executions(figures, JUPYTER, "its own client", found["ms"], found["cpu"])
            figures.add("MB a session", JUPYTER, "one", found["mb"])
        if plan.image is not None:
            progress(f"execute: {EXEC}, {RUN}, {told}")
            with peers.container(plan.image) as name:
                took = [peers.docker_exec(name) for _ in range(plan.peer_executions)]
            _executions(figures, EXEC, "python -c", took)
            took = [peers.docker_run(plan.image) for _ in range(plan.peer_executions)]
            _executions(figures, RUN, "python -c", took)


def throughput(plan: Plan, figures: Figures, progress: Progress) -> None:
    """Execute in many sessions of a server at once."""
    load = f"{plan.concurrent} sessions at once"
    for round_ in range(plan.rounds):
        for level in plan.levels:
            progress(f"throughput: {level}, round {round_ + 1} of {plan.rounds}")
            with server(level) as (running, _):
                rate, cpu = asyncio.run(served_throughput(running, plan.concurrent, plan.seconds))
            figures.add("executions/s", level, load, rate)
            figures.add("server and sandbox µs", level, load, cpu)


def memory(plan: Plan, figures: Figures, progress: Progress) -> None:
    """Have many sessions at once."""
    for level, preload in _contestants(plan):
        progress(f"memory: {plan.live} sessions, {level}, {preload}")
        found = _engine("memory", level, preload, plan.live)
        load = f"{plan.live} live, {_loaded(preload)}"
        figures.add("MB a session", level, load, found["mb"])
        figures.add("server kB a session", level, load, found["server_kb"])


def loops(plan: Plan, figures: Figures, progress: Progress) -> None:
    """Run pure Python inside and outside."""
    for round_ in range(plan.rounds):
        for level in plan.levels:
            progress(f"loops: {level}, round {round_ + 1} of {plan.rounds}")
            found = _engine("loops", level, "none", max(1, int(plan.loop_s * 1e3)))
            figures.add("inside µs a turn", level, "", found["inside_us"])
            figures.add("plain python µs a turn", level, "", found["plain_us"])
            figures.add("inside / plain", level, "", found["inside_us"] / found["plain_us"])


def abandon(plan: Plan, figures: Figures, progress: Progress) -> None:
    """Open sessions and leave them."""
    for level in plan.levels:
        left = abandon_all(level, plan.abandoned, plan.wave, progress)
        load = f"{left.sessions} abandoned, {plan.wave} at once"
        figures.add("opened and used s", level, load, left.opened_s)
        if left.reclaimed_s is not None:
            figures.add("reclaimed s", level, load, left.reclaimed_s)
        for name, value in (
            ("processes left", left.processes),
            ("files left", left.files),
            ("descriptors left", left.descriptors),
        ):
            figures.add(name, level, load, value)


def holding(plan: Plan, figures: Figures, progress: Progress) -> Plan:
    """Return the plan with the levels that hold here, and note why others do not."""
    levels = []
    for level in plan.levels:
        progress(f"does {level} hold here?")
        found = _run("start", level, "none", 1)
        if "refused" in found:
            figures.notes.append(f"{level}: {found['refused']}")
        else:
            levels.append(level)
    return replace(plan, levels=tuple(levels))


def _contestants(plan: Plan) -> Iterator[tuple[str, str]]:
    return product(plan.levels, plan.preloads)


def _engine(what: str, level: str, preload: str, count: int) -> dict[str, Any]:
    found = _run(what, level, preload, count)
    if "refused" in found:
        raise StartError(f"expected {level} to hold with {preload} preloaded, got: {found['refused']}")
    return found


def _run(what: str, level: str, preload: str, count: int) -> dict[str, Any]:
    words = [sys.executable, "-m", "benchmarks.sandbox.engine", what, level, preload, str(count)]
    found: dict[str, Any] = json.loads(run(words, {"PYTHONPATH": str(ROOT)}, None, 300.0))
    return found


def _loaded(preload: str) -> str:
    return "nothing preloaded" if preload == "none" else f"{preload.replace('+', ', ')} preloaded"


def _times(figures: Figures, who: str, load: str, took: Sequence[float]) -> None:
    figures.add("start p50 ms", who, load, statistics.median(took))
    figures.add("start p95 ms", who, load, percentile(took, 95))


def _executions(
    figures: Figures, who: str, load: str, took: Sequence[float], cpu: float | None = None
) -> None:
    figures.add("execute p50 ms", who, load, statistics.median(took))
    figures.add("execute p95 ms", who, load, percentile(took, 95))
    if cpu is not None:
        figures.add("CPU µs", who, load, cpu)
