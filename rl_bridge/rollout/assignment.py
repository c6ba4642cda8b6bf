"""Assignments of rollout workers, their results, and the derivation of seeds."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, groupby
from typing import Any, Final, Literal, Self, TypeAlias, TypeVar

import numpy as np

from rl_bridge.config import Config
from rl_bridge.config.self_play import Seating, trained_seats
from rl_bridge.types import Ending, Trajectory

T = TypeVar("T")

TRAINING_SEEDS = 2**31
"""Training uses seeds below this and evaluation seeds from this on, so that they share no episode."""


def task_seed(run_seed: int, task: int) -> int:
    """Return the seed that all siblings of a group start from; without numbered tasks, `task` is the group's number."""
    return int(np.random.default_rng([run_seed, task]).integers(0, TRAINING_SEEDS))


ENVIRONMENT_DRAWS = 2**31
"""Third part of the draw's seed, in place of a sibling's number: none is that high, so no sampling seed collides."""


def draw_environment(run_seed: int, group: int, weights: Mapping[str, float]) -> str:
    """Draw the environment that a group is played in."""
    return draw_by_weight([run_seed, group, ENVIRONMENT_DRAWS], weights)


def draw_by_weight(seed: Sequence[int], weights: Mapping[T, float]) -> T:
    """Draw a key with a probability in proportion to its weight; the same seed draws the same."""
    names, bounds = list(weights), list(accumulate(weights.values()))
    point = np.random.default_rng(seed).random() * bounds[-1]
    return names[min(bisect_right(bounds, point), len(names) - 1)]


def sampling_seed(run_seed: int, group: int, sibling: int, turn: int) -> int:
    """Return the seed, below 2^32, for sampling one completion of a deterministic run."""
    return int(np.random.SeedSequence([run_seed, group, sibling, turn]).generate_state(1)[0])


def held_out_seeds(first: int, count: int) -> range:
    """Return `count` consecutive seeds that training never uses, starting at index `first`."""
    return range(TRAINING_SEEDS + first, TRAINING_SEEDS + first + count)


SHORT_ANSWER_TOKENS: Final = 64
"""Where answers may have no more, one that is cut means nothing, rather than too much."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EpisodeSettings:
    """Settings that an episode is played with.

    Attributes:
        temperature: The sampling temperature; 0 plays greedily.
        num_turns: The most exchanges, and the most environment steps: an answer with several tool calls takes several
            steps.
        illegal_reward: The reward for an answer that is no legal action, that starts an unparsable tool call, or whose
            action the environment rejects; such an answer ends the episode.
        reset_options: Sent with the reset, beside the seed.
        timeout_s: Seconds after the reset beyond which no exchange starts; None for no limit.
        cut_answer: See `rollout.cut_answer`.
    """

    temperature: float
    num_turns: int
    illegal_reward: float
    reset_options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    cut_answer: Literal["illegal", "truncated"] = "illegal"

    @classmethod
    def of(cls, config: Config, environment: str = "", *, temperature: float) -> Self:
        """Read the settings of the named environment from a configuration; a run on a dataset has no environment."""
        env, rollout = config.environments.get(environment), config.rollout
        is_short = rollout.max_new_tokens <= SHORT_ANSWER_TOKENS
        return cls(
            temperature=temperature,
            num_turns=rollout.num_turns,
            illegal_reward=config.reward.illegal_answer,
            reset_options={} if env is None else env.reset,
            timeout_s=rollout.episode_timeout_s,
            cut_answer=rollout.cut_answer or ("illegal" if is_short else "truncated"),
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class Assignment:
    """Episodes for one worker, usually those of one group.

    Attributes:
        lease: The id of the lease under which they are played; the result carries it back.
        seeds: The environment's seed of each episode; siblings share one.
        siblings: Each episode's number in its group.
        settings: How they are played.
        environment: The environment's name in `Config.environments`.
        group: The group's number; episodes of lower ones get sessions first.
        task: The number of the group's task, in a dataset the example's; None for held-out episodes.
        sampling_key: The run's seed and the group's number, if every completion is sampled with a seed of its own; None
            to use the engine's own generator.
        seatings: In self-play who plays at successive tables. Siblings are numbered table by table, in the order of the
            seats that are trained; the episodes of a table are assigned together.
    """

    lease: int
    seeds: tuple[int, ...]
    siblings: tuple[int, ...]
    settings: EpisodeSettings
    environment: str = ""
    group: int = 0
    task: int | None = None
    sampling_key: tuple[int, int] | None = None
    seatings: tuple[Seating, ...] = ()

    @property
    def tables(self) -> list[list[int]]:
        """The indices of the episodes that are played together: those of each table, in self-play, otherwise each."""
        return [list(table) for _, table in groupby(range(len(self.siblings)), self.table_of)]

    def table_of(self, index: int) -> int:
        """Return the number, in its group, of the table that an episode is played at."""
        return self.siblings[index] // (len(trained_seats(self.seatings[0])) if self.seatings else 1)

    def seating_of(self, index: int) -> Seating:
        """Return who plays at an episode's table."""
        return self.seatings[self.table_of(index) % len(self.seatings)]


class Absence(StrEnum):
    """Why an episode has no trajectory."""

    DROPPED = "dropped"
    """Every attempt failed, none of them because of the policy."""
    UNSCORED = "unscored"
    """It was played to its end, which has no reward."""
    NO_TURN = "no_turn"
    """It was over before the policy could act."""
    UNFINISHED = "unfinished"
    """The worker was told to stop, or is being preempted."""


@dataclass(kw_only=True, slots=True, frozen=True)
class NoTrajectory:
    """An episode without a trajectory to learn from.

    Attributes:
        absence: Why there is none.
        reason: The details, for a person.
        ending: What failed, if it was played and failed; None if it was not played to an end.
    """

    absence: Absence
    reason: str
    ending: Ending | None = None


Outcome: TypeAlias = Trajectory | NoTrajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class AssignmentResult:
    """The outcomes of an assignment's episodes.

    Attributes:
        lease: The assignment's.
        outcomes: One per episode, in the assignment's order.
        retried: Attempts that failed, none of them because of the policy.
        last_failure: Why the latest failed attempt failed; None if none did.
        preempted: Whether the worker is being preempted, so that other workers must play what is unfinished.
    """

    lease: int
    outcomes: tuple[Outcome, ...]
    retried: int = 0
    last_failure: str | None = None
    preempted: bool = False
