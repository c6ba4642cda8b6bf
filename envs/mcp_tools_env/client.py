"""The client of an environment of MCP servers."""

from openenv_core.client.tools import MCPToolClient

from .models import McpToolsState


class McpToolsEnv(MCPToolClient):
    """Lists and calls the tools of the MCP servers that a server of this environment is configured with.

    `reset` takes, besides `seed` and `episode_id`, the options `servers`, `allow`, `deny`, `calls`, `time_s` and
    `transcript`; see :class:`.server.environment.McpToolsEnvironment`.
    """

    state_type = McpToolsState
    # The folder goes by two names, envs.mcp_tools_env here and mcp_tools_env once installed by itself.
    default_app = f"{__package__}.server.app:app"
