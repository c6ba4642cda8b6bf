"""The ASGI app: `uvicorn envs.mcp_tools_env.server.app:app`."""

from openenv_core.tools import ToolAction, ToolObservation
from servers import create_app

from ..models import McpToolsState
from .environment import McpToolsEnvironment
from .shared import lifespan

# A session runs a process per tool server, and some of them need a hundred megabytes.
MAX_CONCURRENT_ENVS = 64

app = create_app(
    McpToolsEnvironment,
    ToolAction,
    ToolObservation,
    env_name="mcp_tools",
    max_concurrent_envs=MAX_CONCURRENT_ENVS,
    state_cls=McpToolsState,
    lifespan=lifespan,
)
