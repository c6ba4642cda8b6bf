"""One episode, played over the wire and kept as plain data."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from openenv_core.checker.outcomes import CheckFailed
from openenv_core.client import SyncEnvClient
from openenv_core.errors import ExecutionFailed, ValidationFailed
from openenv_core.types import StepResult

Client: TypeAlias = SyncEnvClient[dict[str, Any], dict[str, Any], dict[str, Any]]

REFUSED_AT_MOST: Final = 25
"""Actions in a row that may be refused, until nothing more is expected of drawing them."""


REFUSING: Final = "refuses valid actions"
"""The cause of every failure of an environment that takes nothing that its schema allows."""


@dataclass(slots=True)
class Episode:
    """What came of playing: plain data, to be compared.

    Attributes:
        results: The reset's result and one a step, each {observation, reward, done, metadata}; a step that the
            environment refused is {"error": code}.
        actions: What was played, one a step.
        done: Whether the environment said that it was over.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    @property
    def rewards(self) -> list[Any]:
        """The rewards of the steps; the reset's is not among them."""
        return [result.get("reward") for result in self.results[1:]]


def play(client: Client, first: StepResult[dict[str, Any]], actions: Iterable[dict[str, Any]]) -> Episode:
    """Play an episode that was begun until it is done, or out of actions.

    Args:
        client: Plays it.
        first: The reset's result.
        actions: What to play.

    Raises:
        CheckFailed: The environment refuses one action after the other.
        ClientError: Whatever else the client met.
    """
    played = Episode([plain(first)])
    refused = 0
    for action in actions:
        played.actions.append(action)
        try:
            result = client.step(action)
        except (ValidationFailed, ExecutionFailed) as error:
            played.results.append({"error": error.code})
            refused += 1
            if refused >= REFUSED_AT_MOST:
                raise refusing(refused, action, error) from error
            continue
        refused = 0
        played.results.append(plain(result))
        if result.done:
            played.done = True
            break
    return played


def refusing(count: int, action: dict[str, Any], error: Exception) -> CheckFailed:
    """Return the failure of an environment that takes nothing that its schema allows."""
    return CheckFailed(
        f"expected actions that the schema allows to be taken, got {count} refusals in a row, "
        f"the last for {action}: {error}",
        change="narrow the action's schema to what the environment takes, or list "
        "validation.episodes.example_actions in openenv.yaml",
        cause=REFUSING,
    )


def plain(result: StepResult[dict[str, Any]]) -> dict[str, Any]:
    """Return a result as plain data."""
    return {
        "observation": result.observation,
        "reward": result.reward,
        "done": result.done,
        "metadata": result.metadata,
    }
