"""The cost of forking a session eight times after 100 steps, compared with opening as many and playing again.

In alternating rounds, over one connection:
  python -m benchmarks.forks             about a minute
  python -m benchmarks.forks --quick     does it run?
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.harness import (
    Bar,
    Benchmark,
    Measurements,
    at_least,
    at_most,
    in_rounds,
    main,
    ratio,
    setting,
)
from benchmarks.processes import serve_command, serving
from openenv_core import GenericEnvClient
from openenv_core.client.vector import VectorClient

CHILDREN: Final = 8

FORK: Final = f"{CHILDREN} children, ms"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int = setting(30, quick=2, option="rounds (30)")
    steps: int = setting(100, quick=3)


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


def measure(plan: Plan, measurements: Measurements) -> None:
    """Fork and play again in each environment, in alternating rounds."""
    for load in _LOADS:
        with serving(serve_command(load.app), load.environ) as server:
            asyncio.run(_forks(measurements, load, server.url, plan))


async def _forks(measurements: Measurements, load: _Load, url: str, plan: Plan) -> None:
    client = await GenericEnvClient(url).vector(1)
    try:
        await _play(client, load, [0], plan.steps)
        for _, subject in in_rounds(plan.rounds, ("fork", "playing again"), f"{load.name}, "):
            began = time.perf_counter()
            if subject == "fork":
                members = await client.fork(0, CHILDREN)
            else:
                members = (await client.ask("open", count=CHILDREN))[0].fields["members"]
                await _play(client, load, members, plan.steps)
            measurements.add(FORK, subject, load.name, 1e3 * (time.perf_counter() - began))
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


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    for load in _LOADS:
        fork, again = (measurements.median(FORK, subject, load.name) for subject in ("fork", "playing again"))
        yield from at_most(f"{load.name}: {FORK}", fork, load.bound_ms)
        yield from at_least(f"{load.name}: playing again / fork", ratio(again, fork), 1.0)


BENCHMARK = Benchmark(about=__doc__, plan=Plan, sections=(measure,), tables={"Forks": (FORK,)}, bars=bars)

if __name__ == "__main__":
    main("forks")
