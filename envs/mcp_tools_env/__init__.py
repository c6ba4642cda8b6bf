"""Tools of other people's MCP servers, as an environment: the models and the client.

The server is in :mod:`.server`.
"""

from openenv_core.tasks import InvalidResetOptionError

from .client import McpToolsEnv
from .models import McpToolsState, ServerInfo, TranscriptEntry

__all__ = ["InvalidResetOptionError", "McpToolsEnv", "McpToolsState", "ServerInfo", "TranscriptEntry"]
