"""Tools of other people's MCP servers, as an environment: the models and the client.

The server is in :mod:`.server`.
"""

from .client import McpToolsEnv
from .models import InvalidResetOptionError, McpToolsState, ServerInfo, TranscriptEntry

__all__ = ["InvalidResetOptionError", "McpToolsEnv", "McpToolsState", "ServerInfo", "TranscriptEntry"]
