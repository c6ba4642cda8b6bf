"""An environment's tools for its agent: each call is a step of the episode, which earns what the environment says."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic_core import PydanticSerializationError

from openenv_core import StepResult
from openenv_core.errors import OpenEnvError, ValidationFailedError
from openenv_core.outcomes import SCORES
from rl_bridge.errors import BridgeError, EpisodeUnscoredError
from rl_bridge.metrics.spans import span
from rl_bridge.rollout.episode import convert_task_errors, require_scored
from rl_bridge.rollout.task import Session
from rl_bridge.rollout.tool_task import ToolTask
from rl_bridge.tokens.tool_calls import ToolCall
from rl_bridge.types import Ending

_OVER = "the episode is over"


class EnvironmentTools:
    """The tools of one episode; see `rl_bridge.gateway.episode.ToolPort`.

    Calls are steps in the order in which they come, one at a time. Rewards are added up, and never shown.

    Attributes:
        functions: The tools, in the form that chat templates take.
        over: Set when the environment ends the episode, or fails, or the limit on steps is reached.
        ending: How it ended; None while it goes on.
        failure: What failed that is not the agent's; the episode is lost.
        reward: The sum of the environment's rewards.
        calls: The number of steps.
    """

    def __init__(
        self,
        task: ToolTask,
        session: Session,
        functions: Sequence[Mapping[str, Any]],
        *,
        max_calls: int,
        on_progress: Callable[[], None],
    ) -> None:
        self.functions = functions
        self.over = asyncio.Event()
        self.ending: Ending | None = None
        self.failure: Exception | None = None
        self.reward = 0.0
        self.scores: dict[str, float] = {}
        self.calls = 0
        self._task = task
        self._session = session
        self._max_calls = max_calls
        self._on_progress = on_progress
        self._lock = asyncio.Lock()

    def add_reward(self, reward: float | None) -> None:
        """Add a reward; EpisodeUnscoredError if the sum is not finite."""
        self.reward += float(reward or 0.0)
        if not math.isfinite(self.reward):
            raise EpisodeUnscoredError(f"expected rewards that are finite, got {reward!s:.20}")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Call a tool; returns its result as text, and whether the call failed."""
        async with self._lock:
            if self.over.is_set():
                return _OVER, True
            action = self._task.action(ToolCall(name, arguments))
            if action is None:
                return f"error: {name!r:.100} is no action here", True
            try:
                return await self._step(action)
            except (ValidationFailedError, PydanticSerializationError) as error:
                return f"error: {error}", True
            except (OpenEnvError, BridgeError) as error:
                self.failure = error
                self.over.set()
                return _OVER, True

    async def close(self) -> None:
        """Take no more calls; returns when none is in progress."""
        self.over.set()
        async with self._lock:
            pass

    async def _step(self, action: Any) -> tuple[str, bool]:
        with span("step", waits_for="environment"):
            result = await self._session.step(action)
        self._on_progress()
        require_scored(result)
        self.calls += 1
        self._add(result)
        if result.done:
            self._end(Ending.TRUNCATED_ENVIRONMENT if result.truncated else Ending.COMPLETED)
        elif self.calls == self._max_calls:
            self._end(Ending.TRUNCATED_TURNS)
        observation = result.observation
        with convert_task_errors():
            text = self._task.result(observation)
        return text, getattr(observation, "error", None) is not None

    def _add(self, result: StepResult[Any]) -> None:
        self.add_reward(result.reward)
        parts = (result.metadata or {}).get(SCORES)
        for path, score in parts.items() if isinstance(parts, Mapping) else ():
            if isinstance(score, int | float):
                self.scores[path] = self.scores.get(path, 0.0) + score

    def _end(self, ending: Ending) -> None:
        self.ending = ending
        self.over.set()
