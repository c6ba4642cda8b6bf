"""Steps/s of tables of two seats in one batch, compared with as many sessions of one player each.

The game counts what is said, by both seats at once. In alternating rounds, over one connection. A table is one
session, which acts for both seats at once or for one after the other, or two sessions that meet there.
  python -m benchmarks.seats             about half a minute
  python -m benchmarks.seats --quick     does it run?
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from benchmarks.harness import Bar, Benchmark, Measurements, at_least, in_rounds, main, ratio, setting
from benchmarks.processes import serve_command, serving
from openenv_core import Action, Environment, GenericEnvClient, MultiAgentEnvironment, Observation
from openenv_core.client.vector import VectorClient
from servers import create_app

STEPS: Final = "steps/s of all seats"


class Say(Action):
    """A number."""

    number: int


class Sum(Observation):
    """The sum of a player's numbers so far."""

    total: int


class Alone(Environment[Say, Sum]):
    """One player counts."""

    BLOCKING = False

    def reset(self) -> Sum:
        """Start at zero."""
        self._total = 0
        return Sum(total=0)

    def step(self, action: Say) -> Sum:
        """Add a number."""
        self._total += action.number
        return Sum(total=self._total, reward=float(action.number))


class Together(MultiAgentEnvironment[Say, Sum]):
    """Two players count at once, each for itself."""

    seats = ("left", "right")
    BLOCKING = False
    TURN_TIMEOUT_S = 600.0  # players wait while other subjects are measured

    def reset(self) -> dict[str, Sum]:
        """Start at zero."""
        self._totals = dict.fromkeys(self.seats, 0)
        return {seat: Sum(total=0) for seat in self.seats}

    def step(self, actions: Mapping[str, Say]) -> dict[str, Sum]:
        """Add both numbers."""
        totals = self._totals
        for seat, action in actions.items():
            totals[seat] += action.number
        return {seat: Sum(total=totals[seat], reward=float(actions[seat].number)) for seat in self.seats}


SESSIONS: Final = 512
alone = create_app(Alone, max_concurrent_envs=SESSIONS)
together = create_app(Together, max_concurrent_envs=SESSIONS)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int = setting(7, quick=1, option="rounds (7)")
    tables: int = setting(256, quick=8)
    steps: int = setting(60, quick=3)


class _Subject(NamedTuple):
    """Sessions to step.

    Attributes:
        app: Its app.
        options: Options of the reset.
        action: The action of each step.
        seats: How many seats each step acts for.
        per_table: How many sessions there are at a table.
    """

    app: str
    options: Mapping[str, Any]
    action: Mapping[str, Any]
    seats: int = 1
    per_table: int = 1


_SAY: Final = {"number": 1}
_SUBJECTS: Final = {
    "sessions of one player": _Subject("alone", {}, _SAY),
    "tables, both seats at once": _Subject(
        "together", {"seat": "all"}, {"seats": {"left": _SAY, "right": _SAY}}, 2
    ),
    "tables, one seat after the other": _Subject("together", {"seat": "all"}, _SAY),
    "tables at which sessions meet": _Subject("together", {"table": "lobby"}, _SAY, per_table=2),
}


def measure(plan: Plan, measurements: Measurements) -> None:
    """Step all seats in alternating rounds."""
    with ExitStack() as stack:
        # A server each: the memory of one subject's sessions would be in the way of another's.
        urls = {
            name: stack.enter_context(serving(serve_command(f"benchmarks.seats:{subject.app}"))).url
            for name, subject in _SUBJECTS.items()
        }
        asyncio.run(_measure(plan, measurements, urls))


async def _measure(plan: Plan, measurements: Measurements, urls: Mapping[str, str]) -> None:
    clients = {
        name: await GenericEnvClient(urls[name]).vector(subject.per_table * plan.tables)
        for name, subject in _SUBJECTS.items()
    }
    try:
        for _, subject in in_rounds(plan.rounds, tuple(_SUBJECTS), ""):
            rate = await _play(clients[subject], _SUBJECTS[subject], plan)
            measurements.add(STEPS, subject, f"{plan.tables} tables", rate)
    finally:
        for client in clients.values():
            await client.close()


async def _play(client: VectorClient, subject: _Subject, plan: Plan) -> float:
    """Return the steps/s of all seats."""
    await client.ask("reset", options=subject.options)
    actions = [subject.action] * (subject.per_table * plan.tables)
    began = time.perf_counter()
    for _ in range(plan.steps):
        # What is kept would be looked at by each garbage collection of this process.
        for reply in await client.ask("step", actions=actions):
            assert "errors" not in reply.fields, str(reply.fields["errors"])[:1000]
    took_s = time.perf_counter() - began
    return len(actions) * subject.seats * plan.steps / took_s


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    alone, *others = (measurements.median(STEPS, subject, _load(measurements)) for subject in _SUBJECTS)
    for subject, rate in zip(list(_SUBJECTS)[1:], others, strict=True):
        yield from at_least(f"{subject} / of one player", ratio(rate, alone), 0.8)


def _load(measurements: Measurements) -> str:
    """Return the only load of a run."""
    return measurements.measured(STEPS)[0][1]


BENCHMARK = Benchmark(about=__doc__, plan=Plan, sections=(measure,), tables={"Seats": (STEPS,)}, bars=bars)

if __name__ == "__main__":
    main("seats")
