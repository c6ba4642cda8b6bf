"""The sections of a run: each measures all contestants in rounds and adds its measurements."""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from benchmarks.wire import contestants
from benchmarks.wire.contestants import Contestant
from benchmarks.wire.driver import DriverError, Load, Run, pin
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.plan import BOTH_CORES, ONE_CORE, Plan
from benchmarks.wire.processes import ROOT, Server, StartError, run, serving

SERVER_CORE: Final = 0
DRIVER_CORE: Final = 1

_METRICS_SESSIONS: Final = 64

Progress = Callable[[str], None]

_BARE: Final = "pass"
_IMPORTS: Final = {
    "ours": "import openenv_core; openenv_core.EnvClient",
    "released": "import openenv.core; openenv.core.EnvClient",
}


def step(plan: Plan, measurements: Measurements, progress: Progress) -> None:
    """Measure steps/s, latency, CPU per step, memory and start-up time of each server.

    The floor runs beside each server and is driven alternately with it, so that other load affects both alike.
    """
    for number in range(plan.rounds):
        for placement in plan.placements:
            for contestant in _step_contestants(plan):
                progress(f"step: round {number + 1} of {plan.rounds}, {placement}, {contestant.name}")
                core = SERVER_CORE if placement == ONE_CORE else None
                try:
                    with _driving(placement), serving(contestant.start(core)) as server:
                        _measure_steps(plan, measurements, contestant, placement, server)
                except (StartError, DriverError) as error:
                    measurements.notes.append(f"{contestant.name}, {placement}: {error}")


def _measure_steps(
    plan: Plan, measurements: Measurements, contestant: Contestant, placement: str, server: Server
) -> None:
    subject = contestant.name
    core = SERVER_CORE if placement == ONE_CORE else None
    if placement == ONE_CORE:
        measurements.add("start s", subject, "", server.started_s)
        measurements.add("memory MB", subject, "", server.memory_kb() / 1024)
    variants: dict[str, dict[str, bool]] = {subject: {}}
    if not contestant.ours:
        variants[f"{subject}, no deflate"] = {"compress": False}
    elif subject in ("ours, inline", "ours, blocking"):
        variants[f"{subject}, v1"] = {"v1": True}
    for sessions in plan.sessions:
        conditions = f"{sessions} sessions, {placement}"
        with ExitStack() as stack:
            loads = [
                (name, server, stack.enter_context(Load(server.port, sessions, **options)))
                for name, options in variants.items()
            ]
            if plan.echoes and subject != "floor":
                floor = stack.enter_context(serving(contestants.floor().start(core)))
                loads.append(("", floor, stack.enter_context(Load(floor.port, sessions))))
            turns = _drive_in_turn(plan, [(server, load) for _, server, load in loads], plan.turns)
        floor_us = turns[-1][0]
        for (name, *_), (cpu_us, result) in zip(loads, turns, strict=True):
            if result.failed:
                measurements.notes.append(f"{name or 'floor'}, {conditions}: {result.failed} steps failed")
            if not name:
                continue
            measurements.add("steps/s", name, conditions, result.steps / result.seconds)
            measurements.add("p50 ms", name, conditions, 1e3 * result.quantile(0.5))
            measurements.add("p99 ms", name, conditions, 1e3 * result.quantile(0.99))
            measurements.add("server µs a step", name, conditions, cpu_us)
            if plan.echoes:
                measurements.add("over the floor", name, conditions, cpu_us / floor_us)
    if placement == ONE_CORE:
        before_kb = server.memory_kb()
        with Load(server.port, plan.idle):
            measurements.add(
                "kB a session", subject, f"{plan.idle} idle", (server.memory_kb() - before_kb) / plan.idle
            )


def metrics(plan: Plan, measurements: Measurements, progress: Progress) -> None:
    """Measure CPU per step with and without metrics; both servers run at once and are driven alternately."""
    for number in range(plan.rounds):
        for kind in ("inline", "blocking"):
            progress(f"metrics: round {number + 1} of {plan.rounds}, {kind}")
            both = [contestants.ours(kind), contestants.ours(kind, metrics=False)]
            try:
                with _driving(ONE_CORE), ExitStack() as stack:
                    servers = [
                        stack.enter_context(serving(contestant.start(SERVER_CORE))) for contestant in both
                    ]
                    loads = [stack.enter_context(Load(server.port, _METRICS_SESSIONS)) for server in servers]
                    turns = _drive_in_turn(plan, list(zip(servers, loads, strict=True)), plan.slices)
            except (StartError, DriverError) as error:
                measurements.notes.append(f"metrics, {kind}: {error}")
                continue
            load = f"{_METRICS_SESSIONS} sessions, in turn"
            for contestant, (cpu_us, _) in zip(both, turns, strict=True):
                measurements.add("server µs a step", contestant.name, load, cpu_us)
            measurements.add("metrics on / off", f"ours, {kind}", load, turns[0][0] / turns[1][0])


def _drive_in_turn(plan: Plan, driven: Sequence[tuple[Server, Load]], turns: int) -> list[tuple[float, Run]]:
    """Return for each server the median over turns of its CPU µs per step, and its run over all turns."""
    cpu_us_by_turn: list[list[float]] = [[] for _ in driven]
    runs = [Run() for _ in driven]
    for _, load in driven:
        load.steps_for(plan.warm_up_s)
    for number in range(turns):
        order = range(len(driven)) if number % 2 else reversed(range(len(driven)))
        for index in order:
            server, load = driven[index]
            before = server.cpu_ns()
            turn = load.steps_for(plan.seconds / turns)
            cpu_us_by_turn[index].append((server.cpu_ns() - before) / 1e3 / max(1, turn.steps))
            runs[index].add(turn)
    return [(statistics.median(of_one), of_all) for of_one, of_all in zip(cpu_us_by_turn, runs, strict=True)]


