"""The client: the released one has all that is needed."""

from openenv.core.mcp_client import MCPToolClient


class TallyEnv(MCPToolClient):
    """Counts, on a server."""
