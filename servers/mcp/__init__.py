"""Standard MCP, for official clients, on /mcp and over stdio.

Importing this package or `servers.mcp.entry` does not import the SDK; the first standard request does.
"""
