"""What the operator says: which tool servers there are, and what they may."""

from .servers import HttpServer, ServerPolicy, ServerSpec, StdioServer
from .settings import McpToolsSettings

__all__ = ["HttpServer", "McpToolsSettings", "ServerPolicy", "ServerSpec", "StdioServer"]
