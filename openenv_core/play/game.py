"""Episodes over a client: what was done, what came of it, and what it adds up to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from openenv_core.client import SyncEnvClient
from openenv_core.play.form import Json
from openenv_core.types import StepResult

Result = StepResult[Json]


class Reporter(Protocol):
    """Tells of a game: to a person, or to a program."""

    def began(self, episode: int, options: Json, result: Result) -> None:
        """An episode began."""

    def stepped(self, step: int, action: Json, result: Result, total: float) -> None:
        """A step was taken."""

    def ended(self, summary: "Summary") -> None:
        """An episode ended, or was left."""

    def failed(self, error: Exception) -> None:
        """Something was refused, or went wrong, and the game goes on."""

    def told(self, name: str, value: Any) -> None:
        """Something was asked for: the state, the schema, the tools."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One episode.

    Attributes:
        episode: Which one, from 1.
        steps: How many steps it took.
        total: The sum of its rewards.
        done: Whether it came to its end; False where it was left.
    """

    episode: int
    steps: int
    total: float
    done: bool


class Game:
    """Plays episodes, one after another.

    Args:
        client: A session.
        reporter: Is told.

    Attributes:
        episodes: How many were begun.
    """

    def __init__(self, client: SyncEnvClient[Json, Json, Json], reporter: Reporter) -> None:
        self._client = client
        self._reporter = reporter
        self.episodes = 0
        self._steps = 0
        self._total = 0.0
        self._running = False
        self._over = True

    @property
    def over(self) -> bool:
        """Whether a step needs a reset first."""
        return self._over

    def reset(self, options: Mapping[str, Any]) -> None:
        """Begin an episode; one that is under way is left."""
        self.leave()
        result = self._client.reset(**options)
        self.episodes += 1
        self._steps, self._total = 0, 0.0
        self._running, self._over = True, False
        self._reporter.began(self.episodes, dict(options), result)
        self._count(result)

    def step(self, action: Json) -> None:
        """Take a step."""
        result = self._client.step(action)
        self._steps += 1
        self._total += float(result.reward or 0)
        self._reporter.stepped(self._steps, action, result, self._total)
        self._count(result)

    def state(self) -> Json:
        """Return the state."""
        return self._client.state()

    def tools(self) -> list[Json]:
        """Return the tools of an environment that has some; asking is no step of the episode."""
        found = self._client.step({"type": "list_tools"}).observation.get("tools")
        return [tool for tool in found if isinstance(tool, dict)] if isinstance(found, list) else []

    def lost(self) -> None:
        """Take it that the session is gone, and the episode with it."""
        self.leave()
        self._over = True

    def leave(self) -> None:
        """Sum up the episode under way, if there is one."""
        if self._running:
            self._running = False
            self._reporter.ended(Summary(self.episodes, self._steps, self._total, self._over))

    def _count(self, result: Result) -> None:
        self._over = result.done
        if self._over:
            self.leave()
