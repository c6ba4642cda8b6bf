"""A dispatcher over workers that are simulated."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rl_bridge.buffer.admission import Admission
from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import ReplayBuffer
from rl_bridge.rollout.assignment import Absence, Assignment, AssignmentResult, NoTrajectory
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.rollout.dispatching import DispatchSettings
from rl_bridge.rollout.episode import EpisodeSettings
from rl_bridge.rollout.filters import ACCEPT_ALL, GroupFilter
from rl_bridge.types import Completion, Ending, Group, Trajectory, Turn

EPISODE = EpisodeSettings(temperature=1.0, num_turns=4, illegal_reward=-1.0)
SIBLINGS = 4
LOST = NoTrajectory(absence=Absence.DROPPED, reason="ConnectionLost: the server is gone")
UNFINISHED = NoTrajectory(absence=Absence.UNFINISHED, reason="stopped")

Play = Callable[["Workers", Assignment], Awaitable[AssignmentResult]]


def episode(seed: int, sibling: int, version: int = 0) -> Trajectory:
    completion = Completion(tokens=[sibling], logprobs=[-0.5], versions=[version], stopped=True)
    return Trajectory(
        seed=seed,
        turns=[Turn(prompt=[0], completion=completion)],
        ending=Ending.COMPLETED,
        reward=float(sibling),
    )


def answer(assignment: Assignment, *, version: int = 0, **others: Any) -> AssignmentResult:
    outcomes = tuple(
        episode(seed, sibling, version)
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
        self.play = self
        self.cut = self

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


class Bridge:
    """A dispatcher with what it works on."""

    def __init__(
        self,
        how: Play,
        *,
        max_staleness: int = 0,
        groups: int = 2,
        slots: int = 4,
        iterations: int = 1000,
        max_losses: int | None = 2,
        deterministic: bool = False,
        group_filter: GroupFilter = ACCEPT_ALL,
    ) -> None:
        self.workers = Workers(how)
        self.groups = groups
        self.buffer = ReplayBuffer(
            Ledger(max_losses=max_losses),
            Admission(groups_per_batch=groups, max_staleness=max_staleness, iterations=iterations),
            timeout_s=1000.0,
            straggler_timeout_s=60.0,
        )
        self.dispatcher = Dispatcher(
            self.workers,
            self.buffer,
            DispatchSettings(
                run_seed=7,
                group_size=SIBLINGS,
                min_group_size=2,
                slots=slots,
                episode=EPISODE,
                deterministic=deterministic,
                timeout_s=300.0,
                filter=group_filter,
            ),
        )

    async def sample(self, version: int = 0) -> list[Group]:
        return await self.buffer.sample(version, self.groups)

    def serve(self, version: int) -> None:
        self.workers.version = version
        self.dispatcher.served(version)


async def at_once(workers: Workers, assignment: Assignment) -> AssignmentResult:
    await asyncio.sleep(1.0)
    return answer(assignment, version=workers.version)


def sibling_numbers(group: Group) -> list[int]:
    return [int(trajectory.reward) for trajectory in group.trajectories]
