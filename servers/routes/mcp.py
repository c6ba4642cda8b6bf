"""/mcp in the released dialect: JSON-RPC over HTTP, and on a socket with a session of its own."""

from fastapi import APIRouter, Request, Response

from openenv_core.protocol import jsonrpc
from openenv_core.protocol.codes import Refusal
from openenv_core.protocol.jsonrpc import Fault
from servers.routes import description
from servers.routes.answers import while_connected
from servers.routes.conversation import Seat, SocketRoute
from servers.routes.jsonrpc import Caller, JsonRpc, fault_of
from servers.routes.sockets import Sockets
from servers.security.guard import owner_of
from servers.sessions import SessionTable


class McpSocketRoute(SocketRoute):
    """The ASGI application behind the socket /mcp.

    Args:
        sessions: Where sessions come from.
        rpc: Answers the requests.
        sockets: Keeps count.
        send_timeout_s: Seconds that a client may leave its replies unread.
    """

    def __init__(self, sessions: SessionTable, rpc: JsonRpc, sockets: Sockets, send_timeout_s: float) -> None:
        super().__init__(sessions, _Rpc(rpc), sockets, send_timeout_s)


class _Rpc:
    """Every frame is a JSON-RPC request."""

    def __init__(self, rpc: JsonRpc) -> None:
        self._rpc = rpc

    async def answer(self, seat: Seat, text: str | None) -> str | None:
        """Return the response to one frame."""
        if text is None:
            fault = Fault(
                jsonrpc.PARSE_ERROR, "expected a text frame that holds a request, got a binary frame"
            )
            return jsonrpc.encode_fault(None, fault).decode()
        return (await self._rpc.answer_text(text, Caller(seat.session.owner, seat.session))).decode()

    def refusal(self, refusal: Refusal) -> str:
        """Return the response that no request has asked for."""
        return jsonrpc.encode_fault(None, fault_of(refusal)).decode()


def mcp_router(rpc: JsonRpc) -> APIRouter:
    """Return the HTTP side of /mcp."""
    router = APIRouter()

    @router.post(
        "/mcp",
        response_model=None,
        responses={200: description.answer("The response.", description.RPC_ANSWER)},
        openapi_extra=description.RPC_BODY,
    )
    async def mcp(request: Request) -> Response:
        """Answer one JSON-RPC request; errors are in the body, the status is 200.

        Requests of standard MCP, which `servers.mcp` answers at this address, do not come this far.
        """
        caller = Caller(owner_of(request.scope))
        # Whoever leaves gives up what was made for the request alone; a call in a standing session goes on.
        return await while_connected(request, _answered(rpc, await request.body(), caller))

    return router


async def _answered(rpc: JsonRpc, text: bytes, caller: Caller) -> Response:
    return Response(await rpc.answer_text(text, caller), media_type="application/json")
