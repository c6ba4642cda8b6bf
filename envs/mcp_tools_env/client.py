"""The client of the MCP tools environment."""

from openenv_core.client.tools import MCPToolClient

from .models import McpToolsState


class McpToolsEnv(MCPToolClient):
    """A session that lists and calls the tools of the MCP servers configured on the environment's server.

    Besides `seed` and `episode_id`, `reset` takes the options `servers`, `allow`, `deny`, `calls`, `time_s` and
    `transcript`; see :class:`.server.environment.McpToolsEnvironment`.
    """

    state_type = McpToolsState
    # The package is named envs.mcp_tools_env in this repository and mcp_tools_env once installed by itself.
    default_app = f"{__package__}.server.app:app"
