"""A small MCP server to try the environment with, where none is configured: a notebook and a calculator.

Run by its path, as any other tool server, and like any other it knows nothing of the environment.
"""

import statistics
from typing import Annotated

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

server = MCPServer("demo", instructions="Notes are kept for as long as the session lasts.")
_notes: dict[str, str] = {}

Name = Annotated[str, Field(description="Of the note", min_length=1, max_length=64)]


@server.tool()
def write_note(name: Name, text: Annotated[str, Field(max_length=10_000)]) -> str:
    """Write a note, or write it anew."""
    if name not in _notes and len(_notes) >= 100:
        raise ToolError("there are 100 notes, which is the most; write one of them anew")
    _notes[name] = text
    return f"{name} has {len(text)} characters now"


@server.tool()
def read_note(name: Name) -> str:
    """Read a note."""
    if name not in _notes:
        raise ToolError(f"there is no note {name!r}; there are: {', '.join(sorted(_notes)) or 'none'}")
    return _notes[name]


@server.tool()
def list_notes() -> list[str]:
    """List the names of the notes."""
    return sorted(_notes)


@server.tool()
def summarise(numbers: Annotated[list[float], Field(min_length=1, max_length=1000)]) -> dict[str, float]:
    """Work out the sum, the mean and the median of numbers."""
    return {"sum": sum(numbers), "mean": statistics.fmean(numbers), "median": statistics.median(numbers)}


if __name__ == "__main__":
    server.run()
