"""Groups of siblings: filters, training samples and metrics; and the health of each environment."""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np

from rl_bridge.algorithms.advantages import (
    NO_VARIANCE,
    group_advantages,
    group_has_variance,
    overlong_penalty,
)
from rl_bridge.buffer.stored import LeasesInUse, StoredBatch, token_key
from rl_bridge.config import Config
from rl_bridge.config.algorithm import WITHOUT_VARIANCE
from rl_bridge.errors import RolloutError
from rl_bridge.rollout.assignment import Absence, AssignmentResult, NoTrajectory, Outcome
from rl_bridge.rollout.task import task_type
from rl_bridge.tokens.conversation import training_rows
from rl_bridge.types import Ending, Group, TrainSample, Trajectory

if TYPE_CHECKING:
    from rl_bridge.algorithms.functions import AdvantageFunction, FilterFunction  # imports torch


ALL_TRUNCATED = "all siblings truncated"
TOO_FEW = "too few siblings"


MIN_FAILED_EPISODES: Final = 8
"""The fewest failed episodes before an environment counts as one that takes no step."""


@dataclass(kw_only=True, slots=True)
class EpisodeCounts:
    """Counts of episodes since the beginning of the run, without those that a rewind undid.

    Attributes:
        played: Episodes with a trajectory.
        retried: Attempts that failed, none of them because of the policy.
        failed: Dropped episodes whose environment failed.
        dropped: Episodes dropped after the greatest number of attempts.
        unscored: Episodes played to an end that has no reward.
        without_turn: Episodes that were over before the policy could act.
        refused: Episodes that ended because the environment rejected an action.
        understood: Whether an environment has accepted any action.
        last_failure: Why the latest failed attempt failed; None if none did.
        last_refusal: Why the latest rejected action was rejected; None if none was.
    """

    played: int = 0
    retried: int = 0
    dropped: int = 0
    failed: int = 0
    unscored: int = 0
    without_turn: int = 0
    refused: int = 0
    understood: bool = False
    last_failure: str | None = None
    last_refusal: str | None = None

    def count_attempts(self, result: AssignmentResult) -> None:
        """Count the failed attempts of one assignment."""
        self.retried += result.retried
        self.last_failure = result.last_failure or self.last_failure

    def add_outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Count the final outcomes of episodes."""
        for outcome in outcomes:
            if not isinstance(outcome, NoTrajectory):
                self.played += 1
                self.understood = self.understood or _took_an_action(outcome)
                if outcome.ending is Ending.REFUSED_ACTION:
                    self.refused += 1
                    self.last_refusal = outcome.refusal
            elif outcome.absence is Absence.DROPPED:
                self.dropped += 1
                self.failed += outcome.ending is Ending.FAILED_ENVIRONMENT
            elif outcome.absence is Absence.UNSCORED:
                self.unscored += 1
            elif outcome.absence is Absence.NO_TURN:
                self.without_turn += 1

    def require_understood(self, episodes: int) -> None:
        """Raise RolloutError if the environment has accepted no action at all, after enough episodes.

        That is after `episodes` that ended by a refused action; or after `episodes` that ended in any way, if in
        `MIN_FAILED_EPISODES` of them or more the environment failed in every attempt. Then the task is at fault, whose
        actions the environment does not know or cannot carry out, rather than a policy that writes nonsense.
        """
        total = self.played + self.dropped + self.unscored + self.without_turn
        if not self.understood and total >= episodes and self.failed >= MIN_FAILED_EPISODES:
            raise RolloutError(
                f"the environment has not taken a single step: {self.failed} of {total} episodes failed in every "
                f"attempt. The last failure: {self.last_failure}"
            )
        if not self.understood and self.refused >= episodes:
            raise RolloutError(
                f"the environment refuses the task's actions: none of {self.refused} episodes had one that it took; "
                "check that rollout.task makes actions of the environment's type. The last refusal: "
                f"{self.last_refusal}"
            )

    def state(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
        return asdict(self)

    @classmethod
    def sum(cls, all_counts: Iterable[Self]) -> Self:
        """Return the total of several environments; `last_failure` and `last_refusal` are of the first with any."""
        total = cls()
        for counts in all_counts:
            for name, value in asdict(counts).items():
                previous = getattr(total, name)
                setattr(total, name, previous + value if type(value) is int else previous or value)
        return total


def _took_an_action(trajectory: Trajectory) -> bool:
    """Whether the environment accepted an action: a second answer means that it accepted the first."""
    ended_by_it = trajectory.ending in (
        Ending.COMPLETED,
        Ending.TRUNCATED_TURNS,
        Ending.TRUNCATED_ENVIRONMENT,
    )
    return ended_by_it or trajectory.summarize().turns > 1 or trajectory.tool_calls > 0


def final_outcomes(outcomes: Iterable[tuple[int, Outcome]]) -> dict[int, Outcome]:
    """Select, by place, the outcomes of episodes that no other worker has to play."""
    return {
        index: outcome
        for index, outcome in outcomes
        if not (isinstance(outcome, NoTrajectory) and outcome.absence is Absence.UNFINISHED)
    }


def summarize_outcomes(outcomes: Iterable[Outcome]) -> str:
    """Return how many episodes ended in which way, as text."""
    numbers = Counter(
        outcome.absence.value if isinstance(outcome, NoTrajectory) else "played" for outcome in outcomes
    )
    return ", ".join(f"{number} {kind}" for kind, number in sorted(numbers.items()))


def is_untrainable(reason: str) -> bool:
    """Whether a group was refused because none of it could be trained, rather than by a filter."""
    return reason == ALL_TRUNCATED or reason.startswith(TOO_FEW)


@dataclass(kw_only=True, slots=True)
class Tally:
    """Counts of untrained groups and episodes, reported with the next step.

    Attributes:
        refused: Groups that were played and not trained, by reason; see `GroupFilter`.
        endings: The endings of episodes that no step trains: those without a trajectory, and those of refused groups.
        rewards: The rewards of refused groups' episodes.
    """

    refused: Counter[str] = field(default_factory=Counter)
    endings: Counter[Ending] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)

    @property
    def filtered(self) -> int:
        """Groups that a filter refused though they could have been trained."""
        return sum(number for reason, number in self.refused.items() if not is_untrainable(reason))

    @classmethod
    def sum(cls, tallies: Iterable[Self]) -> Self:
        """Return the total of several environments' tallies."""
        total = cls()
        for tally in tallies:
            total.refused += tally.refused
            total.endings += tally.endings
            total.rewards += tally.rewards
        return total

    def add_outcomes(self, outcomes: Iterable[Outcome], *, refused: bool) -> None:
        """Count the finished episodes of a group that are not trained, all of them if it was refused."""
        finished = list(outcomes)
        if refused:
            self.rewards += [outcome.reward for outcome in finished if isinstance(outcome, Trajectory)]
        self.endings.update(
            outcome.ending
            for outcome in finished
            if outcome.ending is not None and (refused or isinstance(outcome, NoTrajectory))
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class OverlongHandling:
    """The handling of trajectories that a limit truncated, or that came near one.

    Attributes:
        handling: "train" does nothing; "mask" excludes truncated trajectories from the loss, though not from their
            group's baseline; "penalty" lowers the reward of those near the greatest length.
        max_length: The greatest length, in tokens that the policy produced.
        buffer: The number of tokens before `max_length` over which the penalty grows.
    """

    handling: Literal["train", "mask", "penalty"] = "train"
    max_length: int = 1
    buffer: int = 1

    def masks(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory is excluded from the loss."""
        return self.handling == "mask" and trajectory.ending.is_truncated()

    def shaped_reward(self, trajectory: Trajectory) -> float:
        """Return the reward that a trajectory is trained with: its own, less the penalty.

        It is for advantages and the critic alone. Whether a group teaches anything, and what is reported of it, follows
        from `Group.rewards`: DAPO too filters by correctness (arXiv 2503.14476, equation 11).
        """
        if self.handling != "penalty":
            return trajectory.reward
        length = trajectory.summarize().tokens
        return trajectory.reward + overlong_penalty(length, max_length=self.max_length, buffer=self.buffer)


TRAIN_ALL = OverlongHandling()


def max_trajectory_length(config: Config) -> int:
    """Return the most tokens that the policy can produce in a trajectory; a dataset's prompt has one answer.

    A growing chat has one context of `rollout.max_length` for all of its answers. If a task shows a new chat in every
    turn, each answer has a context of its own.
    """
    rollout = config.rollout
    max_length = (rollout.num_turns if config.data is None else 1) * rollout.max_new_tokens
    tasks = {config.of(name).rollout.task for name in config.environments} or {rollout.task}
    if max_length <= rollout.max_length:
        return max_length
    chat_grows = all(
        task is None or task_type(task).chat_grows for task in tasks
    )  # no task means ToolWorldTask
    return rollout.max_length if chat_grows else max_length


def overlong_handling(config: Config) -> OverlongHandling:
    """Make the handling of overlong trajectories that the configuration asks for."""
    algorithm, max_length = config.algorithm, max_trajectory_length(config)
    return OverlongHandling(
        handling=algorithm.overlong,
        max_length=max_length,
        buffer=max(1, round(algorithm.overlong_share * max_length)),
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupFilter:
    """Decides which finished groups the trainer gets. A refused group is dropped, and another is played instead.

    A group without a trainable sibling is always refused. A function, for example that of dynamic sampling, refuses
    others, but only while refills are left, so that a task that is too easy or too hard slows a run down without
    stopping it. Unused refills do not carry over to later steps: when rewards begin to agree, saved refills would make
    those steps train nothing but the exceptions, which outweighs whatever else restrains the policy, such as an entropy
    bonus.

    Attributes:
        function: Refuses groups; None refuses none.
        overlong: Determines which trajectories are left out of the loss.
        refills: The number of groups that the function may refuse in each step.
    """

    function: "FilterFunction | None" = None
    overlong: OverlongHandling = TRAIN_ALL
    refills: int = 0

    def refusal(self, group: Group, *, first: int) -> str | None:
        """Return why a finished group is not worth training; None if it is.

        The result depends on the group's number and not on which other groups are back, so that a deterministic run
        stays deterministic. `first` is the number of the first group that was leased under the same weights.
        """
        if all(self.overlong.masks(trajectory) for trajectory in group.trajectories):
            return ALL_TRUNCATED
        if self.function is None or group.id >= first + self.refills:
            return None
        return self.function(group, group.rewards)

    def signal(self, group: Group) -> float | None:
        """Return the share of siblings that earned less than the best of their seat: 0 means no variance, no gradient.

        None if fewer than two siblings are left.
        """
        below = 0
        for indices in group.indices_by_seat():
            rewards = [group.trajectories[index].reward for index in indices]
            below += sum(reward < max(rewards) for reward in rewards)
        count = len(group.trajectories)
        return below / count if count > 1 else None


def make_group_filter(config: Config) -> GroupFilter:
    """Make the group filter that the configuration asks for."""
    from rl_bridge.algorithms.functions import load_group_filter  # imports torch

    algorithm = config.algorithm
    path = WITHOUT_VARIANCE if algorithm.dynamic_sampling else algorithm.group_filter
    return GroupFilter(
        function=None if path is None else load_group_filter(path),
        overlong=overlong_handling(config),
        refills=algorithm.max_refills * config.rollout.groups_per_step,
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainedTrajectory:
    """A trajectory of a step, with what its tokens are trained with.

    Attributes:
        index: Its number among all trajectories of the step.
        group: The number, in the step, of the siblings that it is compared with: a group, or a seat of one.
        advantage: Its advantage.
        reward: The reward that it is trained with, credited to its last token.
    """

    trajectory: Trajectory
    index: int
    group: int
    advantage: float
    reward: float


def trained_trajectories(
    groups: Sequence[Group],
    *,
    normalize_std: bool,
    overlong: OverlongHandling = TRAIN_ALL,
    advantage_function: "AdvantageFunction" = group_advantages,
) -> list[TrainedTrajectory]:
    """Return the trajectories of a step's groups that the loss sees, in order.

    Advantages are computed within each group, in self-play within each seat of a group.
    """
    trained: list[TrainedTrajectory] = []
    first = number = 0
    for group in groups:
        for indices in group.indices_by_seat():
            siblings = [group.trajectories[index] for index in indices]
            rewards = [overlong.shaped_reward(trajectory) for trajectory in siblings]
            advantages = advantage_function(rewards, normalize_std=normalize_std)
            trained += [
                TrainedTrajectory(
                    trajectory=trajectory,
                    index=first + index,
                    group=number,
                    advantage=advantage,
                    reward=reward,
                )
                for index, trajectory, advantage, reward in zip(
                    indices, siblings, advantages, rewards, strict=True
                )
                if not overlong.masks(trajectory)
            ]
            number += 1
        first += len(group.trajectories)
    return sorted(trained, key=lambda item: item.index)


def stored_batch(trained: Sequence[TrainedTrajectory], *, in_use: LeasesInUse) -> StoredBatch:
    """Return what the trainer is sent of a step's trajectories, whose tokens it has."""
    return StoredBatch(
        keys=np.asarray([token_key(item.trajectory) for item in trained], dtype=np.int64).reshape(-1, 2),
        advantages=np.asarray([item.advantage for item in trained], dtype=np.float64),
        trajectories=np.asarray([item.index for item in trained], dtype=np.int64),
        groups=np.asarray([item.group for item in trained], dtype=np.int64),
        rewards=np.asarray([item.reward for item in trained], dtype=np.float64),
        in_use=in_use,
    )


def training_samples(groups: Sequence[Group], **options: Any) -> list[TrainSample]:
    """Turn groups whose turns are at hand into training rows; for the options see `trained_trajectories`."""
    return [
        replace(row, group=item.group, reward=item.reward)
        for item in trained_trajectories(groups, **options)
        for row in training_rows(item.trajectory, advantage=item.advantage, index=item.index)
    ]


def rollout_metrics(
    groups: Sequence[Group],
    *,
    version: int,
    tally: Tally | None = None,
    max_staleness: int = 0,
) -> Mapping[str, float]:
    """Return the metrics of one iteration's rollouts, by their names in the log.

    `reward/mean` covers the trajectories trained, and `reward/seat/*_mean` in self-play those of each seat.
    `reward/joint_mean` is what all seats of a session earn together, in games played to their end.
    `rollout/reward_mean` also covers refused groups: dynamic sampling keeps the groups in the middle, whose mean says
    little about how good a policy is. `rollout/zero_variance_share` also covers groups that dynamic sampling refused.
    All rewards are the trajectories' own, without a length penalty.
    `rollout/ending/*` also covers failed episodes and those of refused groups; `rollout/truncated_share` the same
    without the failed ones. A share or a mean of nothing is omitted.

    Args:
        groups: The groups trained.
        version: The version of the weights that the step began from.
        tally: The untrained groups and episodes since the last step.
        max_staleness: Each staleness up to this has a share in the result, even if it is 0.
    """
    tally = tally or Tally()
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    count = len(trajectories)
    endings: Counter[Ending] = Counter(trajectory.ending for trajectory in trajectories) + tally.endings
    finished = sum(number for ending, number in endings.items() if not ending.is_failure())
    truncated = sum(number for ending, number in endings.items() if ending.is_truncated())
    staleness = dict.fromkeys(range(max_staleness + 1), 0)
    for group in groups:
        staleness[version - group.version] = staleness.get(version - group.version, 0) + 1
    without_variance = sum(not group_has_variance(group, group.rewards) for group in groups)
    refused, without_variance_refused = tally.filtered, tally.refused[NO_VARIANCE]
    reward_sum = sum(t.reward for t in trajectories)
    summaries = [trajectory.summarize() for trajectory in trajectories]
    seats: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.seat:
            seats[trajectory.seat].append(trajectory.reward)
    joint = [
        trajectory.reward + trajectory.others
        for trajectory in trajectories
        if trajectory.others is not None and trajectory.ending is Ending.COMPLETED
    ]
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for path, score in (item for trajectory in trajectories for item in trajectory.scores.items()):
        scores[path].append(score)
    shares: dict[str, tuple[float, int]] = {
        "reward/mean": (reward_sum, count),
        "rollout/reward_mean": (reward_sum + sum(tally.rewards), count + len(tally.rewards)),
        **{f"reward/seat/{seat}_mean": (math.fsum(item), len(item)) for seat, item in seats.items()},
        "reward/joint_mean": (math.fsum(joint), len(joint)),
        "rollout/turns_mean": (sum(summary.turns for summary in summaries), count),
        "rollout/tool_calls_mean": (sum(t.tool_calls for t in trajectories), count),
        "rollout/tokens_mean": (sum(summary.tokens for summary in summaries), count),
        **{f"rollout/rubric/{path}_mean": (math.fsum(item), len(item)) for path, item in scores.items()},
        "rollout/zero_variance_share": (without_variance + without_variance_refused, len(groups) + refused),
        "rollout/truncated_share": (truncated, finished),
        **{f"rollout/ending/{ending.value}": (endings[ending], endings.total()) for ending in Ending},
        **{f"rollout/staleness/{age}": (number, len(groups)) for age, number in sorted(staleness.items())},
    }
    return {
        "rollout/trajectories": float(count),
        "rollout/groups": float(len(groups)),
        "rollout/refused_groups": float(refused),
        **{name: item / denominator for name, (item, denominator) in shares.items() if denominator},
    }


MIN_LOST_GROUPS: Final = 8
"""The fewest groups that an environment must lose in a row before it is set aside, however few make a step."""
FIRST_SUSPENSION_S: Final = 60.0
"""How long an environment is set aside at first; doubles each time that it fails again."""
MAX_ENVIRONMENT_SUSPENSION_S: Final = 900.0


class EnvironmentHealth:
    """An environment's counts of groups and episodes, and whether it is set aside.

    Args:
        window: The number of latest groups that are considered.
        max_lost_share: The greatest tolerated share of their episodes that failures may drop.
    """

    def __init__(self, *, window: int, max_lost_share: float) -> None:
        self.counts = EpisodeCounts()
        """Counts of the episodes that were played for training."""
        self.tally = Tally()
        """The untrained groups and episodes since the last step."""
        self.has_failed = False
        """Whether an episode has failed that was not the policy's fault; the first one is logged with a traceback."""
        self.error: BaseException | None = None
        """Why it was last set aside."""
        self._max_lost_share = max_lost_share
        self._losses_in_row = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)
        self._suspended_until = -math.inf
        self._suspension_s = FIRST_SUSPENSION_S

    def is_playable(self, now: float) -> bool:
        """Whether groups may start here; `now` is the event loop's time, in seconds."""
        return now >= self._suspended_until

    def is_gone(self) -> bool:
        """Whether it was set aside for good."""
        return self._suspended_until == math.inf

    def suspend(self, error: BaseException, *, now: float, permanently: bool = False) -> None:
        """Start no group here for a while, or ever again. Afterwards a single lost group sets it aside again."""
        self.error = error
        self._suspended_until = math.inf if permanently else now + self._suspension_s
        self._suspension_s = min(2 * self._suspension_s, MAX_ENVIRONMENT_SUSPENSION_S)
        self._losses_in_row = self._window - 1
        self._recent.clear()

    def rewind(self, counts: EpisodeCounts) -> None:
        """Go back to a checkpoint's counts; servers that are gone for good stay gone."""
        self.counts, self.tally = counts, Tally()
        self._losses_in_row, self._suspension_s = 0, FIRST_SUSPENSION_S
        self._recent.clear()
        if not self.is_gone():
            self._suspended_until = -math.inf

    def add_group(
        self, outcomes: Collection[Outcome], refusal: str | None, *, current: bool, episodes: int
    ) -> None:
        """Count a finished group; RolloutError if so much was lost that going on here would not help.

        `refusal` says why the group is not trained, None if it is; `current` whether its lease was current; `episodes`
        is passed to `require_understood`.
        """
        if refusal is None or not is_untrainable(refusal):
            self._losses_in_row, self._suspension_s = 0, FIRST_SUSPENSION_S
        else:
            self._losses_in_row += current
        if current:
            self.counts.add_outcomes(outcomes)
            self.counts.require_understood(episodes)
            self.tally.add_outcomes(outcomes, refused=refusal is not None)
            self._require_some_success(f"had {refusal}", outcomes)
            self._require_few_lost(outcomes)

    def add_silent_group(self, silent_s: float) -> None:
        """Count a group that made no progress for so long that it was given up; raises as `add_group` does."""
        self._losses_in_row += 1
        self._require_some_success(f"made no progress for {silent_s:g} s", ())

    @property
    def _window(self) -> int:
        assert self._recent.maxlen is not None
        return self._recent.maxlen

    def _require_some_success(self, refusal: str, outcomes: Collection[Outcome]) -> None:
        if self._losses_in_row >= self._window:
            absent = [outcome for outcome in outcomes if isinstance(outcome, NoTrajectory)]
            cause = f"; the last because: {absent[-1].reason}" if absent else ""
            raise RolloutError(
                f"none of the last {self._losses_in_row} groups could be trained; the last one {refusal}{cause}"
            )

    def _require_few_lost(self, outcomes: Collection[Outcome]) -> None:
        lost = [
            outcome
            for outcome in outcomes
            if isinstance(outcome, NoTrajectory) and outcome.absence is Absence.DROPPED
        ]
        was_full = len(self._recent) == self._window
        self._recent.append((len(lost), len(outcomes)))
        if was_full and not lost:  # no more than before; a window can be a thousand groups
            return
        share = sum(lost for lost, _ in self._recent) / sum(total for _, total in self._recent)
        if len(self._recent) == self._window and share > self._max_lost_share:
            raise RolloutError(
                f"expected at most {self._max_lost_share:.0%} of the episodes to be lost to failures of their "
                f"environment or engine (rollout.max_lost_share), got {share:.0%} of the last {len(self._recent)} "
                f"groups; the last failure: {self.counts.last_failure}"
            )


def playable_environments(health: Mapping[str, EnvironmentHealth], *, now: float) -> list[str]:
    """Return the names of the environments in which groups may start, in order."""
    return [name for name, state in health.items() if state.is_playable(now)]
