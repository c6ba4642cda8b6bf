"""The cost of a call of a trivial tool, by every route, compared with the SDK's call within one process.

As a step, by JSON-RPC as released clients call, and over MCP with and without a handshake; and the same tool on the
SDK's own server. In alternating rounds:
  python -m benchmarks.mcp                     about six minutes
  python -m benchmarks.mcp --quick             does it run?
  python -m benchmarks.mcp --rounds 3 --json out.json
"""

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Final

from benchmarks.harness import Benchmark, Measurements, in_rounds, main, ratio, setting
from benchmarks.processes import run, serve_command, serving, uvicorn_command

IN_PROCESS: Final = "SDK, in-process"
SERVER_CORE: Final = 0
CLIENT_CORE: Final = 1

OURS: Final = serve_command("benchmarks.mcp.ours:app")
SDK: Final = uvicorn_command("benchmarks.mcp.sdk:app")


@dataclass(frozen=True, slots=True)
class CallMethod:
    """One way to call.

    Attributes:
        name: Name in the report.
        kind: Kind of client; see `calls`.
        server: Command that starts the server; empty for calls without one.
    """

    name: str
    kind: str
    server: tuple[str, ...] = ()


CALL_METHODS: Final = (
    CallMethod(IN_PROCESS, "in_process"),
    CallMethod("SDK's server, handshake", "handshake", SDK),
    CallMethod("SDK's server, stateless", "stateless_sdk", SDK),
    CallMethod("ours, /mcp, handshake", "handshake", OURS),
    CallMethod("ours, /mcp, stateless", "stateless", OURS),
    CallMethod("ours, JSON-RPC as released", "json_rpc", OURS),
    CallMethod("ours, step()", "step", OURS),
)
FIGURES: Final = ("p50 µs", "calls/s", "client µs a call", "server µs a call")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        clients: Numbers of concurrent clients.
        seconds: Duration of one measurement.
        warm_up_s: Duration of its warm-up.
    """

    rounds: int = setting(5, quick=1, option="measurements of each way to call (5)")
    clients: tuple[int, ...] = setting((1, 16), quick=(1,))
    seconds: float = setting(4.0, quick=0.3)
    warm_up_s: float = setting(1.0, quick=0.1)


def measure(plan: Plan, measurements: Measurements) -> None:
    """Measure every way in turn, round after round.

    Raises:
        BenchmarkError: A server or a client failed.
    """
    for _, (clients, method) in in_rounds(plan.rounds, product(plan.clients, CALL_METHODS)):
        with ExitStack() as stack:
            server = None
            if method.server:
                health = method.server == OURS
                server = stack.enter_context(serving(method.server, core=SERVER_CORE, health=health))
            port = "0" if server is None else str(server.port)
            client = [sys.executable, "-m", "benchmarks.mcp.calls", method.kind, port, str(clients)]
            if server is not None:
                # Our server imports the SDK on the first request; that must not count as part of a call.
                run([*client, "0", "0.1"], core=CLIENT_CORE)
            before = 0 if server is None else server.cpu_ns()
            result = json.loads(run([*client, str(plan.seconds), str(plan.warm_up_s)], core=CLIENT_CORE))
            load = "1 client" if clients == 1 else f"{clients} clients"
            rate = result["calls"] / result["seconds"]
            found: dict[str, float | None] = {
                "p50 µs": result["p50_us"],
                "calls/s": rate,
                "client µs a call": result["cpu_us"],
            }
            measurements.add_all(method.name, load, found)
            if server is not None:
                # Over the whole run, opening of sessions included.
                calls = result["calls"] + result["warm_up"]
                cpu_us = (server.cpu_ns() - before) / 1e3 / calls
                measurements.add("server µs a call", method.name, load, cpu_us)


def derive(measurements: Measurements) -> None:
    """Add each way's p50 divided by that of the SDK's in-process call."""
    for subject, load in measurements.measured("p50 µs"):
        p50, floor = (measurements.median("p50 µs", name, load) for name in (subject, IN_PROCESS))
        measurements.add("p50 over in-process", subject, load, ratio(p50, floor))


BENCHMARK = Benchmark(
    about=__doc__,
    plan=Plan,
    sections=(measure,),
    tables={"Calls of a tool": (*FIGURES, "p50 over in-process")},
    derive=derive,
)

if __name__ == "__main__":
    main("mcp")
