"""A small MCP server for trying out the environment, used if none is configured: a notebook and a calculator.

    python -I -S demo_server.py

It is run by its path like any other tool server, and is independent of the environment. It uses only the standard
library so that it starts in a few milliseconds; write a real server with an SDK.
"""

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MAX_NOTES = 100

INVALID_PARAMS, METHOD_NOT_FOUND = -32602, -32601

_notes: dict[str, str] = {}


def write_note(name: str, text: str) -> str:
    """Write a note, or write it anew."""
    if name not in _notes and len(_notes) >= MAX_NOTES:
        raise ValueError(f"there are {MAX_NOTES} notes, which is the most; write one of them anew")
    _notes[name] = text
    return f"{name} has {len(text)} characters now"


def read_note(name: str) -> str:
    """Read a note."""
    if name not in _notes:
        raise ValueError(f"there is no note {name!r}; there are: {', '.join(sorted(_notes)) or 'none'}")
    return _notes[name]


def list_notes() -> list[str]:
    """List the names of the notes."""
    return sorted(_notes)


def summarise(numbers: list[float]) -> dict[str, float]:
    """Work out the sum, the mean and the median of numbers."""
    return {"sum": sum(numbers), "mean": statistics.fmean(numbers), "median": statistics.median(numbers)}


_NAME = {"type": "string", "description": "Of the note", "minLength": 1, "maxLength": 64}
_TEXT = {"type": "string", "maxLength": 10_000}
# With larger numbers, a sum could overflow to infinity, which JSON cannot represent.
_NUMBER = {"type": "number", "minimum": -1e300, "maximum": 1e300}
_NUMBERS = {"type": "array", "items": _NUMBER, "minItems": 1, "maxItems": 1000}

TOOLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "write_note": (write_note, {"name": _NAME, "text": _TEXT}),
    "read_note": (read_note, {"name": _NAME}),
    "list_notes": (list_notes, {}),
    "summarise": (summarise, {"numbers": _NUMBERS}),
}


def initialize(params: dict[str, Any]) -> dict[str, Any]:
    """Negotiate the protocol version."""
    version = params.get("protocolVersion")
    return {
        "protocolVersion": version if version in VERSIONS else VERSIONS[-1],
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "ropewalk-demo", "version": "0.1.0"},
        "instructions": "Notes are kept for as long as the session lasts.",
    }


def list_tools(_: dict[str, Any]) -> dict[str, Any]:
    """List the tools."""
    return {
        "tools": [
            {
                "name": name,
                "description": tool.__doc__,
                "inputSchema": {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                    "additionalProperties": False,
                },
            }
            for name, (tool, properties) in TOOLS.items()
        ]
    }


def call_tool(params: dict[str, Any]) -> dict[str, Any]:
    """Call a tool. Only the names of the arguments are checked: the client has the schemas."""
    name, arguments = params.get("name"), params.get("arguments") or {}
    if name not in TOOLS:
        raise LookupError(f"Unknown tool: {name}")
    tool, properties = TOOLS[name]
    if not isinstance(arguments, dict) or set(arguments) != set(properties):
        raise LookupError(f"expected the arguments {', '.join(properties) or 'none'}")
    try:
        value = tool(**arguments)
    except (ArithmeticError, TypeError, ValueError) as error:
        return {"content": [{"type": "text", "text": str(error)}], "isError": True}
    text = value if isinstance(value, str) else json.dumps(value)
    structured = value if isinstance(value, dict) else {"result": value}
    return {"content": [{"type": "text", "text": text}], "structuredContent": structured}


METHODS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "initialize": initialize,
    "ping": lambda _: {},
    "tools/list": list_tools,
    "tools/call": call_tool,
}


def handle_message(message: dict[str, Any]) -> dict[str, Any] | None:
    """Return the reply to a message; None if it needs no reply."""
    if "id" not in message or "method" not in message:
        return None
    reply = {"jsonrpc": "2.0", "id": message["id"]}
    method = METHODS.get(message["method"])
    if method is None:
        return {**reply, "error": {"code": METHOD_NOT_FOUND, "message": "Method not found"}}
    try:
        return {**reply, "result": method(message.get("params") or {})}
    except LookupError as error:
        return {**reply, "error": {"code": INVALID_PARAMS, "message": str(error)}}


def main() -> None:
    """Reply to requests, one per line, until standard input ends."""
    for line in sys.stdin:
        if (reply := handle_message(json.loads(line))) is not None:
            sys.stdout.write(json.dumps(reply) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
