"""The cost of a tool call as a step, by JSON-RPC and over MCP, compared with the SDK's in-process call."""
