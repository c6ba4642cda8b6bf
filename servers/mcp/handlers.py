"""Handlers of the MCP methods that an agent may call, each in its request's session, and the SDK's server."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from typing import Any, Final, TypeAlias, cast

import mcp_types as types
from mcp.server.caching import CACHEABLE_METHODS, CacheableMethod, CacheHint
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel.server import NotificationOptions, Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.shared.exceptions import MCPError
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel

from openenv_core import __version__
from openenv_core.errors import EpisodeOverError
from openenv_core.protocol import jsonrpc
from openenv_core.protocol.errors import RefusalError, text_of
from openenv_core.tasks import InvalidResetOptionError
from openenv_core.tools import (
    InvalidArgumentsError,
    NoSuchPromptError,
    NoSuchResourceError,
    ToolErrorType,
    ToolResult,
)
from servers.execution import FATAL
from servers.mcp.context import KEY, CallContext, CallEndedError, RequestOrigin, replace_surrogates
from servers.mcp.requests import DISCOVER, INITIALIZE
from servers.metrics import TOOL
from servers.routes.http import answer_request, report_error
from servers.sessions import MethodRequest, SessionTable, UnknownSessionError
from servers.tooling import NoToolsError, Tooling, ToolRefusedError

Ctx: TypeAlias = ServerRequestContext[Any, Any]

Answer: TypeAlias = dict[str, Any] | None
"""A result as MCP's JSON; None for a caller that has cancelled its request."""

_RESOURCE_NOT_FOUND: Final = -32002
"""Error code of the handshake versions; the stateless version reports the URI as an invalid parameter."""

MAX_RESULT_CHARS: Final = 50 * 1024 * 1024
"""Characters of text and data in one result, whose structured content repeats them; WebSocket clients accept twice
as much."""

_ANSWER_SHARE: Final = 0.8
"""Share of a step's deadline that a client may take to answer a question; the rest lets the tool do without."""

MAX_SUBSCRIPTIONS: Final = 1024
"""Resources per connection."""

_MAX_SUBSCRIBED: Final = 256 * 1024
"""Total characters of the URIs."""


def _to_mcp_error(ctx: Ctx, error: BaseException) -> MCPError:
    """Return an exception as an MCP error."""
    translated = _translate(ctx, error)
    return MCPError(
        translated.code, replace_surrogates(translated.message), replace_surrogates(translated.data)
    )


def _translate(ctx: Ctx, error: BaseException) -> MCPError:
    match error:
        case MCPError():
            return error
        case UnknownSessionError():
            return MCPError(jsonrpc.INVALID_REQUEST, error.message)
        case RefusalError():
            return MCPError(jsonrpc.SERVER_ERROR, error.message, error.extra or None)
        case NoSuchResourceError():
            modern = ctx.protocol_version in MODERN_PROTOCOL_VERSIONS
            code = types.INVALID_PARAMS if modern else _RESOURCE_NOT_FOUND
            return MCPError(code, str(error), {"uri": (ctx.params or {}).get("uri")})
        case NoSuchPromptError() | InvalidArgumentsError():
            return MCPError(types.INVALID_PARAMS, str(error))
        case NoToolsError():
            return MCPError(types.INTERNAL_ERROR, str(error))
    return MCPError(types.INTERNAL_ERROR, report_error(error))


def _no_handle(ctx: Ctx) -> MCPError:
    """Return the error for a request of the stateless wire that names no session."""
    url = "/mcp" if ctx.request is None else str(ctx.request.url)
    text = (
        f"{url} names no session, and no other client's session is used; POST openenv/session/create to {url} for "
        f"one, then use {url}/SESSION_ID; or begin with initialize, which opens one; a server on loopback has one "
        "session for this URL with ropewalk serve --mcp-single-session"
    )
    return MCPError(types.INVALID_PARAMS, text)


