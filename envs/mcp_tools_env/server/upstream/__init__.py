"""One MCP server as a client sees it: its process or its address, the connection, and what a call came to."""