def clients(plan: Plan, measurements: Measurements, progress: Progress) -> None:
    """Measure CPU per step of each client's process, all against our server."""
    kinds = ["ours", "ours-typed", *(["released"] if plan.released else [])]
    with serving(contestants.ours("inline").start(SERVER_CORE)) as server:
        for number in range(plan.rounds):
            for kind in kinds:
                progress(f"clients: round {number + 1} of {plan.rounds}, {kind}")
                for sockets in plan.sockets:
                    cpu_us = _client_us(plan, server.port, kind, sockets)
                    measurements.add("client µs a step", kind, f"{sockets} sockets", cpu_us)
                cpu_us = _client_us(plan, server.port, kind, 1, "--sync")
                measurements.add("client µs a step", kind, "1 socket, sync", cpu_us)


def _client_us(plan: Plan, port: int, kind: str, sockets: int, *more: str) -> float:
    is_ours = kind != "released"
    python = sys.executable if is_ours else str(plan.released)
    script = str(ROOT / "benchmarks" / "wire" / "client_load.py")
    numbers = [str(number) for number in (port, sockets, plan.seconds, plan.warm_up_s)]
    command = [python, script, kind, *numbers, *more]
    output = run(command, {"PYTHONPATH": str(ROOT) if is_ours else "", "PYTHONHASHSEED": "0"}, DRIVER_CORE)
    return float(json.loads(output.splitlines()[-1])["cpu_us"])


def imports(plan: Plan, measurements: Measurements, progress: Progress) -> None:
    """Measure the seconds to import a package and its client, less those of a bare interpreter."""
    packages: list[tuple[str, Path]] = [("ours", Path(sys.executable))]
    if plan.released:
        packages.append(("released", plan.released))
    for subject, python in packages:
        _import_s(subject, python)  # fills bytecode and page cache
    for number in range(plan.rounds):
        for subject, python in packages:
            progress(f"imports: round {number + 1} of {plan.rounds}, {subject}")
            measurements.add("import s", subject, "", _import_s(subject, python))


def _import_s(subject: str, python: Path) -> float:
    env = {"PYTHONPATH": str(ROOT) if subject == "ours" else ""}
    durations_s = []
    for code in (_BARE, _IMPORTS[subject]):
        start = time.perf_counter()
        run([str(python), "-c", code], env, DRIVER_CORE)
        durations_s.append(time.perf_counter() - start)
    return durations_s[1] - durations_s[0]


def concurrency(plan: Plan, measurements: Measurements, progress: Progress) -> None:
    """Measure many sessions whose step waits for a second, on one server that shares its cores with the driver."""
    plans: list[tuple[Contestant, tuple[int, ...]]] = [(contestants.ours("waiting"), plan.concurrency)]
    if plan.echoes:
        plans.insert(0, (contestants.floor("waiting"), plan.concurrency))
    if plan.released:
        plans.append((contestants.released(plan.released, "waiting"), plan.concurrency_released))
    for number in range(plan.concurrency_rounds):
        for contestant, counts in plans:
            for sessions in counts:
                progress(
                    f"concurrency: round {number + 1} of {plan.concurrency_rounds}, "
                    f"{contestant.name}, {sessions} sessions"
                )
                try:
                    with _driving(BOTH_CORES), serving(contestant.start(None)) as server:
                        _measure_waiting(plan, measurements, contestant, server, sessions)
                except (StartError, DriverError) as error:
                    measurements.notes.append(f"{contestant.name}, {sessions} waiting: {error}")


def _measure_waiting(
    plan: Plan, measurements: Measurements, contestant: Contestant, server: Server, sessions: int
) -> None:
    subject, conditions = contestant.name, f"{sessions} waiting"
    before_kb = server.memory_kb()
    with Load(server.port, sessions, partial=True) as load:
        measurements.add(
            "kB a connection", subject, conditions, (server.memory_kb() - before_kb) / max(1, load.open)
        )
        for name, spread_s in (("", plan.spread_s), (" at once", 0.0)):
            before = server.cpu_ns()
            result = load.steps_each(plan.waits, spread_s, deadline_s=60.0)
            cpu_us = (server.cpu_ns() - before) / 1e3 / max(1, result.steps)
            measurements.add(
                f"% succeed{name}", subject, conditions, 100 * result.steps / (sessions * plan.waits)
            )
            measurements.add(f"p50 s{name}", subject, conditions, result.quantile(0.5))
            measurements.add(f"p99 s{name}", subject, conditions, result.quantile(0.99))
            measurements.add(f"server µs a waiting step{name}", subject, conditions, cpu_us)


def _step_contestants(plan: Plan) -> Iterator[Contestant]:
    if plan.echoes:
        yield contestants.floor()
    yield contestants.ours("inline")
    yield contestants.ours("asynchronous")
    yield contestants.ours("blocking")
    if plan.released:
        yield contestants.released(plan.released, "sync")
        yield contestants.released(plan.released, "asynchronous")
    if plan.echoes:
        yield contestants.below_asgi()


@contextmanager
def _driving(placement: str) -> Iterator[None]:
    """Pin this process to its core, and disable garbage collection, which would stop the driver in a measurement."""
    pin(DRIVER_CORE if placement == ONE_CORE else None)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        pin(None)
