"""The same tool on the SDK's own server: `benchmarks.mcp.sdk:app`, and `server` for calls in-process."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("adder")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


app = server.streamable_http_app()
