"""The server's side: other people's MCP servers, one set of them a session."""
