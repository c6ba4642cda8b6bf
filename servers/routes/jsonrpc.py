"""The JSON-RPC methods, for requests over POST /mcp, the socket /mcp, and mcp frames on /ws."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from openenv_core.protocol import jsonrpc
from openenv_core.protocol.errors import RefusalError, short, text_of
from openenv_core.protocol.jsonrpc import JsonRpcFaultError
from openenv_core.tools import SILENT, ToolResult
from servers.execution import FATAL
from servers.metrics import TOOL
from servers.routes.http import answer_request, json_answer, report_error, respond, wait_of
from servers.security import owner_of
from servers.sessions import REQUEST_WAIT_S, EnvironmentSession, SessionTable, UnknownSessionError
from servers.tooling import NoToolsError, Tooling

logger = logging.getLogger("servers")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a JSON-RPC method.

    Attributes:
        owner: Fingerprint of the caller's token.
        session: The session of the caller's socket, if any.
        wait_s: Seconds to wait for a slot when a session is opened.
    """

    owner: str
    session: EnvironmentSession | None = None
    wait_s: float = REQUEST_WAIT_S


_Params: TypeAlias = Mapping[str, Any]


class JsonRpc:
    """Answers JSON-RPC requests: creating and closing sessions, listing and calling tools."""

    def __init__(self, sessions: SessionTable, tooling: Tooling) -> None:
        self._sessions = sessions
        self._tooling = tooling
        self._methods: Mapping[str, Callable[[Caller, _Params], Awaitable[Any]]] = {
            "openenv/session/create": self._create,
            "openenv/session/close": self._close,
            "tools/list": self._list_tools,
            "tools/call": self._call_tool,
        }

    async def serve(self, request: Request) -> Response:
        """Answer POST /mcp, except for requests of standard MCP, which `servers.mcp` answers first."""

        async def work() -> Response:
            return json_answer(await self.answer_text(text, caller))

        text = await request.body()
        wait_s = wait_of(request.scope["headers"], REQUEST_WAIT_S)
        caller = Caller(owner_of(request.scope), wait_s=wait_s)
        # A disconnect ends an environment opened for the request alone; a call in a standing session continues.
        return await respond(request, work())

    async def answer_text(self, text: str | bytes, caller: Caller) -> bytes:
        """Return the response to a request; invalid JSON gets an error response."""
        try:
            value = jsonrpc.parse(text)
        except JsonRpcFaultError as fault:
            return self.encode_fault(None, fault)
        return await self.answer(value, caller, len(text))

    async def answer(self, value: Any, caller: Caller, size: int) -> bytes:
        """Return the response to a request, given its parsed JSON and the length of its text."""
        request_id: int | str | None = None
        try:
            request = jsonrpc.read(value, size)
            request_id = request.id
            method = self._methods.get(request.method)
            if method is None:
                raise JsonRpcFaultError(
                    jsonrpc.METHOD_NOT_FOUND,
                    f"method not found: expected one of {', '.join(self._methods)}, got {short(request.method)!r}",
                )
            return jsonrpc.encode_result(request_id, await method(caller, request.params))
        except JsonRpcFaultError as error:
            fault = error
        except RefusalError as refusal:
            fault = fault_of(refusal)
        except FATAL as failure:
            logger.exception("a JSON-RPC method failed")
            fault = JsonRpcFaultError(jsonrpc.INTERNAL_ERROR, text_of(failure))
        return self.encode_fault(request_id, fault)

    def encode_fault(self, request_id: int | str | None, fault: JsonRpcFaultError) -> bytes:
        """Return the error response of a fault, and count it."""
        self._sessions.metrics.count_error(fault.code)
        return jsonrpc.encode_fault(request_id, fault)

    async def _create(self, caller: Caller, _: _Params) -> Any:
        if caller.session is not None:
            return {"session_id": self._sessions.assign_id(caller.session)}
        return {"session_id": (await self._sessions.open(caller.owner, wait_s=caller.wait_s)).id}

    async def _close(self, caller: Caller, params: _Params) -> Any:
        session_id = params.get("session_id")
        if not session_id:
            raise JsonRpcFaultError(jsonrpc.INVALID_PARAMS, "params have no session_id")
        if caller.session is not None and session_id == caller.session.id:
            text = "the session is this socket's own; close the socket instead"
            raise JsonRpcFaultError(jsonrpc.INVALID_REQUEST, text)
        session = self._sessions.find(caller.owner, session_id)
        if await self._sessions.close(session):
            return {"session_id": session_id, "closed": True}
        return {"session_id": session_id, "closed": False, "closing": True}

    async def _list_tools(self, caller: Caller, params: _Params) -> Any:
        session = self._find(caller, params)
        declared: Any = self._tooling.list_declared("list_tools")
        if declared is None:
            declared = await self._answer_in_session(caller, session, self._tooling.request_tools)
        return {"tools": [spec.wire().model_dump(mode="json") for spec in declared]}

    async def _call_tool(self, caller: Caller, params: _Params) -> Any:
        session = self._find(caller, params)
        name, arguments = params.get("name"), params.get("arguments")
        if not isinstance(name, str) or not name:
            raise JsonRpcFaultError(jsonrpc.INVALID_PARAMS, "params have no name of a tool")
        if arguments is not None and not isinstance(arguments, dict):
            raise JsonRpcFaultError(jsonrpc.INVALID_PARAMS, "arguments must be an object")

        def request(session: EnvironmentSession) -> tuple[Any, Callable[[Any], Any]]:
            call, read = self._tooling.request_call(session, name, arguments or {}, SILENT)
            return call, lambda result: _encode_result(read(result))

        return await self._answer_in_session(caller, session, request, kind=TOOL)

    async def _answer_in_session(
        self,
        caller: Caller,
        session: EnvironmentSession | None,
        make_request: Callable[[EnvironmentSession], tuple[Any, Callable[[Any], T]]],
        kind: int | None = None,
    ) -> T:
        """Have a session answer a request, or an environment opened for the request alone if `session` is None.

        Args:
            caller: The caller.
            session: The session.
            make_request: Returns the request, and what makes the reply of its result.
            kind: What the call counts as.
        """
        received_at = perf_counter() if self._sessions.metrics.enabled else 0.0
        own = nullcontext(session) if session else self._sessions.session(caller.owner, wait_s=caller.wait_s)
        try:
            if not self._tooling.possible:
                raise NoToolsError
            async with own as called:
                request, read = make_request(called)
                return await answer_request(called, request, read, kind=kind, received_at=received_at)  # type: ignore[no-any-return]
        except NoToolsError:
            text = "the environment offers no MCP tools"
            raise JsonRpcFaultError(jsonrpc.INTERNAL_ERROR, text) from None
        except (RefusalError, JsonRpcFaultError):
            raise
        except FATAL as error:
            raise JsonRpcFaultError(jsonrpc.INTERNAL_ERROR, report_error(error)) from error

    def _find(self, caller: Caller, params: _Params) -> EnvironmentSession | None:
        """Return the session to call: the socket's own, or the one that the params name, or None."""
        if caller.session is not None or not params.get("session_id"):
            return caller.session
        return self._sessions.find(caller.owner, params["session_id"])


def _encode_result(result: ToolResult) -> dict[str, Any]:
    """Return the result of a tool in the released dialect; JsonRpcFaultError: the tool failed."""
    if result.error is not None:
        raise JsonRpcFaultError(
            jsonrpc.INTERNAL_ERROR, result.error.message, {"error_type": result.error.error_type.value}
        )
    return {
        "content": result.content,
        "structured_content": result.structured,
        "meta": None,
        "data": result.value,
        "is_error": False,
    }


def fault_of(refusal: RefusalError) -> JsonRpcFaultError:
    """Return the JSON-RPC error of a refusal."""
    code = jsonrpc.INVALID_PARAMS if isinstance(refusal, UnknownSessionError) else jsonrpc.SERVER_ERROR
    return JsonRpcFaultError(code, refusal.message, refusal.extra or None)
