"""What became of the episodes of a run, counted, and since the last step."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rl_bridge.errors import RolloutError
from rl_bridge.rollout.assignment import Absence, AssignmentResult, NoTrajectory, Outcome
from rl_bridge.types import Ending, Trajectory

FEWEST_FAILED: Final = 8
"""So many episodes have to fail before an environment is called one that takes no step."""


@dataclass(kw_only=True, slots=True)
class EpisodeCounts:
    """Since the beginning of the run; after a rewind, since the beginning of the history that is left.

    Attributes:
        played: Episodes with a trajectory.
        retried: Attempts that failed through no fault of the policy's.
        failed: Those of the dropped ones that their environment failed.
        dropped: Episodes given up after as many attempts as are allowed.
        unscored: Episodes played to an end that has no reward.
        without_turn: Episodes that were over before the policy could act.
        refused: Episodes that an action ended which the environment did not take.
        understood: Whether an environment has taken any action.
        unfinished: Episodes that were cut short because the trainer waited for their group.
        last_failure: Why an attempt failed last; None where none has.
        last_unscored: Why an episode had no reward last; None where each had one.
        last_refusal: Why an action was not taken last; None where each was.
    """

    played: int = 0
    retried: int = 0
    dropped: int = 0
    failed: int = 0
    unscored: int = 0
    without_turn: int = 0
    refused: int = 0
    understood: bool = False
    unfinished: int = 0
    last_failure: str | None = None
    last_unscored: str | None = None
    last_refusal: str | None = None

    def attempted(self, result: AssignmentResult) -> None:
        """Count the failed attempts of one assignment."""
        self.retried += result.retried
        self.last_failure = result.last_failure or self.last_failure

    def ended(self, outcomes: Iterable[Outcome]) -> None:
        """Count how episodes ended for good."""
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
                self.last_unscored = outcome.reason
            elif outcome.absence is Absence.NO_TURN:
                self.without_turn += 1
            else:
                self.unfinished += 1

    def require_understood(self, episodes: int) -> None:
        """Tell a policy that writes nonsense from a task whose actions are not the environment's, or that fail in it.

        Args:
            episodes: After how many that ended by a refused action it is the task, if no other action was ever taken.

        Raises:
            RolloutError: It is the task, or the environment.
        """
        ended = self.played + self.dropped + self.unscored + self.without_turn
        if not self.understood and ended >= episodes and self.failed >= FEWEST_FAILED:
            raise RolloutError(
                f"the environment has not taken a single step: {self.failed} of {ended} episodes failed in every "
                f"attempt. The last failure: {self.last_failure}"
            )
        if not self.understood and self.refused >= episodes:
            raise RolloutError(
                f"the environment refuses what it is sent: none of {self.refused} episodes had an action that it took; "
                "see that rollout.task makes actions of the environment's own type. The last refusal: "
                f"{self.last_refusal}"
            )

    def state(self) -> dict[str, Any]:
        """For `json`."""
        return asdict(self)


def _took_an_action(played: Trajectory) -> bool:
    """Whether the environment did: an answer behind another one has seen what came of that."""
    ended_by_it = played.ending in (Ending.COMPLETED, Ending.TRUNCATED_TURNS)
    return ended_by_it or len(played.turns) > 1 or played.tool_calls > 0


def final_outcomes(outcomes: Iterable[tuple[int, Outcome]]) -> dict[int, Outcome]:
    """Those of episodes, by their places, that no other worker has to play."""
    return {
        place: outcome
        for place, outcome in outcomes
        if not (isinstance(outcome, NoTrajectory) and outcome.absence is Absence.UNFINISHED)
    }


def summary(outcomes: Iterable[Outcome]) -> str:
    """How many episodes ended in which way, for a person."""
    numbers = Counter(
        outcome.absence.value if isinstance(outcome, NoTrajectory) else "played" for outcome in outcomes
    )
    return ", ".join(f"{number} {how}" for how, number in sorted(numbers.items()))


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
