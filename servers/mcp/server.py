"""The SDK's server with our handlers: one in a process, whatever the number of sessions."""

import os
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias, cast

import mcp_types as types
from mcp.server.caching import CACHEABLE_METHODS, CacheableMethod, CacheHint
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel.server import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel

from servers.mcp.context import sendable
from servers.mcp.handlers import Handlers
from servers.mcp.requests import DISCOVER, INITIALIZE
from servers.tooling import Tooling

Ctx: TypeAlias = ServerRequestContext[Any, Any]
Result: TypeAlias = dict[str, Any] | BaseModel


class McpServer(Server[dict[str, Any]]):
    """Says that its lists may change, which the SDK's own does not say over HTTP."""

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
    ) -> InitializationOptions:
        """Return what the handshake answers."""
        changes = NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True)
        return super().create_initialization_options(
            notification_options or changes, experimental_capabilities, extensions
        )


def make_server(name: str, handlers: Handlers, tooling: Tooling) -> McpServer:
    """Return a server.

    Args:
        name: What the environment is called.
        handlers: Its methods.
        tooling: Says which of them there are.
    """
    private = CacheHint(ttl_ms=0, scope="private")
    hints = cast("dict[CacheableMethod, CacheHint]", dict.fromkeys(CACHEABLE_METHODS, private))
    server = McpServer(name, version=_version(), cache_hints=hints)

    def add(method: str, params: type[BaseModel], handler: Callable[[Ctx, Any], Awaitable[Result]]) -> None:
        async def complete(ctx: Ctx, given: Any) -> Result:
            answer = await handler(ctx, given)
            if isinstance(answer, dict):
                answer = sendable(answer)
            # An answer without content stays without: clients of the handshake versions refuse any key in it.
            return {"resultType": "complete"} | answer if isinstance(answer, dict) and answer else answer

        server.add_request_handler(method, params, complete)

    async def discover(ctx: Ctx, params: types.RequestParams) -> types.DiscoverResult:
        # The stateless wire has a session only where the caller names one: who does not is asked to begin a connection,
        # which has one of its own.
        named = handlers.seat(ctx).named
        return types.DiscoverResult(
            supported_versions=list(MODERN_PROTOCOL_VERSIONS if named else HANDSHAKE_PROTOCOL_VERSIONS),
            capabilities=server.get_capabilities(protocol_version=ctx.protocol_version),
            instructions=server.instructions,
        )

    server.add_request_handler(DISCOVER, types.RequestParams, discover)
    add("tools/list", types.PaginatedRequestParams, handlers.list_tools)
    add("tools/call", types.CallToolRequestParams, handlers.call_tool)
    add("subscriptions/listen", types.SubscriptionsListenRequestParams, handlers.listen)
    add("logging/setLevel", types.SetLevelRequestParams, handlers.set_level)
    if tooling.offers("resources"):
        add("resources/list", types.PaginatedRequestParams, handlers.list_resources)
        add("resources/templates/list", types.PaginatedRequestParams, handlers.list_templates)
        add("resources/read", types.ReadResourceRequestParams, handlers.read_resource)
        add("resources/subscribe", types.SubscribeRequestParams, handlers.subscribe)
        add("resources/unsubscribe", types.UnsubscribeRequestParams, handlers.unsubscribe)
    if tooling.offers("prompts"):
        add("prompts/list", types.PaginatedRequestParams, handlers.list_prompts)
        add("prompts/get", types.GetPromptRequestParams, handlers.get_prompt)
    if tooling.offers("completions"):
        add("completion/complete", types.CompleteRequestParams, handlers.complete)

    async def remember(ctx: Ctx, call_next: CallNext) -> HandlerResult:
        seat = handlers.seat(ctx)
        if seat.peer is not None:
            seat.peer.channel = ctx.session
        try:
            return await call_next(ctx)
        except Exception:
            if ctx.method == INITIALIZE and seat.link is not None:
                seat.link.refused = True
            raise

    # In place of the SDK's own, which traces every message for exporters that nobody has asked for.
    # States are sealed with a key of this process, which has the sessions that they belong to.
    sealing = RequestStateSecurity(
        keys=[os.urandom(32)], bind_principal=lambda ctx: handlers.seat(ctx).binding
    )
    server.middleware[:] = [remember, RequestStateBoundary(sealing, default_audience=name)]
    return server


def _version() -> str:
    try:
        return version("ropewalk")
    except PackageNotFoundError:
        return ""
