"""Public MCP servers, unchanged: from npm by constraints/node, from PyPI by constraints/mcp-servers.txt."""

import sys
from pathlib import Path
from typing import Any

from missing import missing
from node_tools import script

_INSTALLED = Path(__file__).parents[2] / ".venvs" / "mcp-servers"


def of_npm(name: str, *args: str, **more: Any) -> dict[str, Any]:
    """Return the configuration entry of a server from npm."""
    command = script(f"@modelcontextprotocol/{name}")
    return {"command": command[0], "args": [*command[1:], *args], **more}


def of_pypi(name: str, *args: str) -> dict[str, Any]:
    """Return the configuration entry of a server from PyPI."""
    program = _INSTALLED / ("Scripts" if sys.platform == "win32" else "bin") / name
    if not program.is_file():
        missing(f"needs {name} in .venvs/mcp-servers; get it with ./scripts/test --all")
    return {"command": str(program), "args": list(args)}
