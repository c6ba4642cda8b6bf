"""Measures every way to call a tool, in alternating rounds."""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.wire.measurements import Measurements
from benchmarks.wire.processes import Server, free_port, run, serving

IN_PROCESS: Final = "SDK, in-process"
SERVER_CORE: Final = 0
CLIENT_CORE: Final = 1

OURS: Final = ("ropewalk", "serve", "benchmarks.mcp.apps.ours:app")
SDK: Final = ("uvicorn", "benchmarks.mcp.apps.sdk:app", "--log-level", "warning")


@dataclass(frozen=True, slots=True)
class CallMethod:
    """One way to call.

    Attributes:
        name: Name in the report.
        kind: Kind of client; see `calls`.
        server: Command that starts the server; None for calls without one.
        health: Whether the server has a /health.
    """

    name: str
    kind: str
    server: tuple[str, ...] | None = None
    health: bool = True


CALL_METHODS: Final = (
    CallMethod(IN_PROCESS, "in_process"),
    CallMethod("SDK's server, handshake", "handshake", SDK, health=False),
    CallMethod("SDK's server, stateless", "stateless_sdk", SDK, health=False),
    CallMethod("ours, /mcp, handshake", "handshake", OURS),
    CallMethod("ours, /mcp, stateless", "stateless", OURS),
    CallMethod("ours, JSON-RPC as released", "json_rpc", OURS),
    CallMethod("ours, step()", "step", OURS),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        rounds: Measurements of each way to call.
        clients: Numbers of concurrent clients.
        seconds: Duration of one measurement.
        warm_up_s: Duration of its warm-up.
    """

    rounds: int = 5
    clients: tuple[int, ...] = (1, 16)
    seconds: float = 4.0
    warm_up_s: float = 1.0

    def quick(self) -> "Plan":
        """Return the plan with tiny numbers, which only shows that it runs."""
        return replace(self, rounds=1, clients=(1,), seconds=0.3, warm_up_s=0.1)


def measure(plan: Plan, measurements: Measurements, progress: Callable[[str], None]) -> None:
    """Measure every way in turn, round after round.

    Raises:
        StartError: A server or a client failed.
    """
    for number in range(plan.rounds):
        for clients in plan.clients:
            for method in CALL_METHODS:
                progress(f"round {number + 1} of {plan.rounds}: {method.name}, {_load(clients)}")
                _measure(method, clients, plan, measurements)


def _measure(method: CallMethod, clients: int, plan: Plan, measurements: Measurements) -> None:
    with ExitStack() as stack:
        port = free_port()
        server = None
        if method.server is not None:
            server_command = [sys.executable, "-m", *_module(method.server), "--port", str(port)]
            server = stack.enter_context(
                serving(Server(server_command, port, {}, SERVER_CORE, health=method.health))
            )
        client_command = [sys.executable, "-m", "benchmarks.mcp.calls", method.kind, str(port), str(clients)]
        if server is not None:
            # Our server imports the SDK on the first request; that must not count as part of a call.
            run([*client_command, "0", "0.1"], {}, CLIENT_CORE)
        before = 0 if server is None else server.cpu_ns()
        result = json.loads(run([*client_command, str(plan.seconds), str(plan.warm_up_s)], {}, CLIENT_CORE))
        load = _load(clients)
        measurements.add("p50 µs", method.name, load, result["p50_us"])
        measurements.add("calls/s", method.name, load, result["calls"] / result["seconds"])
        measurements.add("client µs a call", method.name, load, result["cpu_us"])
        if server is not None:
            # Over the whole run, opening of sessions included.
            calls = result["calls"] + result["warm_up"]
            measurements.add("server µs a call", method.name, load, (server.cpu_ns() - before) / 1e3 / calls)


def _module(command: tuple[str, ...]) -> tuple[str, ...]:
    return ("openenv_core.cli", *command[1:]) if command[0] == "ropewalk" else command


def _load(clients: int) -> str:
    return "1 client" if clients == 1 else f"{clients} clients"
