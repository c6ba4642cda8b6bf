"""The cost of an interpreter for untrusted code, at every level of isolation, next to Jupyter and containers.

In alternating rounds. Levels that are not available are noted and left out; containers need an engine
(scripts/docker-engine start):
  python -m benchmarks.sandbox                                 everything: about ten minutes
  python -m benchmarks.sandbox --quick                         does it run? about half a minute
  python -m benchmarks.sandbox --only start,execute --rounds 3
  python -m benchmarks.sandbox --only memory --live 100 --levels lsm
  python -m benchmarks.sandbox --only abandon --check          1,000 sessions, every one reclaimed?
  python -m benchmarks.sandbox --preload none,numpy+matplotlib.pyplot

sections:
  start       start of a session, a Jupyter kernel, a container
  burst       100 sessions at once, each to its first result; also docker run, bubblewrap and nsjail
  execute     execution in a running session: directly, through the WebSocket, in a kernel, in a container
  throughput  executions of many sessions of one server at once
  memory      memory of many sessions at once
  loops       pure Python, inside and outside the sandbox
  abandon     sessions whose client is killed: is everything reclaimed?
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import (
    Bar,
    Benchmark,
    BenchmarkError,
    Measurements,
    at_most,
    choices,
    in_rounds,
    main,
    progress,
    ratio,
    setting,
)
from benchmarks.processes import run
from benchmarks.sandbox import peers, served
from openenv_core.sandbox.config import LADDER

LEVELS: Final = tuple(map(str, LADDER))
JUPYTER: Final = "Jupyter kernel"
RUN: Final = "docker run"
EXEC: Final = "docker exec"
LEFT: Final = ("processes left", "files left", "descriptors left")
START_MS: Final = {"namespaces": 30.0, "lsm": 15.0}
"""Bound of a start's median at each level."""


