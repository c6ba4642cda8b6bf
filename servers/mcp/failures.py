"""What of an environment or of the table of sessions has failed, as the error that a standard client is told."""

from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from openenv_core.protocol import jsonrpc
from openenv_core.protocol.codes import Refusal
from openenv_core.tools import InvalidArguments, NoSuchPrompt, NoSuchResource
from servers.mcp.refusals import HANDLES
from servers.mcp.texts import sendable
from servers.routes.failures import reported
from servers.sessions import UnknownSession
from servers.tooling import NoTools

RESOURCE_NOT_FOUND = -32002
"""Of the handshake versions; the stateless one says that the address is an invalid parameter."""


def told(ctx: ServerRequestContext[Any, Any], error: BaseException) -> MCPError:
    """Return what a client is told of a failure."""
    found = _told(ctx, error)
    return MCPError(found.code, sendable(found.message), sendable(found.data))


def _told(ctx: ServerRequestContext[Any, Any], error: BaseException) -> MCPError:
    match error:
        case MCPError():
            return error
        case UnknownSession():
            return MCPError(jsonrpc.INVALID_REQUEST, error.message)
        case Refusal():
            return MCPError(jsonrpc.SERVER_ERROR, error.message, error.extra or None)
        case NoSuchResource():
            modern = ctx.protocol_version in MODERN_PROTOCOL_VERSIONS
            code = types.INVALID_PARAMS if modern else RESOURCE_NOT_FOUND
            return MCPError(code, str(error), {"uri": (ctx.params or {}).get("uri")})
        case NoSuchPrompt() | InvalidArguments():
            return MCPError(types.INVALID_PARAMS, str(error))
        case NoTools():
            return MCPError(types.INTERNAL_ERROR, str(error))
    return MCPError(types.INTERNAL_ERROR, reported(error))


def no_handle() -> MCPError:
    """Return what a client of the stateless wire is told that asks for something of no session."""
    text = (
        f"expected a session for this request, got none, and nobody else's is taken for it; {HANDLES}; a client that "
        "begins with initialize has one of its own"
    )
    return MCPError(types.INVALID_PARAMS, text)
