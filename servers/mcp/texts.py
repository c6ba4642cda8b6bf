"""Texts as they go on the wire of MCP, which is UTF-8."""

from typing import Any


def sendable(value: Any) -> Any:
    """Return a JSON value with "?" for halves of surrogate pairs, which names of files and the output of programs have.

    The SDK cannot write them, and would leave its client without any reply.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {sendable(key): sendable(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [sendable(held) for held in value]
    return value