def read_modules(text: str) -> tuple[str, ...]:
    """Parse sets of modules: names joined by "+", or "none"."""
    names = tuple(text.replace(",", " ").split())
    parts = [part for name in names for part in name.replace("+", ".").split(".")]
    if not names or not all(part.isidentifier() for part in parts):
        raise argparse.ArgumentTypeError(f"expected names of modules, got {text!r}")
    return names


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        starts: Sessions started one after another.
        peer_starts: Starts of a Jupyter kernel, and of `docker run`.
        burst: Sessions started and used at once.
        executions: Executions one after another.
        peer_executions: Executions through a container engine.
        concurrent: Sessions that execute at once.
        seconds: Duration of the throughput section.
        loop_ms: Milliseconds of one pure-Python loop.
        wave: How many sessions are abandoned at once.
        jupyter: Whether there is a Jupyter kernel.
        engine: Whether there is an engine with the image.
    """

    rounds: int = setting(5, quick=1, option="rounds (5)")
    levels: tuple[str, ...] = setting(LEVELS, option=f"of {', '.join(LEVELS)}", read=choices(LEVELS))
    preload: tuple[str, ...] = setting(
        ("none", "numpy"),
        quick=("none",),
        option="sets of modules, joined by +, that interpreters import in advance (none,numpy)",
        read=read_modules,
    )
    live: int = setting(500, quick=4, option="sessions whose memory is measured (500)")
    abandoned: int = setting(1000, quick=6, option="sessions to abandon (1000)")
    no_peers: bool = setting(False, option="leave out the Jupyter kernel, the container engine and the jails")
    jupyter_python: Path = setting(
        peers.JUPYTER_PYTHON, option="interpreter with ipykernel and jupyter_client", read=Path
    )
    image: str = setting(peers.IMAGE, option=f"image of the containers ({peers.IMAGE})", read=str)
    starts: int = setting(40, quick=2)
    peer_starts: int = setting(2, quick=1)
    burst: int = setting(100, quick=4)
    executions: int = setting(500, quick=5)
    peer_executions: int = setting(5, quick=1)
    concurrent: int = setting(32, quick=2)
    seconds: float = setting(2.0, quick=0.2)
    loop_ms: int = setting(250, quick=20)
    wave: int = setting(100, quick=3)
    jupyter: bool = False
    engine: bool = False

    def interpreters(self) -> Iterator[tuple[str, str]]:
        """Return the levels, each with each set of modules."""
        return product(self.levels, self.preload)


def prepare(plan: Plan, measurements: Measurements) -> Plan:
    """Return the plan with the levels and peers of this machine; others are noted."""
    levels = []
    for level in plan.levels:
        progress(f"does {level} hold here?")
        result = _run("start", level, "none", 1)
        if "refused" in result:
            measurements.notes.append(f"{level}: {result['refused']}")
        else:
            levels.append(level)
    plan = replace(plan, levels=tuple(levels))
    if plan.no_peers:
        return plan
    jupyter, engine = peers.has_kernel(plan.jupyter_python), peers.has_image(plan.image)
    if not jupyter:
        measurements.notes.append(peers.NO_JUPYTER.format(plan.jupyter_python))
    if not engine:
        measurements.notes.append(peers.NO_ENGINE.format(plan.image))
    return replace(plan, jupyter=jupyter, engine=engine)


def start(plan: Plan, measurements: Measurements) -> None:
    """Start sessions, kernels and containers."""
    others = [*([(JUPYTER, "")] if plan.jupyter else ()), *([(RUN, "")] if plan.engine else ())]
    for _, (subject, preload) in in_rounds(plan.rounds, [*plan.interpreters(), *others], "start, "):
        if subject == JUPYTER:
            times_ms = peers.kernel(plan.jupyter_python, plan.peer_starts, 0)["start_ms"]
        elif subject == RUN:
            times_ms = [peers.docker_run(plan.image) for _ in range(plan.peer_starts)]
        else:
            result = _engine("start", subject, preload, plan.starts)
            measurements.add("CPU ms", subject, _loaded(preload), result["cpu"])
            times_ms = result["ms"]
        measurements.add_times("start", subject, _loaded(preload), times_ms)


def burst(plan: Plan, measurements: Measurements) -> None:
    """Start many sessions at once and use each; then as many containers and jails, once only, as they take long."""

    def add(subject: str, load: str, times_ms: list[float]) -> None:
        measurements.add_times("burst", subject, load, times_ms, (50, 99))
        measurements.add("machine's load", subject, load, os.getloadavg()[0])

    for _, (level, preload) in in_rounds(plan.rounds, plan.interpreters(), "burst, "):
        load = f"{plan.burst} at once, {_loaded(preload)}"
        result = _engine("burst", level, preload, plan.burst)
        add(level, load, result["ms"])
        measurements.add("burst CPU ms", level, load, result["cpu"])
    if plan.no_peers:
        return
    for name, command in peers.burst_commands(plan.image if plan.engine else None).items():
        progress(f"burst: {name}")
        times_ms = peers.burst(command, plan.burst)
        if times_ms is None:
            measurements.notes.append(f"{name}: it is not installed here")
        else:
            add(name, f"{plan.burst} at once", times_ms)


def execute(plan: Plan, measurements: Measurements) -> None:
    """Execute in a running session, directly and through a server; in a kernel; and in containers."""
    preload = plan.preload[-1]  # makes no difference to an execution
    others = [*([JUPYTER] if plan.jupyter else ()), *([EXEC, RUN] if plan.engine else ())]
    for _, subject in in_rounds(plan.rounds, [*plan.levels, *others], "execute, "):
        if subject == JUPYTER:
            result = peers.kernel(plan.jupyter_python, 1, max(2, plan.executions // 5))
            measurements.add_times("execute", JUPYTER, "its own client", result["ms"])
            measurements.add("CPU µs", JUPYTER, "its own client", result["cpu"])
            measurements.add("MB a session", JUPYTER, "one", result["mb"])
        elif subject == EXEC:
            with peers.container(plan.image) as name:
                times_ms = [peers.docker_exec(name) for _ in range(plan.peer_executions)]
            measurements.add_times("execute", EXEC, "python -c", times_ms)
        elif subject == RUN:
            times_ms = [peers.docker_run(plan.image) for _ in range(plan.peer_executions)]
            measurements.add_times("execute", RUN, "python -c", times_ms)
        else:
            result = _engine("execute", subject, preload, plan.executions)
            measurements.add_times("execute", subject, "directly", result["ms"])
            measurements.add("CPU µs", subject, "directly", result["cpu"])
            with served.server(subject, preload) as (running, _):
                times_ms, cpu_us = asyncio.run(served.executions(running, plan.executions))
            measurements.add_times("execute", subject, "through the WebSocket", times_ms)
            measurements.add("CPU µs", subject, "through the WebSocket", cpu_us)


def throughput(plan: Plan, measurements: Measurements) -> None:
    """Execute in many sessions of a server at once."""
    for _, level in in_rounds(plan.rounds, plan.levels, "throughput, "):
        with served.server(level) as (running, _):
            rate, cpu_us = asyncio.run(served.throughput(running, plan.concurrent, plan.seconds))
        found = {"executions/s": rate, "server and sandbox µs": cpu_us}
        measurements.add_all(level, f"{plan.concurrent} sessions at once", found)


def memory(plan: Plan, measurements: Measurements) -> None:
    """Measure the memory of many sessions at once."""
    for _, (level, preload) in in_rounds(1, plan.interpreters(), f"memory of {plan.live} sessions, "):
        result = _engine("memory", level, preload, plan.live)
        found = {"MB a session": result["mb"], "server kB a session": result["server_kb"]}
        measurements.add_all(level, f"{plan.live} live, {_loaded(preload)}", found)


def loops(plan: Plan, measurements: Measurements) -> None:
    """Run pure Python inside and outside the sandbox."""
    for _, level in in_rounds(plan.rounds, plan.levels, "loops, "):
        result = _engine("loops", level, "none", plan.loop_ms)
        inside, plain = result["inside_us"], result["plain_us"]
        found = {
            "inside µs a turn": inside,
            "plain python µs a turn": plain,
            "inside / plain": inside / plain,
        }
        measurements.add_all(level, "", found)


def abandon(plan: Plan, measurements: Measurements) -> None:
    """Open sessions, kill their clients, and measure what is left."""
    for level in plan.levels:
        load = f"{plan.abandoned} abandoned, {plan.wave} at once"
        measurements.add_all(level, load, served.abandon(level, plan.abandoned, plan.wave))


def _engine(kind: str, level: str, preload: str, count: int) -> dict[str, Any]:
    result = _run(kind, level, preload, count)
    if "refused" in result:
        raise BenchmarkError(f"expected {level} to hold with {preload} preloaded, got: {result['refused']}")
    return result


def _run(kind: str, level: str, preload: str, count: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.sandbox.engine", kind, level, preload, str(count)]
    result: dict[str, Any] = json.loads(run(command, timeout_s=300.0))
    return result


def _loaded(preload: str) -> str:
    if preload in ("", "none"):
        return preload and "nothing preloaded"
    return f"{preload.replace('+', ', ')} preloaded"


def derive(measurements: Measurements) -> None:
    """Add how many times longer the peers take than each of our levels."""
    for what, others in (("start", (JUPYTER, RUN)), ("execute", (JUPYTER, EXEC, RUN))):
        figure = f"{what} p50 ms"
        for ours, peer in product(measurements.measured(figure), repeat=2):
            if ours[0] in LEVELS and peer[0] in others:
                times = ratio(measurements.median(figure, *peer), measurements.median(figure, *ours))
                measurements.add("times as long", f"{what}: {peer[0]} / {', '.join(ours)}", "", times)


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    median = measurements.median
    for level, load in measurements.measured("start p50 ms"):
        if level in START_MS:
            label = f"start of a session, {level}, {load}: p50, ms"
            yield from at_most(label, median("start p50 ms", level, load), START_MS[level])
    bursts = measurements.measured("burst p99 ms")
    docker = next((median("burst p99 ms", *key) for key in bursts if key[0] == RUN), None)
    for level, load in bursts:
        if level in START_MS:
            p99 = median("burst p99 ms", level, load)
            yield from at_most(f"{load}, {level}: p99, ms", p99, 1000.0)
            yield from at_most(f"{load}, {level}: p99 / {RUN}", ratio(p99, docker), 1 / 20)
    for level, load in measurements.measured("execute p50 ms"):
        if load == "through the WebSocket":
            label = f"warm execute {load}, {level}: p50, ms"
            yield from at_most(label, median("execute p50 ms", level, load), 1.0)
    for level, load in measurements.measured("server kB a session"):
        label = f"memory, {level}, {load}: MB a session"
        yield from at_most(label, median("MB a session", level, load), 5.0)
    for level, load in measurements.measured("inside / plain"):
        label = f"loops in pure Python, {level}: inside / plain"
        yield from at_most(label, median("inside / plain", level, load), 1.05)
    for level, load in measurements.measured(LEFT[0]):
        left = sum(median(figure, level, load) or 0 for figure in LEFT)
        yield from at_most(f"{load}, {level}: processes, files, descriptors left", left, 0)


BENCHMARK = Benchmark(
    about=__doc__,
    plan=Plan,
    sections=(start, burst, execute, throughput, memory, loops, abandon),
    tables={
        "Start of a session": ("start p50 ms", "start p95 ms", "CPU ms"),
        "Sessions started at once, each to its first result": (
            *("burst p50 ms", "burst p99 ms", "burst CPU ms", "machine's load"),
        ),
        "Warm execute": ("execute p50 ms", "execute p95 ms", "CPU µs"),
        "Sessions that execute at once": ("executions/s", "server and sandbox µs"),
        "Memory, proportional": ("MB a session", "server kB a session"),
        "Loops in pure Python, CPU time": ("inside µs a turn", "plain python µs a turn", "inside / plain"),
        "Sessions abandoned by clients that are killed": ("opened and used s", "reclaimed s", *LEFT),
        "Peers relative to ours": ("times as long",),
    },
    bars=bars,
    prepare=prepare,
    derive=derive,
)

if __name__ == "__main__":
    main("sandbox")
