"""Assignments of rollout workers and their results; and the derivation of seeds."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any, Self, TypeAlias

import numpy as np

from rl_bridge.config import Config
from rl_bridge.types import Ending, Trajectory

TRAINING_SEEDS = 2**31
"""Training takes seeds below this, evaluation takes seeds from this on: no episode is in both."""


def task_seed(run_seed: int, task: int) -> int:
    """The seed that the siblings of a group begin from. Where tasks are not numbered each group has one of its own."""
    return int(np.random.default_rng([run_seed, task]).integers(0, TRAINING_SEEDS))


FORK_DRAWS = 2**31 + 2
"""As `ENVIRONMENT_DRAWS`, for another draw."""


def draw_fork_turn(run_seed: int, group: int, bounds: tuple[int, int]) -> int:
    """After how many turns the siblings of a group part: from the first to the second of the bounds."""
    first, last = bounds
    return int(np.random.default_rng([run_seed, group, FORK_DRAWS]).integers(first, last + 1))


ENVIRONMENT_DRAWS = 2**31
"""Beside a run's seed and a group: no sibling is numbered so, whose samples this draw could go with."""


def draw_environment(run_seed: int, group: int, weights: Mapping[str, float]) -> str:
    """The environment that a group is played in."""
    names, bounds = list(weights), list(accumulate(weights.values()))
    point = np.random.default_rng([run_seed, group, ENVIRONMENT_DRAWS]).random() * bounds[-1]
    return names[min(bisect_right(bounds, point), len(names) - 1)]


def sampling_seed(run_seed: int, group: int, sibling: int, turn: int) -> int:
    """The seed that a completion is sampled with, where a run is to repeat bit for bit; below 2^32."""
    return int(np.random.SeedSequence([run_seed, group, sibling, turn]).generate_state(1)[0])


def held_out_seeds(first: int, count: int) -> range:
    """Seeds that training never uses, in order, from the `first` of them on."""
    return range(TRAINING_SEEDS + first, TRAINING_SEEDS + first + count)


@dataclass(kw_only=True, slots=True, frozen=True)
class EpisodeSettings:
    """What an episode is played by.

    Attributes:
        temperature: Of the sampling; 0 plays greedily.
        num_turns: Exchanges at most, and steps of the environment at most: an answer with several calls of tools takes
            as many.
        illegal_reward: What an answer that is no legal action earns, or that begins a call that cannot be read, or that
            means an action which the environment does not take; it ends the episode.
        reset_options: Sent with the reset, beside the seed.
        timeout_s: After how long since its reset no exchange is begun any more; None for no limit.
    """

    temperature: float
    num_turns: int
    illegal_reward: float
    reset_options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None

    @classmethod
    def of(cls, config: Config, environment: str = "", *, temperature: float) -> Self:
        """As the configuration says of an environment, by its name; a dataset has none."""
        env = config.environments.get(environment)
        return cls(
            temperature=temperature,
            num_turns=config.rollout.num_turns,
            illegal_reward=config.reward.illegal_answer,
            reset_options={} if env is None else env.reset,
            timeout_s=config.rollout.episode_timeout_s,
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class Assignment:
    """Episodes for one worker, usually those of one group.

    Attributes:
        lease: The right to finish them; what comes back names it.
        seeds: The environment's, one an episode; siblings share one.
        siblings: Each episode's number in its group.
        settings: How they are played.
        environment: Where, by its name in `Config.environments`.
        task: The number of the group's task, as a dataset has it; None of held-out episodes.
        sampling_key: The run's seed and the group's number, where every completion is to be sampled with a seed of its
            own; None where the engine's generator goes on as it pleases.
        fork_turn: After how many turns of one episode siblings part; None where each begins with a reset.
    """

    lease: int
    seeds: tuple[int, ...]
    siblings: tuple[int, ...]
    settings: EpisodeSettings
    environment: str = ""
    task: int | None = None
    sampling_key: tuple[int, int] | None = None
    fork_turn: int | None = None


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
