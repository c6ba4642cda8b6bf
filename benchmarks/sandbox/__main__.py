"""The cost of an interpreter for untrusted code, at every level of isolation, next to Jupyter and containers.

In alternating rounds. Levels that are not available are noted and left out; containers need an engine
(scripts/docker-engine start):
  python -m benchmarks.sandbox                                 everything: about ten minutes
  python -m benchmarks.sandbox --quick                         does it run? about half a minute
  python -m benchmarks.sandbox --only start,execute --rounds 3
  python -m benchmarks.sandbox --only memory --levels lsm
  python -m benchmarks.sandbox --only abandon --check          1,000 sessions, every one reclaimed?

sections:
  start    start of a session, a Jupyter kernel, a container
  burst    100 sessions at once, each to its first result; also docker run
  execute  execution in a running session: directly, through the WebSocket, in a kernel, in a container
  memory   memory of many sessions at once
  loops    pure Python, inside and outside the sandbox
  abandon  sessions whose client is killed: is everything reclaimed?
"""

import asyncio
import json
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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        preload: A module that interpreters import in advance, or "none".
        live: Sessions whose memory is measured.
        abandoned: Sessions whose client is killed.
        starts: Sessions started one after another.
        peer_starts: Starts of a Jupyter kernel, and of `docker run`.
        burst: Sessions started and used at once.
        executions: Executions one after another.
        peer_executions: Executions through a container engine.
        loop_ms: Milliseconds of one pure-Python loop.
        wave: How many sessions are abandoned at once.
        jupyter: Whether there is a Jupyter kernel.
        engine: Whether there is an engine with the image.
    """

    rounds: int = setting(5, quick=1, option="rounds (5)")
    levels: tuple[str, ...] = setting(LEVELS, option=f"of {', '.join(LEVELS)}", read=choices(LEVELS))
    no_peers: bool = setting(False, option="leave out the Jupyter kernel and the container engine")
    jupyter_python: Path = setting(
        peers.JUPYTER_PYTHON, option="interpreter with ipykernel and jupyter_client", read=Path
    )
    preload: tuple[str, ...] = setting(("none", "numpy"), quick=("none",))
    live: int = setting(500, quick=4)
    abandoned: int = setting(1000, quick=6)
    starts: int = setting(40, quick=2)
    peer_starts: int = setting(2, quick=1)
    burst: int = setting(100, quick=4)
    executions: int = setting(500, quick=5)
    peer_executions: int = setting(5, quick=1)
    loop_ms: int = setting(250, quick=20)
    wave: int = setting(100, quick=3)
    jupyter: bool = False
    engine: bool = False

    def interpreters(self) -> Iterator[tuple[str, str]]:
        """Return the levels, each with each module."""
        return product(self.levels, self.preload)


def prepare(plan: Plan, measurements: Measurements) -> Plan:
    """Return the plan with the levels and peers of this machine; others are noted."""
    levels = []
    for level in plan.levels:
        progress(f"does {level} hold here?")
        try:
            _engine("start", level, "none", 1)
            levels.append(level)
        except BenchmarkError as error:
            measurements.notes.append(f"{level}: {error}")
    plan = replace(plan, levels=tuple(levels))
    if plan.no_peers:
        return plan
    jupyter, engine = peers.has_kernel(plan.jupyter_python), peers.has_image()
    if not jupyter:
        measurements.notes.append(peers.NO_JUPYTER.format(plan.jupyter_python))
    if not engine:
        measurements.notes.append(peers.NO_ENGINE)
    return replace(plan, jupyter=jupyter, engine=engine)


def start(plan: Plan, measurements: Measurements) -> None:
    """Start sessions, kernels and containers."""
    others = [*([(JUPYTER, "")] if plan.jupyter else ()), *([(RUN, "")] if plan.engine else ())]
    for _, (subject, preload) in in_rounds(plan.rounds, [*plan.interpreters(), *others], "start, "):
        if subject == JUPYTER:
            times_ms = peers.kernel(plan.jupyter_python, plan.peer_starts, 0)["start_ms"]
        elif subject == RUN:
            times_ms = [peers.docker_run() for _ in range(plan.peer_starts)]
        else:
            times_ms = _engine("start", subject, preload, plan.starts)
        measurements.add_times("start", subject, _loaded(preload), times_ms)


def burst(plan: Plan, measurements: Measurements) -> None:
    """Start many sessions at once and use each; then as many containers, once only, as they take long."""
    for _, (level, preload) in in_rounds(plan.rounds, plan.interpreters(), "burst, "):
        times_ms = _engine("burst", level, preload, plan.burst)
        measurements.add_times(
            "burst", level, f"{plan.burst} at once, {_loaded(preload)}", times_ms, (50, 99)
        )
    if plan.engine:
        progress(f"burst: {RUN}")
        times_ms = peers.docker_burst(plan.burst)
        measurements.add_times("burst", RUN, f"{plan.burst} at once", times_ms, (50, 99))


def execute(plan: Plan, measurements: Measurements) -> None:
    """Execute in a running session, directly and through a server; in a kernel; and in containers."""
    preload = plan.preload[-1]  # makes no difference to an execution
    others = [*([JUPYTER] if plan.jupyter else ()), *([EXEC, RUN] if plan.engine else ())]
    for _, subject in in_rounds(plan.rounds, [*plan.levels, *others], "execute, "):
        if subject == JUPYTER:
            result = peers.kernel(plan.jupyter_python, 1, max(2, plan.executions // 5))
            measurements.add_times("execute", JUPYTER, "its own client", result["ms"])
            measurements.add("MB a session", JUPYTER, "one", result["mb"])
        elif subject == EXEC:
            with peers.container() as name:
                times_ms = [peers.docker_exec(name) for _ in range(plan.peer_executions)]
            measurements.add_times("execute", EXEC, "python -c", times_ms)
        elif subject == RUN:
            times_ms = [peers.docker_run() for _ in range(plan.peer_executions)]
            measurements.add_times("execute", RUN, "python -c", times_ms)
        else:
            times_ms = _engine("execute", subject, preload, plan.executions)
            measurements.add_times("execute", subject, "directly", times_ms)
            with served.server(subject, preload) as (running, _):
                times_ms = asyncio.run(served.executions(running, plan.executions))
            measurements.add_times("execute", subject, "through the WebSocket", times_ms)


def memory(plan: Plan, measurements: Measurements) -> None:
    """Measure the memory of many sessions at once."""
    for _, (level, preload) in in_rounds(1, plan.interpreters(), f"memory of {plan.live} sessions, "):
        (mb,) = _engine("memory", level, preload, plan.live)
        measurements.add("MB a session", level, f"{plan.live} live, {_loaded(preload)}", mb)


def loops(plan: Plan, measurements: Measurements) -> None:
    """Run pure Python inside and outside the sandbox."""
    for _, level in in_rounds(plan.rounds, plan.levels, "loops, "):
        (times,) = _engine("loops", level, "none", plan.loop_ms)
        measurements.add("inside / plain", level, "", times)


def abandon(plan: Plan, measurements: Measurements) -> None:
    """Open sessions, kill their clients, and measure what is left."""
    for level in plan.levels:
        load = f"{plan.abandoned} abandoned, {plan.wave} at once"
        measurements.add_all(level, load, served.abandon(level, plan.abandoned, plan.wave))


def _engine(kind: str, level: str, preload: str, count: int) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.sandbox.engine", kind, level, preload, str(count)]
    result: Any = json.loads(run(command, timeout_s=300.0))
    if isinstance(result, str):
        raise BenchmarkError(f"expected {level} to hold with {preload} preloaded, got: {result}")
    values: list[float] = result
    return values


def _loaded(preload: str) -> str:
    return f"{preload.replace('none', 'nothing')} preloaded" if preload else ""


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
    for what, figure, bound in (
        ("warm execute", "execute p50 ms", 1.0),
        ("memory", "MB a session", 5.0),
        ("loops in pure Python", "inside / plain", 1.05),
    ):
        for level, load in measurements.measured(figure):
            if level in LEVELS and load != "directly":
                label = ", ".join(filter(None, (what, level, load)))
                yield from at_most(f"{label}: {figure}", median(figure, level, load), bound)
    for level, load in measurements.measured(LEFT[0]):
        left = sum(median(figure, level, load) or 0 for figure in LEFT)
        yield from at_most(f"{load}, {level}: processes, files, descriptors left", left, 0)


BENCHMARK = Benchmark(
    about=__doc__,
    plan=Plan,
    sections=(start, burst, execute, memory, loops, abandon),
    tables={
        "Start of a session": ("start p50 ms", "start p95 ms"),
        "Sessions started at once, each to its first result": ("burst p50 ms", "burst p99 ms"),
        "Warm execute": ("execute p50 ms", "execute p95 ms"),
        "Memory, proportional": ("MB a session",),
        "Loops in pure Python, CPU time": ("inside / plain",),
        "Sessions abandoned by clients that are killed": LEFT,
    },
    bars=bars,
    prepare=prepare,
)

if __name__ == "__main__":
    main("sandbox")
