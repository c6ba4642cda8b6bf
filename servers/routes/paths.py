"""Where the sockets are, and what a path is where the application is mounted below another."""

from collections.abc import Mapping
from typing import Any, Final

SESSION_PATH: Final = "/ws"
MCP_PATH: Final = "/mcp"


def path_of(scope: Mapping[str, Any]) -> str:
    """Return a connection's path without what a parent app, if any, has mounted this one under."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))
