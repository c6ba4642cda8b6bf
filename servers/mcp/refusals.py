"""What a standard client is told when it is refused before the SDK has the request: JSON-RPC, with a status."""

from typing import Any

from starlette.types import Receive, Scope, Send

from openenv_core.protocol import jsonrpc
from openenv_core.protocol.codes import CAPACITY_REACHED, Refusal
from openenv_core.protocol.jsonrpc import Fault
from servers.mcp.asked import Asked
from servers.routes.answers import RETRY_AFTER_S, json_answer
from servers.sessions import Busy, DeadlinePassed, UnknownSession

HANDLES = (
    "POST openenv/session/create to /mcp for one, then use /mcp/{session_id}, or put the id in the header "
    "X-OpenEnv-Session"
)
"""How a client of the stateless wire comes by a session."""


class Refused(Exception):  # noqa: N818 - what happened
    """A request that the SDK does not get to see.

    Args:
        status: The HTTP status.
        fault: What the caller is told.
        retry: It may come again soon.
    """

    def __init__(self, status: int, fault: Fault, *, retry: bool = False) -> None:
        super().__init__(fault.message)
        self.status = status
        self.fault = fault
        self.retry = retry

    async def tell(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the refusal."""
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.retry else None
        body = jsonrpc.encode_fault(asked.request_id, self.fault)
        await json_answer(body, self.status, headers)(scope, receive, send)


def refused_by(refusal: Refusal) -> Refused:
    """Return what a refusal of the table of sessions is for a standard client."""
    data: Any = refusal.extra or None
    if isinstance(refusal, UnknownSession):
        return no_session(refusal.message)
    fault = Fault(jsonrpc.SERVER_ERROR, refusal.message, data)
    if refusal.code == CAPACITY_REACHED:
        return Refused(503, fault, retry=True)
    if isinstance(refusal, Busy):
        return Refused(429, fault, retry=True)
    return Refused(504 if isinstance(refusal, DeadlinePassed) else 500, fault)


def no_session(message: str) -> Refused:
    """Return the refusal of a request about a session that is not there, or is somebody else's."""
    return Refused(404, Fault(jsonrpc.INVALID_REQUEST, message))


def no_tools() -> Refused:
    """Return the refusal of every request to an environment without tools."""
    text = "expected an environment with tools, got one that offers none; it is served on /ws and plain HTTP"
    return Refused(404, Fault(jsonrpc.INTERNAL_ERROR, text))