class Handlers:
    """The methods of MCP, as handlers for the SDK's server."""

    def __init__(self, sessions: SessionTable, tooling: Tooling, only: RequestOrigin | None = None) -> None:
        self._sessions = sessions
        self._tooling = tooling
        self._fixed_origin = only
        limit = sessions.step_timeout_s
        self._answer_s = None if limit is None else limit * _ANSWER_SHARE

    def count_error(self, code: int) -> None:
        """Count an error that is sent to a caller."""
        self._sessions.metrics.count_error(code)

    def origin(self, ctx: Ctx) -> RequestOrigin:
        """Return the caller and session of a request; not of the SDK's session, which several clients may share."""
        if self._fixed_origin is not None:
            return self._fixed_origin
        assert ctx.request is not None
        origin: RequestOrigin = ctx.request.scope[KEY]
        return origin

    # Lists

    async def list_objects(
        self, key: str, method: str, ctx: Ctx, params: types.PaginatedRequestParams
    ) -> dict[str, Any]:
        """Answer tools/list, resources/list, resources/templates/list or prompts/list by the environment's method."""
        if params.cursor is not None:
            raise MCPError(types.INVALID_PARAMS, "a cursor is not accepted; every list comes whole")
        specs = self._tooling.list_declared(method)
        if specs is None:
            specs = await self._look_up(ctx, method)
        return {key: [spec.to_mcp() for spec in specs]}

    # Calls

    async def call_tool(self, ctx: Ctx, params: types.CallToolRequestParams) -> Answer:
        """Answer tools/call."""
        context = self._make_context(ctx)

        def encode(result: ToolResult) -> dict[str, Any]:
            if (size := _size(result.content)) > MAX_RESULT_CHARS:
                text = f"expected a result of at most {MAX_RESULT_CHARS} characters, got {size}; return a link instead"
                result = ToolResult.failed(ToolErrorType.EXECUTION_ERROR, text)
            error = result.error
            if error is not None and context.lacking and context.stateless:
                raise MCPError(
                    types.MISSING_REQUIRED_CLIENT_CAPABILITY,
                    error.message,
                    {"requiredCapabilities": context.lacking},
                )
            if error is not None and error.error_type is ToolErrorType.TOOL_NOT_FOUND:
                raise MCPError(types.INVALID_PARAMS, error.message)
            answer: dict[str, Any] = {"content": result.content, "isError": result.is_error}
            return answer if result.structured is None else answer | {"structuredContent": result.structured}

        try:
            call, read = self._tooling.request_call(
                context.session, params.name, params.arguments or {}, context, context.run
            )
            return await self._call(context, call, lambda result: encode(read(result)), kind=TOOL)
        except EpisodeOverError as error:
            return encode(ToolResult.failed(ToolErrorType.EXECUTION_ERROR, str(error)))
        except InvalidResetOptionError as error:
            return encode(ToolResult.failed(ToolErrorType.INVALID_ARGS, text_of(error)))
        except ToolRefusedError as refused:
            return encode(refused.result)

    async def read_resource(self, ctx: Ctx, params: types.ReadResourceRequestParams) -> Answer:
        """Answer resources/read."""
        return await self._call_method(
            ctx, "read_resource", (str(params.uri),), lambda contents: {"contents": contents}
        )

    async def get_prompt(self, ctx: Ctx, params: types.GetPromptRequestParams) -> Answer:
        """Answer prompts/get."""

        def encode(prompt: Any) -> dict[str, Any]:
            answer: dict[str, Any] = {"messages": prompt.messages}
            return answer if prompt.description is None else answer | {"description": prompt.description}

        return await self._call_method(ctx, "get_prompt", (params.name, params.arguments or {}), encode)

    async def complete(self, ctx: Ctx, params: types.CompleteRequestParams) -> Answer:
        """Answer completion/complete."""

        def encode(result: Any) -> dict[str, Any]:
            completion: dict[str, Any] = {"values": result.values, "hasMore": result.has_more}
            return {
                "completion": completion if result.total is None else completion | {"total": result.total}
            }

        ref = params.ref.model_dump(mode="json", by_alias=True, exclude_none=True)
        argument = params.argument.model_dump(mode="json", by_alias=True, exclude_none=True)
        return await self._call_method(ctx, "complete", (ref, argument), encode)

    # Listening

    async def subscribe(self, ctx: Ctx, params: types.SubscribeRequestParams) -> dict[str, Any]:
        """Answer resources/subscribe."""
        subscriptions = self._subscriptions(ctx)
        _check_subscriptions([*subscriptions, str(params.uri)])
        subscriptions.add(str(params.uri))
        return {}

    async def unsubscribe(self, ctx: Ctx, params: types.UnsubscribeRequestParams) -> dict[str, Any]:
        """Answer resources/unsubscribe."""
        self._subscriptions(ctx).discard(str(params.uri))
        return {}

    async def listen(
        self, ctx: Ctx, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        """Answer subscriptions/listen until the client ends the stream."""
        hub = self.origin(ctx).hub
        if hub is None:
            raise _no_handle(ctx)
        _check_subscriptions(params.notifications.resource_subscriptions or ())
        return await hub.listen(ctx, params)

    async def set_level(self, ctx: Ctx, params: types.SetLevelRequestParams) -> dict[str, Any]:
        """Answer logging/setLevel."""
        peer = self.origin(ctx).peer
        if peer is not None:
            peer.level = params.level
        return {}

    def _subscriptions(self, ctx: Ctx) -> set[str]:
        peer = self.origin(ctx).peer
        if peer is None:
            raise MCPError(types.METHOD_NOT_FOUND, "subscribe with subscriptions/listen instead")
        return peer.subscriptions

    async def _look_up(self, ctx: Ctx, method: str) -> Sequence[Any]:
        """Call a listing method in the request's session or, if it has none, in one opened for it."""
        origin = self.origin(ctx)
        own = nullcontext(origin.session) if origin.session else self._sessions.session(origin.owner)
        async with own as session:
            listed: Sequence[Any] = []
            if method == "list_tools":
                listed = await answer_request(session, *self._tooling.request_tools(session))
            elif session.has_method(method):
                listed = await answer_request(session, MethodRequest(method))
            return listed

    def _make_context(self, ctx: Ctx) -> CallContext:
        """Return the context of a call, which may notify and ask the caller; MCPError: the request has no session."""
        origin = self.origin(ctx)
        if origin.session is None:
            raise _no_handle(ctx)
        return CallContext(ctx, origin.session, origin, self._answer_s)

    async def _call_method(
        self, ctx: Ctx, name: str, args: tuple[Any, ...], encode: Callable[[Any], dict[str, Any]]
    ) -> Answer:
        """Call a method of the environment, which takes the context as its last argument."""
        context = self._make_context(ctx)
        return await self._call(context, MethodRequest(name, (*args, context), context.run), encode)

    async def _call(
        self,
        context: CallContext,
        request: Any,
        encode: Callable[[Any], dict[str, Any]],
        kind: int | None = None,
    ) -> Answer:
        """Answer a request in its session; its caller may cancel it, and may have to answer questions first."""
        received_at = perf_counter() if self._sessions.metrics.enabled else 0.0
        try:
            answer: dict[str, Any] = await answer_request(
                context.session, request, encode, kind=kind, received_at=received_at
            )
            return answer
        except asyncio.CancelledError:
            context.cancel()
            raise
        except CallEndedError:
            return context.questions
        finally:
            if not context.cancelled:
                await context.flush()


def _check_subscriptions(uris: Sequence[str]) -> None:
    length = sum(map(len, uris))
    if len(uris) > MAX_SUBSCRIPTIONS or length > _MAX_SUBSCRIBED:
        text = (
            f"expected subscriptions to at most {MAX_SUBSCRIPTIONS} resources, with {_MAX_SUBSCRIBED} characters, "
            f"got {len(uris)} with {length}"
        )
        raise MCPError(types.INVALID_PARAMS, text)


def _size(content: list[dict[str, Any]]) -> int:
    sources = [source for block in content for source in (block, block.get("resource") or {})]
    return sum(len(source.get(key) or "") for source in sources for key in ("text", "data", "blob"))


CHANGES: Final = NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True)
"""Declared in the handshake: every list may change."""


