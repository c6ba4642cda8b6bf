"""Tools of other people's MCP servers, as an environment: the models and the client.

The server is in :mod:`.server`.
"""

from .client import McpToolsEnv
from .models import (
    InvalidResetOption,
    McpToolsState,
    ServerInfo,
    TranscriptEntry,
)

__all__ = ["InvalidResetOption", "McpToolsEnv", "McpToolsState", "ServerInfo", "TranscriptEntry"]
