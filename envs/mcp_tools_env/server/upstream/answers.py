"""What a tool server says of itself, and what its errors mean for a call."""

from dataclasses import dataclass

import mcp_types as types
from mcp.shared.exceptions import MCPError

from openenv_core.tools import ToolErrorType

from .errors import CallFailed, told


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a server says of itself."""

    name: str
    version: str
    protocol: str
    instructions: str


def too_long(timeout_s: float) -> CallFailed:
    """Return the failure of a call that took too long: its arguments may be why, so it tells of the policy too."""
    words = f"expected an answer within {timeout_s:g} s, got none; the server was told to stop"
    return CallFailed(ToolErrorType.TIMEOUT, words)


def broken(why: str) -> CallFailed:
    """Return the failure of a call whose server failed."""
    return CallFailed(ToolErrorType.TRANSPORT_ERROR, f"the tool server failed: {why}", infrastructure=True)


def refusal(error: MCPError) -> CallFailed:
    """Return the failure of a call that its server refused."""
    kind = ToolErrorType.EXECUTION_ERROR
    if error.code == types.INVALID_PARAMS:
        kind = ToolErrorType.INVALID_ARGS
    return CallFailed(kind, told(error))
