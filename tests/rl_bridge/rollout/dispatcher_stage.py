"""A dispatcher over workers that are simulated."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.config import Config
from rl_bridge.loops.grpo import collect
from rl_bridge.rollout.assignment import Absence, Assignment, AssignmentResult, NoTrajectory, Outcome
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.types import Ending, Group, Trajectory, TurnSummary

SIBLINGS = 4
LOST = NoTrajectory(absence=Absence.DROPPED, reason="ConnectionLostError: the server is gone")
UNFINISHED = NoTrajectory(absence=Absence.UNFINISHED, reason="stopped")

Play = Callable[["Workers", Assignment], Awaitable[AssignmentResult]]


def episode(seed: int, sibling: int, version: int = 0, lease: int | None = None) -> Trajectory:
    summary = TurnSummary(turns=1, tokens=1, version=version, stopped=True, lease=lease, sibling=sibling)
    return Trajectory(seed=seed, ending=Ending.COMPLETED, reward=float(sibling), summary=summary)


def answer(assignment: Assignment, *, version: int = 0, **others: Any) -> AssignmentResult:
    outcomes = tuple(
        episode(seed, sibling, version, assignment.lease)
        for seed, sibling in zip(assignment.seeds, assignment.siblings, strict=True)
    )
    return AssignmentResult(lease=assignment.lease, **{"outcomes": outcomes, **others})


class Workers:
    """Stands for the service. `how` plays; it may look at `version`, what the generators serve."""

    def __init__(self, how: Play) -> None:
        self._how = how
        self.version = 0
        self.assignments: list[Assignment] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.told_to_stop: list[int] = []
        self.stopped: dict[int, asyncio.Event] = {}
        self.progressing: set[int] = set()
        """Leases of which the workers report progress all the time."""
        self.play = self
        self.cancel = self

    async def route(self, assignment: Assignment) -> AssignmentResult:
        self.assignments.append(assignment)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.stopped[assignment.lease] = asyncio.Event()
        try:
            return await self._how(self, assignment)
        finally:
            self.in_flight -= 1

    async def fanout(self, leases: tuple[int, ...]) -> None:
        self.told_to_stop.extend(leases)
        for lease in leases:
            self.stopped[lease].set()

    async def query_replicas(self, endpoint: str, *, timeout_s: float) -> dict[int, dict[int, float]]:
        """Nothing gets on until it ends, except what `progressing` says."""
        assert endpoint == "playing"
        return {0: dict.fromkeys(self.progressing, 0.0)}


class Bridge:
    """A dispatcher with what it works on; `keys` are further ones of the configuration."""

    def __init__(
        self,
        how: Play,
        *,
        max_staleness: int = 0,
        groups: int = 2,
        slots: int = 4,
        iterations: int = 1000,
        max_losses: int | None = 2,
        min_group_size: int = 2,
        explain: Callable[[str], Awaitable[str]] | None = None,
        weights: Mapping[str, float] = MappingProxyType({"": 1.0}),
        tasks: int | None = None,
        seats: Sequence[str] = (),
        **keys: Any,
    ) -> None:
        sessions = slots // len(weights)  # a group needs one session at least
        more_keys: dict[str, Any] = {"seats": seats}
        if tasks is not None:
            more_keys |= {"tasks": tasks, "sampling": "signal"}
        worlds = {
            name: {"app": "a:b", "weight": weight, "sessions": sessions, "reset": {"of": name}, **more_keys}
            for name, weight in weights.items()
        }
        rollout = {
            "task": "a:b",
            "batch_size": groups * SIBLINGS,
            "group_size": SIBLINGS,
            "timeout_s": 300.0,
            **keys.pop("rollout", {}),
        }
        config = Config.model_validate({"env": worlds.get("", worlds), "rollout": rollout, "seed": 7, **keys})
        lone = config.rollout.model_copy(update={"min_group_size": min_group_size})  # 1 too
        self.config = config.model_copy(update={"rollout": lone})
        self.workers = Workers(how)
        self.groups = groups
        self.buffer = ReplayBuffer(
            Ledger(max_losses=max_losses),
            Admission(groups_per_batch=groups, max_staleness=max_staleness, iterations=iterations),
            timeout_s=1000.0,
            straggler_timeout_s=60.0,
        )
        self.dispatcher = Dispatcher(self.workers, self.buffer, self.config, collect=collect, explain=explain)

    async def sample(self, version: int = 0) -> list[Group]:
        return await self.buffer.sample(version, self.groups)

    def serve(self, version: int) -> None:
        self.workers.version = version
        self.dispatcher.record_served(version)


async def play_at_once(workers: Workers, assignment: Assignment) -> AssignmentResult:
    await asyncio.sleep(1.0)
    return answer(assignment, version=workers.version)


async def play_altered(workers: Workers, assignment: Assignment, **changes: Any) -> AssignmentResult:
    """Trajectories with other fields than `play_at_once` gives them."""
    result = await play_at_once(workers, assignment)
    for outcome in result.outcomes:
        for name, value in changes.items():
            setattr(outcome, name, value)
    return result


def cut_short(assignment: Assignment, finished: int, **others: Any) -> AssignmentResult:
    """The first siblings have been played, the others have not."""
    outcomes = answer(assignment).outcomes[:finished] + (UNFINISHED,) * (len(assignment.seeds) - finished)
    return answer(assignment, outcomes=outcomes, **others)


def hand_back(assignment: Assignment) -> AssignmentResult:
    """A worker that has to go hands back one sibling that is finished."""
    return cut_short(assignment, finished=1, preempted=True)


def play_in_order(*firsts: Exception | float | Callable[[Assignment], AssignmentResult] | None) -> Play:
    """What the first assignments come to: an error, a wait in seconds, a result, or None for what all others do."""

    async def play(workers: Workers, assignment: Assignment) -> AssignmentResult:
        number = len(workers.assignments) - 1
        first = firsts[number] if number < len(firsts) else None
        await asyncio.sleep(first if isinstance(first, float) else 1.0)
        if isinstance(first, Exception):
            raise first
        if callable(first):
            return first(assignment)
        return answer(assignment, version=workers.version)

    return play


def sibling_numbers(group: Group) -> list[int]:
    return [int(trajectory.reward) for trajectory in group.trajectories]


async def steps(bridge: Bridge, first: int, last: int) -> list[Group]:
    """What the loop trains on from one version to another."""
    groups = []
    for version in range(first, last):
        groups += await bridge.sample(version)
        bridge.serve(version + 1)
    return groups


async def held_out(dispatcher: Dispatcher, episodes: int, **others: Any) -> int:
    """Play held-out episodes; how many have an outcome."""
    outcomes: dict[int, Outcome] = {}
    await dispatcher.play_held_out(range(episodes), outcomes.__setitem__, **others)
    return len(outcomes)
