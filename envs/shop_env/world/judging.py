"""How well a conversation went: what is different at the end, and what was answered, beside what would be right."""

from dataclasses import dataclass
from typing import Any, Final

from .desk import DeskReply
from .rules import (
    Fact,
    RightOutcome,
    differences,
)

RIGHT_PART: Final = 0.5
"""What an episode is worth at most that is not wholly right."""

WRONG_COST: Final = 0.25
"""What each wrong change costs."""


@dataclass(frozen=True, slots=True)
class Score:
    """What came of it.

    Attributes:
        right: how many requests are as they have to be, of how many.
        wrong: changes that should not be, or not so.
    """

    right: int
    requests: int
    wrong: int

    @property
    def reward(self) -> float:
        """1 for all right and nothing wrong; otherwise a part of a half, less what wrong changes cost."""
        if self.right == self.requests and not self.wrong:
            return 1.0
        return max(0.0, RIGHT_PART * self.right / self.requests - WRONG_COST * self.wrong)


def judge(
    verdicts: tuple[RightOutcome, ...],
    replies: dict[int, DeskReply],
    before: dict[Fact, Any],
    after: dict[Fact, Any],
) -> Score:
    """Compare.

    Args:
        verdicts: What would be right, by request.
        replies: What was answered, by the request's number.
        before: The facts at the beginning.
        after: And at the end.
    """
    changed = differences(before, after)
    wanted: dict[Fact, Any] = {}
    for verdict in verdicts:
        wanted |= verdict.changes
    right = 0
    for number, verdict in enumerate(verdicts, 1):
        answered = DeskReply(verdict.decision, verdict.ground, verdict.amount)
        as_wanted = all(after.get(fact) == value for fact, value in verdict.changes.items())
        right += as_wanted and replies.get(number) == answered
    wrong = sum(fact not in wanted or wanted[fact] != value for fact, value in changed.items())
    return Score(right, len(verdicts), wrong)
