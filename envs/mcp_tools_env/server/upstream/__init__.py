"""The client side of one MCP server: its process or address, the connection, and the results of calls."""
