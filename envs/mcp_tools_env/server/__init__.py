"""The environment's server, which runs or connects to a set of third-party MCP servers for each session."""
