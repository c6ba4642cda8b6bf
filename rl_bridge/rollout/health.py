"""How each environment of a run fares: when one is set aside for the others' sake, and when the run ends."""

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from rl_bridge.errors import RolloutError
from rl_bridge.rollout.assignment import Absence, EpisodeSettings, NoTrajectory, Outcome
from rl_bridge.rollout.groups import EpisodeCounts, Tally, cannot_be_trained

FEWEST_LOST: Final = 8
"""No environment is given up before so many of its groups in a row were lost, however few make a step."""
FIRST_PAUSE_S: Final = 60.0
"""For which an environment is set aside; doubles each time that it fails again."""
MAX_PAUSE_S: Final = 900.0


@dataclass(kw_only=True, slots=True, frozen=True)
class PlayedEnvironment:
    """How one environment is played.

    Attributes:
        episode: How an episode of training is.
        weight: Its share of the groups, beside the others' weights.
    """

    episode: EpisodeSettings
    weight: float = 1.0


class EnvironmentHealth:
    """What became of an environment's groups, and whether it is set aside.

    Args:
        window: How many of its latest groups are looked at.
        max_lost_share: With more than this share of their episodes dropped for failures, playing on would not help.
    """

    def __init__(self, *, window: int, max_lost_share: float) -> None:
        self.counts = EpisodeCounts()
        """What became of the episodes that were played for training."""
        self.tally = Tally()
        """What became of groups and episodes since the last step, beside those that it trained."""
        self.has_failed = False
        """Whether an episode has failed by another's doing than the policy's; the first is told with a traceback."""
        self.error: BaseException | None = None
        """Why it was set aside last."""
        self._max_lost_share = max_lost_share
        self._lost_in_a_row = 0
        self._lately: deque[tuple[int, int]] = deque(maxlen=window)
        self._away_until = -math.inf
        self._pause_s = FIRST_PAUSE_S

    def is_playable(self, now: float) -> bool:
        """Whether groups may begin here; `now` is the clock, in seconds."""
        return now >= self._away_until

    def is_gone(self) -> bool:
        """Whether it was set aside for good."""
        return self._away_until == math.inf

    def set_aside(self, error: BaseException, *, now: float, for_good: bool = False) -> None:
        """Begin no group here for a while, or ever again. After a while the first lost group sets it aside again."""
        self.error = error
        self._away_until = math.inf if for_good else now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._lost_in_a_row = self._window - 1
        self._lately.clear()

    def rewind(self, counts: EpisodeCounts) -> None:
        """Go back to what a checkpoint has counted; servers that are gone for good stay gone."""
        self.counts, self.tally = counts, Tally()
        self._lost_in_a_row, self._pause_s = 0, FIRST_PAUSE_S
        self._lately.clear()
        if not self.is_gone():
            self._away_until = -math.inf

    def ended(
        self, outcomes: Collection[Outcome], refusal: str | None, *, current: bool, episodes: int
    ) -> None:
        """Count a group.

        Args:
            outcomes: Its episodes'.
            refusal: Why it is not trained; None where it is.
            current: Whether its lease was.
            episodes: After how many that no environment has taken an action of it is the task's fault.

        Raises:
            RolloutError: Too much was lost: playing on here would not help.
        """
        if refusal is None or not cannot_be_trained(refusal):
            self._lost_in_a_row, self._pause_s = 0, FIRST_PAUSE_S
        else:
            self._lost_in_a_row += current
        if current:
            self.counts.ended(outcomes)
            self.counts.require_understood(episodes)
            self.tally.ended(outcomes, refused=refusal is not None)
            self._require_some_success(refusal, outcomes)
            self._require_few_lost(outcomes)

    @property
    def _window(self) -> int:
        assert self._lately.maxlen is not None
        return self._lately.maxlen

    def _require_some_success(self, refusal: str | None, outcomes: Collection[Outcome]) -> None:
        if self._lost_in_a_row >= self._window:
            absent = [outcome for outcome in outcomes if isinstance(outcome, NoTrajectory)]
            because = f"; the last because: {absent[-1].reason}" if absent else ""
            raise RolloutError(
                f"none of the last {self._lost_in_a_row} groups could be trained; the last one had {refusal}{because}"
            )

    def _require_few_lost(self, outcomes: Collection[Outcome]) -> None:
        lost = [one for one in outcomes if isinstance(one, NoTrajectory) and one.absence is Absence.DROPPED]
        self._lately.append((len(lost), len(outcomes)))
        share = sum(lost for lost, _ in self._lately) / sum(whole for _, whole in self._lately)
        if len(self._lately) == self._window and share > self._max_lost_share:
            raise RolloutError(
                f"expected at most {self._max_lost_share:.0%} of the episodes to be lost to failures of their "
                f"environment or engine (rollout.max_lost_share), got {share:.0%} of the last {len(self._lately)} "
                f"groups; the last failure: {self.counts.last_failure}"
            )


def playable(health: Mapping[str, EnvironmentHealth], *, now: float) -> list[str]:
    """The environments in which groups may begin, in order."""
    return [name for name, one in health.items() if one.is_playable(now)]
