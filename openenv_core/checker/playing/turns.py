"""Playing for the sake of what is seen on the way."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from openenv_core.checker.subject import REFUSED_AT_MOST, Client, Subject, refusing
from openenv_core.errors import ExecutionFailed, ValidationFailed
from openenv_core.types import StepResult

EPISODES: Final = 10
"""Episodes that a check plays, with as many seeds."""

STEPS: Final = 50
"""Steps of an episode that need not come to its end."""

ENOUGH_S: Final = 20.0
"""After so many seconds a check that has seen an episode, or an episode that has seen a step, is content."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of an environment.

    Attributes:
        seed: Of the episode.
        step: How many steps of it were answered with an observation; 0 for the reset.
        refused: How many were not.
        action: What was done; None for the reset.
        result: What came.
    """

    seed: int
    step: int
    action: dict[str, Any] | None
    result: StepResult[dict[str, Any]]
    refused: int = 0

    @property
    def where(self) -> str:
        """Where in which episode this is, for a message."""
        if self.action is None:
            return f"of reset(seed={self.seed})"
        return f"of step {self.step} after reset(seed={self.seed}), action {self.action!r:.120},"


def seeds() -> Iterator[int]:
    """Yield the seeds of the episodes that a check plays; fewer where they take long."""
    until = time.monotonic() + ENOUGH_S
    for seed in range(EPISODES):
        yield seed
        if time.monotonic() > until:
            return


def played(
    subject: Subject,
    client: Client,
    seed: int,
    *,
    steps: int = STEPS,
    seconds: float = ENOUGH_S,
    **reset_options: Any,
) -> Iterator[Turn]:
    """Play an episode and yield each answer as it comes. Refused actions are passed over.

    Args:
        subject: What is played.
        client: Plays it.
        seed: Of the reset and of the actions.
        steps: After so many the episode is left.
        seconds: After so many it is left as well.
        reset_options: Further options of the reset.

    Raises:
        CheckFailed: The environment refuses one action after the other.
    """
    yield Turn(seed, 0, None, subject.reset(client, seed=seed, **reset_options))
    refused = step = in_all = 0
    until = time.monotonic() + seconds
    for action in subject.actions(seed):
        try:
            result = client.step(action)
        except (ValidationFailed, ExecutionFailed) as error:
            refused, in_all = refused + 1, in_all + 1
            if refused >= REFUSED_AT_MOST:
                raise refusing(refused, action, error) from error
            continue
        refused, step = 0, step + 1
        yield Turn(seed, step, action, result, in_all)
        if result.done or step >= steps or time.monotonic() > until:
            return
