"""The cost of a step over the wire: the released server, the floor of the stack, and ours.

Each in its own process, in alternating rounds under one driver:
  python -m benchmarks.wire                                everything: about 15 minutes
  python -m benchmarks.wire --quick                        does it run? about half a minute
  python -m benchmarks.wire --only step --rounds 3         servers only
  python -m benchmarks.wire --only metrics --rounds 9      the cost of metrics
  python -m benchmarks.wire --only clients,imports         the cost on the client's side

sections:
  step         steps/s, latency, server CPU per step, memory, start-up
  metrics      server CPU per step with metrics, relative to without
  clients      CPU per step of our client and the released one
  imports      seconds over a bare interpreter
  concurrency  thousands of sessions whose step waits for a second
"""

import gc
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Final

from benchmarks.harness import (
    Bar,
    Benchmark,
    BenchmarkError,
    Measurements,
    at_least,
    at_most,
    in_rounds,
    main,
    ratio,
    setting,
)
from benchmarks.processes import (
    BARE_WEBSOCKET,
    NO_RELEASED,
    RELEASED_PYTHON,
    Server,
    run,
    serve_command,
    serving,
    uvicorn_command,
)
from benchmarks.wire.driver import Load, Run, pin

SERVER_CORE: Final = 0
DRIVER_CORE: Final = 1
ONE_CORE: Final = "one core"
BOTH_CORES: Final = "free"
"""Where a server may run: pinned to a core that the driver does not use, or unpinned, as most servers run."""

_METRICS_SESSIONS: Final = 64

HASH_SEED: Final = {"PYTHONHASHSEED": "0"}
"""A fixed one removes a difference between rounds."""
NOT_OURS: Final = {"PYTHONPATH": ""}
"""So that the released package cannot import ours."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        seconds: Duration of one measurement of steps.
        warm_up_s: Duration of its warm-up.
        placements: Where the servers of the step section run.
        sessions: The loads of the step section.
        turns: Turns of each server in a round of the step section; servers alternate, so that other load of the
            machine affects all alike.
        slices: Turns of each server in a round of the metrics section.
        sockets: The loads of the clients section.
        idle: Idle sessions whose memory is measured.
        concurrency: Numbers of sessions whose step waits for a second.
        concurrency_released: The same number for the released server, which has a thread for each.
        waits: Steps that each of those sessions takes.
        spread_s: Seconds over which their first steps are spread.
        released: The interpreter of the installation that has the released package; None if there is none.
    """

    rounds: int = setting(5, quick=1, option="rounds (5)")
    released_python: Path = setting(
        RELEASED_PYTHON, option="interpreter of an installation of the released package", read=Path
    )
    seconds: float = setting(1.5, quick=0.1)
    warm_up_s: float = setting(0.3, quick=0.05)
    placements: tuple[str, ...] = setting((ONE_CORE, BOTH_CORES), quick=(ONE_CORE,))
    sessions: tuple[int, ...] = setting((64, 256), quick=(8,))
    turns: int = setting(15, quick=2)
    slices: int = setting(40, quick=2)
    sockets: tuple[int, ...] = setting((1, 16, 64), quick=(4,))
    idle: int = setting(1024, quick=32)
    concurrency: tuple[int, ...] = setting((8192, 16384), quick=(64,))
    concurrency_released: int = setting(1024, quick=16)
    waits: int = setting(4, quick=1)
    spread_s: float = setting(1.0, quick=0.1)
    released: Path | None = None


@dataclass(frozen=True, slots=True)
class Contestant:
    """One server with one kind of environment.

    Attributes:
        name: Name in the measurements.
        command: Command that starts it.
        env: Environment variables.
        how: How it is started; its floor is started so too.
        health: Whether it has a /health.
    """

    name: str
    command: tuple[str, ...]
    how: str = "ropewalk serve"
    env: Mapping[str, str] = field(default_factory=dict)
    health: bool = True

    def serving(self, core: int | None) -> AbstractContextManager[Server]:
        """Run it on a free port."""
        return serving(self.command, {**HASH_SEED, **self.env}, core=core, health=self.health)


SERVE: Final = "ropewalk serve"
UVICORN: Final = "uvicorn"
BARE_UVICORN: Final = "uvicorn, sansio, no deflate"
"""How a server is started: by our command, by uvicorn as images of the released style are, and with the cheaper
protocol and without compression."""


