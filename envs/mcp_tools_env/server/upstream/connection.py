"""A connection to a tool server, owned by one task that opens and closes it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

import mcp_types as types
from mcp.client import Client
from mcp.shared.exceptions import MCPError
from mcp_types.version import LATEST_HANDSHAKE_VERSION, MODERN_PROTOCOL_VERSIONS
from pydantic import TypeAdapter, ValidationError

from openenv_core.backoff import Backoff
from openenv_core.tools import ToolContext, ToolErrorType

from .entries import drop_invalid_entries
from .errors import CallError, FirstFailure, ServerFailedError, UpstreamWire, describe_error, unwrap_group
from .results import collect_tools, make_refusal_error, make_server_error, make_timeout_error

T = TypeVar("T")

LATENESS_ALLOWANCE_S: Final = 1.0
"""Extra time for a reply after its timeout: the SDK applies the same timeout and cancels the call on the server."""

ANSWER_AFTER_FAULT_S: Final = 0.05
"""Extra time for a reply after a fault: it may be the error that caused the fault, in more detail."""


class _UpstreamLostError(Exception):
    def __init__(self, error: MCPError) -> None:
        super().__init__(describe_error(error))
        self.error = error


async def _wait_for_answer(answer: Awaitable[T], fault: FirstFailure, timeout_s: float) -> T:
    """Wait for a reply, its timeout, or a fault that means that no reply will come."""
    fault.take()  # discard a fault from before this request
    start = time.monotonic()
    answer_task = asyncio.ensure_future(answer)
    fault_task = asyncio.create_task(fault.event.wait())
    try:
        await asyncio.wait(
            [answer_task, fault_task],
            timeout=timeout_s + LATENESS_ALLOWANCE_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not answer_task.done() and not fault_task.done():
            raise make_timeout_error(timeout_s)
        if not answer_task.done():
            await asyncio.wait([answer_task], timeout=ANSWER_AFTER_FAULT_S)
        return _result_or_error(answer_task, fault.take(), timeout_s, time.monotonic() - start)
    finally:
        fault_task.cancel()
        if not answer_task.done():
            answer_task.cancel()
            await asyncio.wait([answer_task], timeout=LATENESS_ALLOWANCE_S)
        if answer_task.done() and not answer_task.cancelled():
            answer_task.exception()  # mark the exception as retrieved


def _result_or_error(
    answer_task: "asyncio.Future[T]", fault: str | None, timeout_s: float, elapsed_s: float
) -> T:
    if not answer_task.done():
        raise make_server_error(fault or "it gave no answer")
    error = answer_task.exception()
    if error is None:
        return answer_task.result()
    if fault is not None:
        raise make_server_error(fault)
    if isinstance(error, MCPError):
        if error.code == types.REQUEST_TIMEOUT and elapsed_s >= timeout_s:
            raise make_timeout_error(timeout_s)
        if _is_loss(error):
            raise _UpstreamLostError(error)
        if error.code in _NO_ANSWER and error.error.message.startswith(_NO_ANSWER[error.code]):
            raise make_server_error(describe_error(error))
        raise make_refusal_error(error)
    if isinstance(error, ValidationError):
        raise make_server_error(f"it answered with what is no result: {describe_error(error)}")
    raise make_server_error(describe_error(error))


# Tool servers may use the codes of the SDK's own errors, -32000 above all, for anything; a call rejected with one of
# them counts as the policy's failure. Only the messages identify errors of the SDK itself.
_CLOSED: Final = "Connection closed"
_STREAM_ENDED: Final = "SSE stream "
_FORGOTTEN: Final = "Session terminated"
_NO_ANSWER: Final = {
    types.PARSE_ERROR: ("Failed to parse ",),
    types.INVALID_REQUEST: ("Unexpected content type", "server answered a request with 202"),
}


def _is_loss(error: MCPError) -> bool:
    message = error.error.message
    if error.code == types.CONNECTION_CLOSED:
        return message == _CLOSED or message.startswith(_STREAM_ENDED)
    return error.code == types.INVALID_REQUEST and message == _FORGOTTEN


def _is_refusal(error: BaseException | None) -> bool:
    """Whether a connection was refused; each library wraps the error of the one below."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None


_MIN_RETRY_S: Final = 0.1
_MAX_RETRY_S: Final = 2.0
"""How long to wait before connecting again to an address at which nothing listens."""

PING_TIMEOUT_S: Final = 2.0
"""How long a server may take to reply to a ping after a call that timed out."""

