"""The command `python -m benchmarks.forks`: what it costs to fork a session."""

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.commandline import count, heading, measured, parser, progress, write
from benchmarks.wire.bars import Bar
from benchmarks.wire.figures import Figures
from benchmarks.wire.processes import ROOT, Server, StartError, free_port, serving
from benchmarks.wire.report import table, verdicts
from openenv_core import GenericEnvClient
from openenv_core.client.vector import VectorClient

STEPS: Final = 100
CHILDREN: Final = 8

FORK: Final = f"{CHILDREN} children, ms"
CPU: Final = "server's CPU, ms"

_DESCRIPTION = f"""\
The time from a request for {CHILDREN} forks of a session that has made {STEPS} steps to its answer; beside the time
that it takes to bring as many sessions there by playing the steps again. In alternating rounds, over one connection."""
_EXAMPLES = """\
examples:
  python -m benchmarks.forks             about a minute
  python -m benchmarks.forks --quick     does it run?"""


@dataclass(frozen=True)
class _Load:
    """An environment, and what is played in it."""

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


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print what there is, and return the exit status."""
    options = parser("forks", _DESCRIPTION, _EXAMPLES)
    options.add_argument("--rounds", type=count, default=30, metavar="N", help="rounds; 30 by default")
    arguments = options.parse_args(words)
    rounds, steps = (2, 3) if arguments.quick else (arguments.rounds, STEPS)
    figures, status = measured(lambda found: _measure(found, rounds, steps), StartError)
    held = list(_bars(figures))
    print(heading("medians of rounds"))
    rows = [
        (load, who, *(f"{figures.median(name, who, load) or 0:,.1f}" for name in (FORK, CPU)))
        for figure, who, load in figures.values
        if figure == FORK
    ]
    print("\n\n".join([table(("load", "by", FORK, CPU), rows), *verdicts(figures, held)]))
    write(arguments.json, figures, held)
    return status


def _measure(figures: Figures, rounds: int, steps: int) -> None:
    for load in _LOADS:
        port = free_port()
        command = [sys.executable, "-m", "openenv_core.cli", "serve", load.app, "--port", str(port)]
        environ = {"PYTHONPATH": str(ROOT), **load.environ}
        with serving(
            Server([*command, "--log-level", "warning"], port, environ, None, health=True)
        ) as server:
            asyncio.run(_forks(figures, load, server, rounds, steps))


async def _forks(figures: Figures, load: _Load, server: Server, rounds: int, steps: int) -> None:
    client = await GenericEnvClient(f"http://127.0.0.1:{server.port}").vector(1)
    try:
        await _play(client, load, [0], steps)
        for number in range(rounds):
            progress(f"{load.name}: round {number + 1} of {rounds}")
            for who in ("fork", "playing again"):
                began, cpu_ns = time.perf_counter(), server.cpu_ns()
                if who == "fork":
                    members = await client.fork(0, CHILDREN)
                else:
                    members = (await client.ask("open", count=CHILDREN))[0].fields["members"]
                    await _play(client, load, members, steps)
                figures.add(FORK, who, load.name, 1e3 * (time.perf_counter() - began))
                figures.add(CPU, who, load.name, (server.cpu_ns() - cpu_ns) / 1e6)
                await client.end(members)
    finally:
        await client.close()


async def _play(client: VectorClient, load: _Load, members: list[int], steps: int) -> None:
    told = await client.ask("reset", members=members, options=load.options)
    assert not any("errors" in reply.fields for reply in told), told
    for number in range(steps):
        action = load.then if number else load.first
        told = await client.ask(
            "step", members=members, actions=[action] * len(members), autoreset="next_step"
        )
        assert not any("errors" in reply.fields for reply in told), told


def _bars(figures: Figures) -> Iterator[Bar]:
    for load in _LOADS:
        fork, again = (figures.median(FORK, who, load.name) for who in ("fork", "playing again"))
        if fork and again:
            yield Bar(f"{load.name}: {FORK}", fork, load.bound_ms, "at most")
            yield Bar(f"{load.name}: playing again / fork", again / fork, 1.0, "at least")


if __name__ == "__main__":
    sys.exit(main())