def _command(how: str, app: str) -> tuple[str, ...]:
    if how == SERVE:
        return serve_command(app)
    return uvicorn_command(app, *(BARE_WEBSOCKET if how == BARE_UVICORN else ()))


def _name(subject: str, how: str) -> str:
    return subject if how == SERVE else f"{subject}, {how}"


def ours(kind: str, how: str = SERVE, *, metrics: bool = True) -> Contestant:
    """Return our server, with or without metrics."""
    name = _name(f"ours, {kind}" if metrics else f"ours, {kind}, no metrics", how)
    env = {"ROPEWALK_METRICS": str(int(metrics))}
    return Contestant(name, _command(how, f"benchmarks.wire.ours:{kind}"), how, env)


def floor(kind: str = "plain", how: str = SERVE) -> Contestant:
    """Return the floor: a bare echo under the same command and options."""
    name = _name("floor" if kind == "plain" else f"floor, {kind}", how)
    return Contestant(name, _command(how, f"benchmarks.wire.floor:{kind}"), how)


def released(python: Path, kind: str) -> Contestant:
    """Return the released server as its documentation runs it."""
    command = uvicorn_command(f"released:{kind}", "--app-dir", "benchmarks/wire", python=python)
    return Contestant(f"released, {kind}", command, UVICORN, NOT_OURS)


def below_asgi() -> Contestant:
    """Return the echo on a WebSocket stack below ASGI."""
    command = (sys.executable, "-m", "benchmarks.wire.below_asgi", "{port}")
    return Contestant("below ASGI", command, BARE_UVICORN, health=False)


def prepare(plan: Plan, measurements: Measurements) -> Plan:
    """Return the plan for this machine, note a missing released package, and raise the limit of open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # servers inherit it
    python = plan.released_python.absolute()
    if not python.exists():
        measurements.notes.append(NO_RELEASED.format(python))
        return plan
    return replace(plan, released=python)


def step(plan: Plan, measurements: Measurements) -> None:
    """Measure steps/s, latency, CPU per step, memory and start-up time of each server.

    The floor runs beside each server and is driven alternately with it, so that other load affects both alike.
    """
    for _, (placement, contestant) in in_rounds(
        plan.rounds, product(plan.placements, _step_contestants(plan)), "step, "
    ):
        core = SERVER_CORE if placement == ONE_CORE else None
        with _driving(placement, measurements, contestant.name), contestant.serving(core) as server:
            _measure_steps(plan, measurements, contestant, placement, server, core)


def _measure_steps(
    plan: Plan,
    measurements: Measurements,
    contestant: Contestant,
    placement: str,
    server: Server,
    core: int | None,
) -> None:
    subject = contestant.name
    if placement == ONE_CORE:
        measurements.add("start s", subject, "", server.started_s)
        measurements.add("memory MB", subject, "", server.memory_kb() / 1024)
    for sessions in plan.sessions:
        conditions = f"{sessions} sessions, {placement}"
        with ExitStack() as stack:
            beside = stack.enter_context(floor(how=contestant.how).serving(core))
            servers = {subject: server, f"{subject}, v1": server, "": beside}
            if not subject.startswith(("ours, inline", "ours, blocking")):
                del servers[f"{subject}, v1"]
            driven = [
                (each, stack.enter_context(Load(each.port, sessions, v1=name.endswith("v1"))))
                for name, each in servers.items()
            ]
            *turns, (floor_us, _) = _drive_in_turn(plan, driven, plan.turns)
        for name, (cpu_us, result) in zip(servers, turns, strict=False):
            if result.failed:
                measurements.notes.append(f"{name}, {conditions}: {result.failed} steps failed")
            found = {
                "steps/s": result.steps / result.seconds,
                "p50 ms": 1e3 * result.percentile_s(50),
                "p99 ms": 1e3 * result.percentile_s(99),
                "server µs a step": cpu_us,
                "over the floor": cpu_us / floor_us,
            }
            measurements.add_all(name, conditions, found)
    if placement == ONE_CORE:
        before_kb = server.memory_kb()
        with Load(server.port, plan.idle):
            grown_kb = (server.memory_kb() - before_kb) / plan.idle
            measurements.add("kB a session", subject, f"{plan.idle} idle", grown_kb)


def metrics(plan: Plan, measurements: Measurements) -> None:
    """Measure CPU per step with and without metrics; both servers run at once and are driven alternately."""
    load = f"{_METRICS_SESSIONS} sessions, in turn"
    for _, kind in in_rounds(plan.rounds, ("inline", "blocking"), "metrics, "):
        with _driving(ONE_CORE, measurements, f"metrics, {kind}"), ExitStack() as stack:
            servers = [
                stack.enter_context(ours(kind, metrics=metrics).serving(SERVER_CORE))
                for metrics in (True, False)
            ]
            loads = [stack.enter_context(Load(server.port, _METRICS_SESSIONS)) for server in servers]
            turns = _drive_in_turn(plan, list(zip(servers, loads, strict=True)), plan.slices)
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


def clients(plan: Plan, measurements: Measurements) -> None:
    """Measure CPU per step of each client's process, all against our server."""
    pythons = _pythons(plan)
    ways = [*((sockets, "") for sockets in plan.sockets), (1, "--sync")]
    with ours("inline").serving(SERVER_CORE) as server:
        for _, (kind, (sockets, how)) in in_rounds(plan.rounds, product(pythons, ways), "clients, "):
            words = (server.port, sockets, plan.seconds, plan.warm_up_s, *([how] if how else ()))
            command = [str(pythons[kind]), "benchmarks/wire/client_load.py", kind, *map(str, words)]
            output = run(command, _client_env(kind), core=DRIVER_CORE)
            cpu_us = float(output.splitlines()[-1])
            load = "1 socket, sync" if how else f"{sockets} sockets"
            measurements.add("client µs a step", kind, load, cpu_us)


