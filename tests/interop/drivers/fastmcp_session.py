"""Calls a tool of a FastMCP object three times in one environment of ours; prints what it has kept, as JSON."""

import json
from typing import Any

from fastmcp import Context, FastMCP

from openenv_core.tools import CallToolAction
from openenv_core.tools.mcp_environment import MCPEnvironment
from openenv_core.types import Observation, State

server = FastMCP("visits")


@server.tool
async def visit(ctx: Context) -> str:
    """Count the visits of this session."""
    visits = (await ctx.get_state("visits") or 0) + 1
    await ctx.set_state("visits", visits)
    return f"{ctx.session_id} {visits}"


class Visits(MCPEnvironment):
    """An environment of that object."""

    def reset(self, **_: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State()


env, other = Visits(server), Visits(server)
action = CallToolAction(tool_name="visit")
print(json.dumps([one.step(action).result.data.split() for one in (env, env, env, other)]))
env.close()
other.close()
