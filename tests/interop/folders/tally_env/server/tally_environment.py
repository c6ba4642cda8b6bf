"""Counts what it is told, in an episode of its own, by tools of a FastMCP server."""

import asyncio
import threading
import time
from typing import Any
from uuid import uuid4

from fastmcp import Context, FastMCP
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State


class TallyEnvironment(MCPEnvironment):
    """A total, and the tools that change it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("tally_env")

        @mcp.tool
        def add(amount: int) -> int:
            """Add to the total, and return it."""
            self._total += amount
            return self._total

        @mcp.tool
        def greet(name: str) -> str:
            """Greet somebody."""
            return f"Hello, {name}!"

        @mcp.tool
        def profile(who: str) -> dict[str, Any]:
            """Tell what is known of somebody."""
            return {"who": who, "data": [1, 2]}

        @mcp.tool
        def mumble(word: str):  # type: ignore[no-untyped-def]
            """Return something without saying what."""
            return [word, word]

        @mcp.tool
        def fail(why: str) -> str:
            """Fail."""
            raise ValueError(why)

        @mcp.tool
        async def wait(seconds: float, ctx: Context) -> str:
            """Wait on the event loop."""
            await ctx.report_progress(0.5, 1.0)
            await asyncio.sleep(seconds)
            return "waited"

        @mcp.tool
        def block(seconds: float) -> str:
            """Wait in whatever thread this runs in, and return its name."""
            time.sleep(seconds)
            return threading.current_thread().name

        @mcp.resource("tally://rules")
        def rules() -> str:
            """What there is to know."""
            return "Numbers add up."

        @mcp.prompt
        def begin(goal: str) -> str:
            """Begin to count."""
            return f"Count to {goal}."

        super().__init__(mcp)
        self._total = 0
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._total = seed or 0
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Observation(done=False, reward=0.0, metadata={"status": "ready"})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(done=False, reward=0.0, metadata={"error": f"no such action: {action}"})

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self._state.step_count += 1
        return super().step(action, timeout_s=timeout_s, **kwargs)

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self._state.step_count += 1
        return await super().step_async(action, timeout_s=timeout_s, **kwargs)

    @property
    def state(self) -> State:
        return self._state