def _pythons(plan: Plan) -> dict[str, Path]:
    """Return the interpreter of each package."""
    return {"ours": Path(sys.executable), **({"released": plan.released} if plan.released else {})}


def _client_env(kind: str) -> dict[str, str]:
    return HASH_SEED | (NOT_OURS if kind == "released" else {})


def imports(plan: Plan, measurements: Measurements) -> None:
    """Measure the seconds to import a package and its client, less those of a bare interpreter."""
    pythons = _pythons(plan)
    for subject, python in pythons.items():
        _import_s(subject, python)  # fills bytecode and page cache
    for _, subject in in_rounds(plan.rounds, pythons, "imports, "):
        measurements.add("import s", subject, "", _import_s(subject, pythons[subject]))


def _import_s(subject: str, python: Path) -> float:
    package = "openenv.core" if subject == "released" else "openenv_core"
    durations_s = []
    for code in ("pass", f"import {package}; {package}.EnvClient"):
        start = time.perf_counter()
        run([str(python), "-c", code], _client_env(subject), core=DRIVER_CORE)
        durations_s.append(time.perf_counter() - start)
    return durations_s[1] - durations_s[0]


def concurrency(plan: Plan, measurements: Measurements) -> None:
    """Measure many sessions whose step waits for a second, on one server that shares its cores with the driver.

    Three rounds at most.
    """
    loads = [*product((floor("waiting"), ours("waiting")), plan.concurrency)]
    if plan.released:
        loads.append((released(plan.released, "waiting"), plan.concurrency_released))
    for _, (contestant, sessions) in in_rounds(min(3, plan.rounds), loads, "concurrency, "):
        subject, conditions = contestant.name, f"{sessions} waiting"
        with (
            _driving(BOTH_CORES, measurements, f"{subject}, {conditions}"),
            contestant.serving(None) as server,
        ):
            before_kb = server.memory_kb()
            with Load(server.port, sessions) as load:
                kb = (server.memory_kb() - before_kb) / sessions
                before = server.cpu_ns()
                spread = load.steps_each(plan.waits, plan.spread_s, deadline_s=60.0)
                cpu_us = (server.cpu_ns() - before) / 1e3 / max(1, spread.steps)
                at_once = load.steps_each(plan.waits, 0.0, deadline_s=60.0)
            found = {
                "% succeed": 100 * spread.steps / (sessions * plan.waits),
                "p50 s": spread.percentile_s(50),
                "p99 s": spread.percentile_s(99),
                "p99 s at once": at_once.percentile_s(99),
                "server µs a waiting step": cpu_us,
                "kB a connection": kb,
            }
            measurements.add_all(subject, conditions, found)