def make_server(name: str, handlers: Handlers, tooling: Tooling) -> Server[dict[str, Any]]:
    """Return the SDK's server with the handlers that the environment's tooling offers."""
    private = CacheHint(ttl_ms=0, scope="private")
    hints = cast("dict[CacheableMethod, CacheHint]", dict.fromkeys(CACHEABLE_METHODS, private))
    server: Server[dict[str, Any]] = Server(name, version=__version__, cache_hints=hints)

    def add(
        method: str,
        params: type[BaseModel],
        handler: Callable[[Ctx, Any], Awaitable[Answer | BaseModel]],
    ) -> None:
        async def complete(ctx: Ctx, params: Any) -> HandlerResult:
            try:
                answer = await handler(ctx, params)
            except FATAL as error:
                raise _to_mcp_error(ctx, error) from None
            if isinstance(answer, dict):
                answer = replace_surrogates(answer)
            # An empty answer stays empty: clients of the handshake versions reject any key in it.
            return {"resultType": "complete"} | answer if isinstance(answer, dict) and answer else answer

        server.add_request_handler(method, params, complete)

    async def discover(ctx: Ctx, params: types.RequestParams) -> types.DiscoverResult:
        # The stateless wire has a session only if the caller names one; other callers are directed to the handshake
        # versions, where each connection has its own session.
        named = handlers.origin(ctx).named
        return types.DiscoverResult(
            supported_versions=list(MODERN_PROTOCOL_VERSIONS if named else HANDSHAKE_PROTOCOL_VERSIONS),
            capabilities=server.get_capabilities(protocol_version=ctx.protocol_version),
            instructions=server.instructions,
        )

    server.add_request_handler(DISCOVER, types.RequestParams, discover)

    def add_list(method: str, key: str, lister: str) -> None:
        add(method, types.PaginatedRequestParams, partial(handlers.list_objects, key, lister))

    add_list("tools/list", "tools", "list_tools")
    add("tools/call", types.CallToolRequestParams, handlers.call_tool)
    add("subscriptions/listen", types.SubscriptionsListenRequestParams, handlers.listen)
    add("logging/setLevel", types.SetLevelRequestParams, handlers.set_level)
    if tooling.offers("resources"):
        add_list("resources/list", "resources", "list_resources")
        add_list("resources/templates/list", "resourceTemplates", "list_resource_templates")
        add("resources/read", types.ReadResourceRequestParams, handlers.read_resource)
        add("resources/subscribe", types.SubscribeRequestParams, handlers.subscribe)
        add("resources/unsubscribe", types.UnsubscribeRequestParams, handlers.unsubscribe)
    if tooling.offers("prompts"):
        add_list("prompts/list", "prompts", "list_prompts")
        add("prompts/get", types.GetPromptRequestParams, handlers.get_prompt)
    if tooling.offers("completions"):
        add("completion/complete", types.CompleteRequestParams, handlers.complete)

    async def track_channel(ctx: Ctx, call_next: CallNext) -> HandlerResult:
        origin = handlers.origin(ctx)
        if origin.peer is not None:
            origin.peer.channel = ctx.session
        try:
            return await call_next(ctx)
        except Exception as error:
            if isinstance(error, MCPError):
                handlers.count_error(error.code)
            if ctx.method == INITIALIZE and origin.peer is not None:
                origin.peer.refused = True
            raise

    # Replaces the SDK's own middleware, which traces every message for exporters that are not configured.
    # Request states are sealed with a key of this process, which holds the sessions that they belong to.
    sealing = RequestStateSecurity(
        keys=[os.urandom(32)], bind_principal=lambda ctx: handlers.origin(ctx).binding
    )
    server.middleware[:] = [track_channel, RequestStateBoundary(sealing, default_audience=name)]
    return server
