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
from typing import Final

from benchmarks.harness import Benchmark, Measurements, in_rounds, main, ratio, setting
from benchmarks.processes import run, serve_command, serving, uvicorn_command

IN_PROCESS: Final = "SDK, in-process"
SERVER_CORE: Final = 0
CLIENT_CORE: Final = 1

OURS: Final = serve_command("benchmarks.mcp.ours:app")
SDK: Final = uvicorn_command("benchmarks.mcp.sdk:app")


CALL_METHODS: Final = {
    IN_PROCESS: ("in_process", ()),
    "SDK's server, handshake": ("handshake", SDK),
    "SDK's server, stateless": ("stateless_sdk", SDK),
    "ours, /mcp, handshake": ("handshake", OURS),
    "ours, /mcp, stateless": ("stateless", OURS),
    "ours, JSON-RPC as released": ("json_rpc", OURS),
    "ours, step()": ("step", OURS),
}
"""The kind of client of each way to call (see `calls`), and the command that starts its server, if it has one."""
CALLED: Final = ("p50 µs", "calls/s", "client µs a call")
FIGURES: Final = (*CALLED, "server µs a call")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured: seconds of one measurement, and of its warm-up."""

    rounds: int = setting(5, quick=1, option="measurements of each way to call (5)")
    seconds: float = setting(4.0, quick=0.3)
    warm_up_s: float = setting(1.0, quick=0.1)


def measure(plan: Plan, measurements: Measurements) -> None:
    """Measure every way in turn, round after round.

    Raises:
        BenchmarkError: A server or a client failed.
    """
    for _, name in in_rounds(plan.rounds, CALL_METHODS):
        kind, command = CALL_METHODS[name]
        with ExitStack() as stack:
            server = None
            if command:
                server = stack.enter_context(serving(command, core=SERVER_CORE, health=command == OURS))
            client = [sys.executable, "-m", "benchmarks.mcp.calls", kind, server.url if server else ""]
            if server is not None:
                # Our server imports the SDK on the first request; that must not count as part of a call.
                run([*client, "0.1", "0"], core=CLIENT_CORE)
            before = 0 if server is None else server.cpu_ns()
            result = json.loads(run([*client, str(plan.seconds), str(plan.warm_up_s)], core=CLIENT_CORE))
            measurements.add_all(name, "", {figure: result[figure] for figure in CALLED})
            if server is not None:
                # Over the whole run, opening of sessions included.
                cpu_us = (server.cpu_ns() - before) / 1e3 / result["calls"]
                measurements.add("server µs a call", name, "", cpu_us)


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
