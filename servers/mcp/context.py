"""The context of a call over MCP: what a tool tells and asks reaches the client that made the call."""

import asyncio
import json
from collections.abc import Awaitable, Coroutine, Mapping
from math import isfinite
from typing import Any, Final, TypeVar, get_args

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.subscriptions import (
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ServerEvent,
    ToolsListChanged,
)
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.message import ServerMessageMetadata
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from openenv_core.protocol.jsonio import dumps
from openenv_core.tools import AskingUnavailable, LogLevel, Request, ToolContext
from servers.mcp.outbox import Outbox
from servers.mcp.questions import answer_model, lacking, request_of
from servers.mcp.rounds import Rounds
from servers.mcp.seat import Seat
from servers.mcp.texts import sendable

T = TypeVar("T")

LEVELS: Final[tuple[str, ...]] = get_args(types.LoggingLevel)
"""The least first."""


class CallEnded(Exception):  # noqa: N818 - what happened
    """The call was ended before its tool returned: by its caller, or because that has to answer questions first."""


class CallContext(ToolContext):
    """The context of one call; made on the loop.

    Args:
        ctx: The handler's.
        seat: Whose request it is.
        answer_s: Seconds that the client may take over a question; None: for ever.
    """

    def __init__(self, ctx: ServerRequestContext[Any, Any], seat: Seat, answer_s: float | None) -> None:
        self._ctx = ctx
        self._seat = seat
        self._answer_s = answer_s
        self._outbox = Outbox()
        self._level = _least_level(ctx, seat)
        self._cancelled = False
        self._task: asyncio.Future[Any] | None = None
        self._rounds = _rounds_of(ctx)
        self.lacking: dict[str, dict[str, Any]] = {}

    @property
    def cancelled(self) -> bool:
        """Whether the caller has given the call up."""
        return self._cancelled

    @property
    def stateless(self) -> bool:
        """Whether the call came by the stateless wire."""
        return self._rounds is not None

    @property
    def questions(self) -> dict[str, Any] | None:
        """The result of the call where it ends with questions to its caller."""
        return self._rounds.result() if self._rounds is not None and self._rounds.open else None

    # For the tool

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Tell how far the call is. Never waits; from any thread."""
        if self._ctx.meta is not None and "progress_token" in self._ctx.meta and isfinite(progress):
            text = sendable(message)
            self._outbox.put(lambda: self._ctx.session.report_progress(progress, total, text))

    def log(self, level: LogLevel, data: Any, logger: str | None = None) -> None:
        """Tell the caller something. Never waits; from any thread."""
        if self._level is None or LEVELS.index(level) < self._level:
            return
        plain = json.loads(dumps(data))
        params = types.LoggingMessageNotificationParams(level=level, data=plain, logger=logger)
        message = types.LoggingMessageNotification(params=params)
        self._outbox.put(lambda: self._ctx.session.send_notification(message, self._ctx.request_id))

    def tools_changed(self) -> None:
        """Tell whoever listens that the list of tools is another one now."""
        self._publish(ToolsListChanged())

    def resources_changed(self) -> None:
        """Tell whoever listens that the list of resources is another one now."""
        self._publish(ResourcesListChanged())

    def prompts_changed(self) -> None:
        """Tell whoever listens that the list of prompts is another one now."""
        self._publish(PromptsListChanged())

    def resource_updated(self, uri: str) -> None:
        """Tell those who have subscribed to a resource that it holds something else now."""
        self._publish(ResourceUpdated(uri))

    async def ask(self, requests: Mapping[str, Request]) -> Mapping[str, Mapping[str, Any]]:
        """Ask the caller back; on the stateless wire the call ends here until it is made with the answers.

        Raises:
            AskingUnavailable: The caller cannot be asked this, or does not answer.
        """
        if missing := lacking(requests, self._ctx.session.client_capabilities):
            self.lacking |= missing
            raise AskingUnavailable(
                f"expected a client that has declared {', '.join(missing)}, got one that has not; let the tool do "
                "without, or connect with a client that answers such questions"
            )
        if self._rounds is None:
            names = list(requests)
            answers = await asyncio.gather(*(self._asked(requests[name]) for name in names))
            return dict(zip(names, answers, strict=True))
        if (found := self._rounds.answers(requests)) is not None:
            return found
        assert self._task is not None
        self._task.cancel()
        await asyncio.get_running_loop().create_future()  # until the cancellation comes
        raise AssertionError

    # For the handler

    async def run(self, call: Awaitable[T]) -> T:
        """Await the rest of a call in such a way that it can be cancelled alone.

        Raises:
            CallEnded: It was.
        """
        if self._cancelled:
            if isinstance(call, Coroutine):
                call.close()
            raise CallEnded
        self._task = task = asyncio.ensure_future(call)
        try:
            return await task
        except asyncio.CancelledError:
            if task.cancelled() and (self._cancelled or self.questions is not None):
                raise CallEnded from None
            raise

    def cancel(self) -> None:
        """Give the call up: what is asynchronous of it is cancelled, the rest may look."""
        self._cancelled = True
        self._outbox.close()
        if self._task is not None:
            self._task.cancel()

    async def flush(self) -> None:
        """Wait until what the call has told is on its way."""
        await self._outbox.flush()
        self._outbox.close()

    def _publish(self, event: ServerEvent) -> None:
        if self._seat.hub is not None:
            self._seat.hub.publish(event)

    async def _asked(self, question: Request) -> Mapping[str, Any]:
        try:
            answer = await self._ctx.session.send_request(
                request_of(question),
                answer_model(question),
                request_read_timeout_seconds=self._answer_s,
                metadata=ServerMessageMetadata(related_request_id=self._ctx.request_id),
            )
        except (MCPError, NoBackChannelError, ValidationError) as error:
            raise AskingUnavailable(f"expected an answer of the client, got: {error}") from error
        return answer.model_dump(mode="json", by_alias=True, exclude_none=True)


def _least_level(ctx: ServerRequestContext[Any, Any], seat: Seat) -> int | None:
    """Return the rank of the least level of log messages that the caller wants; None where it wants none."""
    if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
        wanted = (ctx.meta or {}).get(types.LOG_LEVEL_META_KEY)
        return LEVELS.index(wanted) if wanted in LEVELS else None
    return LEVELS.index("debug" if seat.peer is None else seat.peer.level)


def _rounds_of(ctx: ServerRequestContext[Any, Any]) -> Rounds | None:
    if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        return None
    params = ctx.params or {}
    return Rounds(params.get("requestState"), params.get("inputResponses"))