CLOSE_TIMEOUT_S: Final = 8.5
"""The timeout of closing; enough to end a process, and the longest that closing a session waits."""

MAX_INSTRUCTION_CHARS: Final = 4096

_CALL_RESULT: Final[TypeAdapter[types.CallToolResult | types.InputRequiredResult]] = TypeAdapter(
    types.CallToolResult | types.InputRequiredResult
)
_INFO: Final = types.Implementation(name="ropewalk", version="0.1.0")


class UpstreamConnection:
    """A connection to a tool server. Call `open` first and `close` last; if `open` fails, it closes the connection.

    Args:
        open_wire: Opens a wire to the server; called again for each further protocol to try.
        modes: The SDK's protocol modes to try.

    Attributes:
        mode: The mode that the server accepted.
        stale: Whether the list of tools has changed, or may have, since it was last requested.
        dead: Why the connection can no longer be used; None if it can.
        hung: Whether a call has timed out, so that it is unknown whether the server still responds.
    """

    def __init__(self, open_wire: Callable[[], Awaitable[UpstreamWire]], modes: tuple[str, ...]) -> None:
        self._open_wire = open_wire
        self._modes = modes
        self._wire: UpstreamWire | None = None
        self._client: Client | None = None
        self._context: ToolContext | None = None
        self._owner: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._is_opening = True
        self._is_wire_up = True
        self.mode = modes[0]
        self.stale = True
        self.dead: str | None = None
        self.hung = False

    async def open(self, timeout_s: float) -> None:
        """Connect and negotiate a protocol.

        Raises:
            ServerFailedError: The server does not start, or not in time, or does not support MCP.
        """
        try:
            async with asyncio.timeout(timeout_s):
                backoff = Backoff(_MIN_RETRY_S, _MAX_RETRY_S)
                for mode in self._modes:
                    self.mode = mode
                    while (accepted := await self._try_open(mode)) is None:  # noqa: ASYNC110 - a server elsewhere
                        await asyncio.sleep(backoff.next_s())
                    if accepted:
                        return
        except TimeoutError:
            stderr = self._wire.stderr_tail() if self._wire is not None else ""
            suffix = f"; its last words: {stderr}" if stderr else f"; {self.dead}" if self.dead else ""
            await self.close()
            raise ServerFailedError(f"expected it to start within {timeout_s:g} s{suffix}") from None
        except BaseException:
            await self.close()
            raise
        raise ServerFailedError(f"it refused the connection: {self.dead}")

    async def close(self) -> None:
        """Close the connection and end the process, if any, within a bounded time."""
        self._closing.set()
        if (owner := self._owner) is None:
            return
        if self._is_opening:
            owner.cancel()  # only while opening: it does not wait for `_closing` yet; once closing, let it finish
        _, pending = await asyncio.wait([owner], timeout=CLOSE_TIMEOUT_S)
        if pending:
            owner.cancel()
            await asyncio.wait([owner], timeout=CLOSE_TIMEOUT_S)

    def describe(self) -> dict[str, str]:
        """Return the server's title, version, protocol and instructions."""
        client = self._require_client()
        info = client.server_info
        return {
            "title": info.name[:256] if info else "",
            "version": info.version[:64] if info else "",
            "protocol": client.protocol_version,
            "instructions": (client.instructions or "")[:MAX_INSTRUCTION_CHARS],
        }

    @property
    def stateless(self) -> bool:
        """Whether the server is stateless; such a server does not notify us of changed tools either."""
        return self._client is not None and self._client.protocol_version in MODERN_PROTOCOL_VERSIONS

    async def list_tools(self, timeout_s: float) -> list[types.Tool]:
        """List the tools on all pages, within one timeout.

        Raises:
            CallError: The server does not reply, or not with a list.
        """
        session = self._require_client().session
        self.stale = False

        async def list_page(cursor: str | None, left_s: float) -> types.ListToolsResult:
            params = None if cursor is None else types.PaginatedRequestParams(cursor=cursor)
            return await self._wait_for(session.list_tools(params=params), left_s)

        return await collect_tools(list_page, timeout_s)

    async def call(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float, context: ToolContext
    ) -> types.CallToolResult:
        """Call a tool; on a timeout the server is told to cancel it.

        Raises:
            CallError: There is no result.
        """
        session = self._require_client().session
        request = types.CallToolRequest(
            params=types.CallToolRequestParams(name=name, arguments=dict(arguments))
        )

        async def progress(progress: float, total: float | None, message: str | None) -> None:
            context.progress(progress, total, message)

        self._context = context
        try:
            result = await self._wait_for(
                session.send_request(
                    request, _CALL_RESULT, request_read_timeout_seconds=timeout_s, progress_callback=progress
                ),
                timeout_s,
            )
        finally:
            self._context = None
        if isinstance(result, types.InputRequiredResult):
            raise CallError(
                ToolErrorType.EXECUTION_ERROR, f"the tool {name!r} asks its user back, and there is none here"
            )
        return result

    async def check_answers(self) -> bool:
        """Return whether the server still responds, after a call that timed out."""
        session = self._require_client().session
        try:
            if self.stateless:
                await self._wait_for(session.list_tools(), PING_TIMEOUT_S)
            else:
                await self._wait_for(
                    session.send_request(types.PingRequest(), types.EmptyResult), PING_TIMEOUT_S
                )
        except CallError as error:
            # An error is a response too.
            self.hung = error.infrastructure or error.error_type is ToolErrorType.TIMEOUT
        else:
            self.hung = False
        return not self.hung

    async def _try_open(self, mode: str) -> bool | None:
        """Try one protocol; return whether the server accepted it, None if nothing listens at its address yet."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._run_connection(mode, ready))
        await asyncio.wait([ready, self._owner], return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and ready.exception() is None:
            return True
        await asyncio.wait([self._owner])
        # The SDK may raise the error inside an exception group.
        error = unwrap_group(failure) if ready.done() and (failure := ready.exception()) is not None else None
        if isinstance(error, MCPError | RuntimeError | ValidationError) and self._is_wire_up:
            return False
        if _is_refusal(error):
            return None
        raise ServerFailedError(self.dead or "it ended before it was connected")

    async def _run_connection(self, mode: str, ready: "asyncio.Future[None]") -> None:
        """Own the connection from open to close."""
        wire: UpstreamWire | None = None
        death: asyncio.Future[str] | None = None
        self._is_opening = self._is_wire_up = True
        try:
            self._wire = wire = await self._open_wire()
            death = asyncio.ensure_future(wire.wait_ended())
            client = Client(
                drop_invalid_entries(wire.transport, self._protocol_version),
                mode=mode,
                cache=None,
                client_info=_INFO,
                message_handler=self._on_message,
                logging_callback=self._on_log,
            )
            async with client:
                self._client = client
                self._is_opening = False
                self.dead = None
                ready.set_result(None)
                closing = asyncio.create_task(self._closing.wait())
                try:
                    await asyncio.wait([closing, death], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    closing.cancel()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
                ready.exception()  # mark it as retrieved: the waiter may be gone
            self.dead = (wire and wire.fault.take()) or describe_error(error)
        finally:
            self._client = None
            self._is_opening = False
            if death is not None:
                # A process's output ends a moment before the process does.
                with suppress(asyncio.TimeoutError):
                    if not self._closing.is_set():
                        self.dead = f"it {await asyncio.wait_for(asyncio.shield(death), 0.1)}"
                        self._is_wire_up = False
                death.cancel()
            self.dead = self.dead or "it was closed"
            if wire is not None:
                await wire.close()

    def _protocol_version(self) -> str:
        return LATEST_HANDSHAKE_VERSION if self._client is None else self._client.protocol_version

    async def _wait_for(self, answer: Awaitable[T], timeout_s: float) -> T:
        """Wait for a reply.

        Raises:
            CallError: There is no reply, or it is an error.
        """
        assert self._wire is not None
        try:
            return await _wait_for_answer(answer, self._wire.fault, timeout_s)
        except _UpstreamLostError as loss:
            raise make_server_error(await self._exit_reason(loss.error)) from None
        except CallError as error:
            self.hung = self.hung or error.error_type is ToolErrorType.TIMEOUT
            raise

    async def _exit_reason(self, error: MCPError) -> str:
        """Return how the server died, which the owner task learns a moment later than a pending call."""
        if self._owner is not None and error.code == types.CONNECTION_CLOSED:
            await asyncio.wait([self._owner], timeout=0.5)
        self.dead = self.dead or describe_error(error)
        return self.dead

    def _require_client(self) -> Client:
        if self._client is None or self.dead is not None:
            raise make_server_error(self.dead or "it is not connected")
        return self._client

    async def _on_message(self, message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self.stale = True
            if self._context is not None:
                self._context.tools_changed()

    async def _on_log(self, params: types.LoggingMessageNotificationParams) -> None:
        if self._context is not None:
            self._context.log(params.level, params.data, params.logger)
