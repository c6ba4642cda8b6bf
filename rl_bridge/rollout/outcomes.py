"""What an observation says about itself, as a rollout acts on it: lost, unscored, or play."""

from typing import Any, Final

from openenv_core import StepResult
from openenv_core.outcomes import infrastructure_failure, unscored_reason
from rl_bridge.errors import EpisodeLost, EpisodeUnscored

REASON_CHARS: Final = 1000
"""Of what an environment says of a failure so much is told: it goes into logs, and into every checkpoint."""


def shortened(reason: str) -> str:
    """Return as much of a reason as is told, without halves of characters: no checkpoint could be written with them."""
    told = reason if len(reason) <= REASON_CHARS else f"{reason[:REASON_CHARS]} …"
    return told.encode(errors="replace").decode()


def require_play(result: StepResult[Any]) -> None:
    """Return where a result is the policy's own doing.

    Raises:
        EpisodeLost: Something beside the policy failed; what was earned so far is worth nothing either.
        EpisodeUnscored: The episode is over, and nobody can say how well it was played.
    """
    if (failure := infrastructure_failure(result)) is not None:
        raise EpisodeLost(failure)
    if (reason := unscored_reason(result)) is not None:
        raise EpisodeUnscored(reason)
