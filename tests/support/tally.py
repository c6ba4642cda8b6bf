"""A counter with tools: each session has its own count, each call is a step."""

import asyncio
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from openenv_core import EpisodeOverError, Observation, State
from openenv_core.tools import ToolAction, ToolEnvironment, ToolFailedError, ToolObservation, ToolResult, tool
from servers import create_app

ENOUGH = 10_000


class Tally(ToolEnvironment[State]):
    """A total, and the tools that change it."""

    BLOCKING = False
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._total = 0
        self._state = State()

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        self._total = seed or 0
        self._state = State(episode_id=episode_id or str(uuid4()))
        return Observation(metadata={"status": "ready"})

    def before_call(self, name: str, arguments: Mapping[str, Any]) -> None:
        if self._total >= ENOUGH:
            raise EpisodeOverError

    def after_call(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        self._state.step_count += 1
        done = self._total >= ENOUGH
        return ToolResult(
            content=result.content,
            value=result.value,
            structured=result.structured,
            error=result.error,
            reward=-1.0 if result.is_error else 0.5,
            done=done,
        )

    @property
    def state(self) -> State:
        return self._state

    @tool
    def add(self, amount: int) -> int:
        """Add to the total, and return it."""
        self._total += amount
        return self._total

    @tool
    def greet(self, name: str) -> str:
        """Greet somebody."""
        return f"Hello, {name}!"

    @tool
    def profile(self, who: str) -> dict[str, Any]:
        """Tell what is known of somebody."""
        return {"who": who, "data": [1, 2]}

    @tool
    def fail(self, why: str) -> None:
        """Fail."""
        raise ToolFailedError(why)

    @tool(timeout_s=0.05)
    async def wait(self, seconds: float) -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "waited"


app = create_app(Tally, ToolAction, ToolObservation, env_name="tally", max_concurrent_envs=256)
