"""The standard MCP side of a server: what official clients speak on /mcp, and over stdio.

Importing this, or `servers.mcp.entry`, does not import the SDK: the first standard request does.
"""
