"""What a call of a tool costs: through a step, by JSON-RPC, over MCP; beside the SDK's own in-process call."""
