"""What a rollout worker is asked to play, and what it answers. Both travel between processes."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

from rl_bridge.rollout.episode import EpisodeSettings
from rl_bridge.types import Ending, Trajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class Assignment:
    """Episodes for one worker, usually those of one group.

    Attributes:
        lease: The right to finish them; what comes back names it.
        seeds: The environment's, one an episode; siblings share one.
        siblings: Each episode's number in its group.
        settings: How they are played.
        environment: Where, by its name in `Config.environments`.
        group: The group's number in the run; None of held-out episodes.
        sampling_key: The run's seed and the group's number, where every completion is to be sampled with a seed of its
            own; None where the engine's generator goes on as it pleases.
    """

    lease: int
    seeds: tuple[int, ...]
    siblings: tuple[int, ...]
    settings: EpisodeSettings
    environment: str = ""
    group: int | None = None
    sampling_key: tuple[int, int] | None = None


class Absence(StrEnum):
    """Why there is no trajectory."""

    DROPPED = "dropped"
    """Every attempt failed, through no fault of the policy's."""
    UNSCORED = "unscored"
    """It was played to an end that has no reward."""
    NO_TURN = "no_turn"
    """It was over before the policy could act."""
    UNFINISHED = "unfinished"
    """The worker was told to stop, or has to go."""


@dataclass(kw_only=True, slots=True, frozen=True)
class NoTrajectory:
    """An episode without a trajectory to learn from.

    Attributes:
        absence: What became of it.
        reason: Why, in words.
        ending: Whose failure it was, where it was played and failed; None where it was not played to any end.
    """

    absence: Absence
    reason: str
    ending: Ending | None = None


Outcome: TypeAlias = Trajectory | NoTrajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class AssignmentResult:
    """What became of the episodes of an assignment.

    Attributes:
        lease: The assignment's.
        outcomes: One an episode, in the assignment's order.
        retried: Attempts that failed through no fault of the policy's.
        last_failure: Why an attempt failed last; None where none has.
        preempted: The worker has to go: what is unfinished, if anything is, is for others.
    """

    lease: int
    outcomes: tuple[Outcome, ...]
    retried: int = 0
    last_failure: str | None = None
    preempted: bool = False


class PlayEndpoint(Protocol):
    """`rollout.play`."""

    async def route(self, assignment: Assignment) -> AssignmentResult:
        """Have one worker play."""


class CutEndpoint(Protocol):
    """`rollout.cut`."""

    async def fanout(self, leases: tuple[int, ...]) -> object:
        """Tell every worker."""


class RolloutService(Protocol):
    """The service of the `RolloutActor`, as far as it is needed here."""

    @property
    def play(self) -> PlayEndpoint:
        """Plays an assignment."""

    @property
    def cut(self) -> CutEndpoint:
        """Ends assignments early."""
