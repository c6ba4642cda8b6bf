"""The service of the rollout workers, as far as its callers need to know it."""

from typing import Protocol

from rl_bridge.rollout.assignment import Assignment, AssignmentResult


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
