"""What became of groups and episodes since the last step, beside those that it trained."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rl_bridge.rollout.assignment import NoTrajectory, Outcome
from rl_bridge.types import Ending, Trajectory


@dataclass(kw_only=True, slots=True)
class Tally:
    """Counts that a step takes with it.

    Attributes:
        refused: Groups that were played and not trained, by reason; see `GroupFilter`.
        endings: How episodes ended that no step trains: those that failed for good, and those of refused groups.
        rewards: What the latter earned.
    """

    refused: Counter[str] = field(default_factory=Counter)
    endings: Counter[Ending] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)

    def ended(self, outcomes: Iterable[Outcome], *, refused: bool) -> None:
        """Count those of a group's episodes, over for good, that are not trained.

        Args:
            outcomes: Of the group.
            refused: Whether none of it is trained.
        """
        over = list(outcomes)
        if refused:
            self.rewards += [outcome.reward for outcome in over if isinstance(outcome, Trajectory)]
        self.endings.update(
            outcome.ending
            for outcome in over
            if outcome.ending is not None and (refused or isinstance(outcome, NoTrajectory))
        )
