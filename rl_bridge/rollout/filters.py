"""Which trajectories and which groups are worth training."""

from dataclasses import dataclass
from typing import Literal

from rl_bridge.algorithms.advantages import has_variance
from rl_bridge.algorithms.overlong import overlong_penalty
from rl_bridge.types import Group, Trajectory

NO_VARIANCE = "rewards without variance"
ALL_TRUNCATED = "all siblings truncated"


@dataclass(kw_only=True, slots=True, frozen=True)
class Overlong:
    """What is done about trajectories that a limit cut off, or that came near one.

    Attributes:
        handling: "train" does nothing; "mask" leaves what was cut off out of the loss, though not out of its group's
            baseline; "penalty" lowers the reward of what comes near the greatest length.
        max_length: The greatest length, in tokens that the policy produced.
        buffer: Tokens before that over which the penalty grows.
    """

    handling: Literal["train", "mask", "penalty"] = "train"
    max_length: int = 1
    buffer: int = 1

    def masks(self, trajectory: Trajectory) -> bool:
        """True where a trajectory is no part of the loss."""
        return self.handling == "mask" and trajectory.ending.is_truncated()

    def reward(self, trajectory: Trajectory) -> float:
        """What the trajectory is trained with: its reward, less the penalty."""
        if self.handling != "penalty":
            return trajectory.reward
        length = sum(len(turn.completion.tokens) for turn in trajectory.turns)
        return trajectory.reward + overlong_penalty(length, max_length=self.max_length, buffer=self.buffer)


TRAIN_ALL = Overlong()


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupFilter:
    """Says which finished groups the trainer gets. What it refuses is dropped, and another is played instead.

    A group without a sibling to train never gets through. Dynamic sampling, DAPO's, arXiv 2503.14476, section 3.2, also
    refuses those whose rewards are all equal, as their advantages are 0; but only while there are refills left, so that
    a task that is too easy or too hard slows a run down and does not stop it. A step cannot save its refills up for
    later ones: where rewards begin to agree, those would at once train nothing but the exceptions, far harder than
    whatever else holds the policy back, an entropy bonus for one.

    Attributes:
        dynamic: Whether there is dynamic sampling.
        overlong: What rewards are trained with.
        refills: Groups that may be refused for their rewards in each step.
    """

    dynamic: bool = False
    overlong: Overlong = TRAIN_ALL
    refills: int = 0

    def refusal(self, group: Group, *, first: int) -> str | None:
        """Why a group is not worth training; None where it is.

        The answer depends on the group's number and not on what else has come back, so that a deterministic run stays
        one.

        Args:
            group: Finished.
            first: The number of the first group that was given out under the same weights.
        """
        if all(self.overlong.masks(trajectory) for trajectory in group.trajectories):
            return ALL_TRUNCATED
        if not self.dynamic or group.id >= first + self.refills:
            return None
        rewards = [self.overlong.reward(trajectory) for trajectory in group.trajectories]
        return None if has_variance(rewards) else NO_VARIANCE


ACCEPT_ALL = GroupFilter()
