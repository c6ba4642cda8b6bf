"""The command `python -m benchmarks.forks`: the cost of forking a session."""

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.commandline import count, create_parser, heading, progress, run_measurement, write
from benchmarks.wire.bars import Bar
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.processes import ROOT, Server, StartError, free_port, serving
from benchmarks.wire.report import table, verdicts
from openenv_core import GenericEnvClient
from openenv_core.client.vector import VectorClient

STEPS: Final = 100
CHILDREN: Final = 8

FORK: Final = f"{CHILDREN} children, ms"
CPU: Final = "server's CPU, ms"

_DESCRIPTION = f"""\
The time to fork a session {CHILDREN} times after {STEPS} steps, compared with opening as many sessions and
playing the steps again. In alternating rounds, over one connection."""
_EXAMPLES = """\
examples:
  python -m benchmarks.forks             about a minute
  python -m benchmarks.forks --quick     does it run?"""


@dataclass(frozen=True)
class _Load:
    """An environment, its options and its actions."""

    name: str
    app: str
    bound_ms: float
    first: dict[str, Any]
    then: dict[str, Any]
    environ: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


_LOADS: Final = (
    _Load("BlackJack", "envs.blackjack_env.server.app:app", 5.0, {"action": "stand"}, {"action": "stand"}),
    _Load(
        "interpreter with numpy",
        "envs.code_interpreter_env.server.app:app",
        30.0,
        {"type": "execute", "code": "import numpy as np; x = np.ones(1000)"},
        {"type": "execute", "code": "x += 1"},
        {"CODE_INTERPRETER_MAX_SNAPSHOT": "true", "CODE_INTERPRETER_TASKS": "none"},
        {"snapshot": True},
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the report, and return the exit status."""
    options = create_parser("forks", _DESCRIPTION, _EXAMPLES)
    options.add_argument("--rounds", type=count, default=30, metavar="N", help="rounds; 30 by default")
    arguments = options.parse_args(argv)
    rounds, steps = (2, 3) if arguments.quick else (arguments.rounds, STEPS)
    measurements, status = run_measurement(
        lambda measurements: _measure(measurements, rounds, steps), StartError
    )
    all_bars = list(_bars(measurements))
    print(heading("medians of rounds"))
    rows = [
        (load, subject, *(f"{measurements.median(name, subject, load) or 0:,.1f}" for name in (FORK, CPU)))
        for metric, subject, load in measurements.values
        if metric == FORK
    ]
    print("\n\n".join([table(("load", "by", FORK, CPU), rows), *verdicts(measurements, all_bars)]))
    write(arguments.json, measurements, all_bars)
    return status


def _measure(measurements: Measurements, rounds: int, steps: int) -> None:
    for load in _LOADS:
        port = free_port()
        command = [sys.executable, "-m", "openenv_core.cli", "serve", load.app, "--port", str(port)]
        environ = {"PYTHONPATH": str(ROOT), **load.environ}
        with serving(
            Server([*command, "--log-level", "warning"], port, environ, None, health=True)
        ) as server:
            asyncio.run(_forks(measurements, load, server, rounds, steps))


async def _forks(measurements: Measurements, load: _Load, server: Server, rounds: int, steps: int) -> None:
    client = await GenericEnvClient(f"http://127.0.0.1:{server.port}").vector(1)
    try:
        await _play(client, load, [0], steps)
        for number in range(rounds):
            progress(f"{load.name}: round {number + 1} of {rounds}")
            for subject in ("fork", "playing again"):
                began, cpu_ns = time.perf_counter(), server.cpu_ns()
                if subject == "fork":
                    members = await client.fork(0, CHILDREN)
                else:
                    members = (await client.ask("open", count=CHILDREN))[0].fields["members"]
                    await _play(client, load, members, steps)
                measurements.add(FORK, subject, load.name, 1e3 * (time.perf_counter() - began))
                measurements.add(CPU, subject, load.name, (server.cpu_ns() - cpu_ns) / 1e6)
                await client.end(members)
    finally:
        await client.close()


async def _play(client: VectorClient, load: _Load, members: list[int], steps: int) -> None:
    replies = await client.ask("reset", members=members, options=load.options)
    assert not any("errors" in reply.fields for reply in replies), replies
    for number in range(steps):
        action = load.then if number else load.first
        replies = await client.ask(
            "step", members=members, actions=[action] * len(members), autoreset="next_step"
        )
        assert not any("errors" in reply.fields for reply in replies), replies


def _bars(measurements: Measurements) -> Iterator[Bar]:
    for load in _LOADS:
        fork, again = (measurements.median(FORK, subject, load.name) for subject in ("fork", "playing again"))
        if fork and again:
            yield Bar(f"{load.name}: {FORK}", fork, load.bound_ms, "at most")
            yield Bar(f"{load.name}: playing again / fork", again / fork, 1.0, "at least")


if __name__ == "__main__":
    sys.exit(main())