def _step_contestants(plan: Plan) -> Iterator[Contestant]:
    for how in (SERVE, UVICORN, BARE_UVICORN):
        yield floor(how=how)
        yield ours("inline", how)
        yield ours("blocking", how)
    yield ours("asynchronous")
    if plan.released:
        yield released(plan.released, "sync")
    yield below_asgi()


@contextmanager
def _driving(placement: str, measurements: Measurements, what: str) -> Iterator[None]:
    """Pin this process to its core, disable garbage collection, which would stop the driver, and note a failure."""
    pin(DRIVER_CORE if placement == ONE_CORE else None)
    gc.disable()
    try:
        yield
    except BenchmarkError as error:
        measurements.notes.append(f"{what}, {placement}: {error}")
    finally:
        gc.enable()
        pin(None)


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    median = measurements.median
    for placement, sessions in product((ONE_CORE, BOTH_CORES), (64, 256)):
        load = f"{sessions} sessions, {placement}"
        label = f"server CPU, {load}"
        over = {
            name: median("over the floor", name, load) for name, _ in measurements.measured("over the floor")
        }
        for how in (SERVE, UVICORN, BARE_UVICORN):
            inline, blocking = (over.get(_name(f"ours, {kind}", how)) for kind in ("inline", "blocking"))
            limits = (1.25, 1.6) if how == SERVE else (1.5, 2.0)
            yield from at_most(f"{label}, {how}: ours / floor", inline, limits[0])
            yield from at_most(f"{label}, {how}: ours / floor, blocking", blocking, limits[1])
            for kind, one in (("inline", inline), ("blocking", blocking)):
                v1 = over.get(f"{_name(f'ours, {kind}', how)}, v1")
                yield from at_most(
                    f"{label}, {how}: ropewalk.v1 / released dialect, {kind}", ratio(v1, one), 1.3
                )
        cpu = {
            name: median("server µs a step", name, load)
            for name in ("ours, inline", "ours, blocking", "released, sync")
        }
        for kind, limit in (("inline", 4), ("blocking", 1.5)):
            times = ratio(cpu["released, sync"], cpu[f"ours, {kind}"])
            yield from at_least(f"{label}: released / ours, {kind}", times, limit)
    for subject, load in measurements.measured("metrics on / off"):
        label = f"server CPU, metrics on / off, {subject.removeprefix('ours, ')}"
        yield from at_most(label, median("metrics on / off", subject, load), 1.03)
    for load in measurements.loads("client µs a step"):
        both = (median("client µs a step", subject, load) for subject in ("ours", "released"))
        yield from at_most(f"client CPU, {load}: ours / released", ratio(*both), 0.5)
    for sessions in (8192, 16384):
        load, label = f"{sessions} waiting", f"{sessions} sessions that wait 1 s"
        yield from at_least(f"{label}: % succeed", median("% succeed", "ours, waiting", load), 100)
        if sessions == 8192:
            yield from at_most(f"{label}: p99, s", median("p99 s", "ours, waiting", load), 1.3)
            kb = (median("kB a connection", f"{whose}, waiting", load) for whose in ("ours", "floor"))
            yield from at_most(f"{sessions} sessions: kB a connection, ours / floor", ratio(*kb), 2)
    label = "import of openenv_core and EnvClient over a bare interpreter, s"
    yield from at_most(label, median("import s", "ours"), 0.2)
    yield from at_most("server: start to healthy, s", median("start s", "ours, inline"), 0.5)
    yield from at_most("server: memory after start, MB", median("memory MB", "ours, inline"), 80.0)


BENCHMARK = Benchmark(
    about=__doc__,
    plan=Plan,
    sections=(step, metrics, clients, imports, concurrency),
    tables={
        "Steps": ("steps/s", "p50 ms", "p99 ms", "server µs a step", "over the floor"),
        "Cost of metrics: server CPU": ("metrics on / off",),
        "Clients: CPU of the client's process, against our server": ("client µs a step",),
        "Memory of idle sessions": ("kB a session",),
        "Starting": ("start s", "memory MB", "import s"),
        "Sessions whose step waits for 1 s, four steps each: started over 1 s, then all at once": (
            *("% succeed", "p50 s", "p99 s", "p99 s at once", "server µs a waiting step", "kB a connection"),
        ),
    },
    bars=bars,
    prepare=prepare,
)

if __name__ == "__main__":
    main("wire")
