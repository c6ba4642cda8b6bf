"""A session with an in-process MCP server object, and conversions of its results."""

import asyncio
import inspect
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict

from openenv_core.errors import ClientClosedError, ConfigurationError
from openenv_core.loop_thread import LoopThread
from openenv_core.outcomes import outcome_of
from openenv_core.protocol.errors import text_of
from openenv_core.protocol.jsonio import dumps, from_json
from openenv_core.tools import (
    CallToolObservation,
    ToolContext,
    ToolErrorType,
    ToolFailedError,
    ToolResult,
    ToolUnavailableError,
)
from openenv_core.tools.environment import CANCELLED, count_cancellations
from openenv_core.types import Observation

T = TypeVar("T")

CLOSE_TIMEOUT_S: Final = 5.0
"""How long, in seconds, a server object may take to end its session."""


_CLOSED: Final = "Connection closed"
"""The SDK's message for requests of a session that a tool's cancellation, or its exit, has ended."""


def client_class(server: Any) -> Callable[[Any], Any]:
    """Return the client class of the server object's package, which is imported already.

    FastMCP's shakes hands: it promises tools a session, which in the stateless version of MCP is a single request.

    Raises:
        ConfigurationError: The package has no client class.
    """
    for cls in type(server).__mro__:
        package = sys.modules.get(cls.__module__.partition(".")[0])
        client = getattr(package, "Client", None)
        if callable(client) and hasattr(client, "call_tool"):
            is_fastmcp = hasattr(client, "call_tool_mcp")
            has_mode = is_fastmcp and "mode" in inspect.signature(client).parameters
            return partial(client, mode="legacy") if has_mode else client  # FastMCP 2 and 3 know no other
    raise ConfigurationError(
        "expected an MCP server object whose package has a Client, FastMCP of fastmcp 2 or later or MCPServer of mcp 2 "
        f"or later, got {type(server).__module__}.{type(server).__qualname__}"
    )


def run_in_thread(work: Callable[[], T]) -> "Future[T]":
    """Call a function in a daemon thread, which does not delay the process's exit; it cannot be cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="openenv-step", daemon=True).start()
    return future


class McpObjectSession:
    """A session with a server object, opened at the first request."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._client = client_class(server)
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None
        self._closed = False
        self._opened: asyncio.Future[Any] | None = None
        self._holder: asyncio.Task[None] | None = None
        self._end: asyncio.Event | None = None

    def new_client(self) -> Any:
        """Return a new client, not connected."""
        return self._client(self._server)

    async def run(self, work: Callable[[Any], Awaitable[T]], timeout_s: float | None = None) -> T:
        """Call a function with the client, in the session's thread.

        Raises:
            ClientClosedError: The session has ended.
            TimeoutError: It took longer than the timeout and was cancelled.
            ToolFailedError: It cancelled itself, or tried to exit the process.
        """
        async with asyncio.timeout(timeout_s):
            cancellations = count_cancellations()
            try:
                return await asyncio.wrap_future(self._submit(work))
            except asyncio.CancelledError:
                if count_cancellations() > cancellations:
                    raise
                if self._closed:
                    text = "expected an open environment, got its close() during a tool call"
                    raise ClientClosedError(text) from None
                reason = CANCELLED  # the thread may be ending because of a tool's exit
            except (SystemExit, KeyboardInterrupt) as error:  # which has stopped the thread's event loop
                reason = f"{type(error).__name__}: {text_of(error)}"
            await asyncio.to_thread(self._drop_thread)
            raise ToolFailedError(reason)

    def close(self) -> None:
        """End the session and its thread. Idempotent."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            # The server object's shutdown may fail or hang; the thread is stopped anyway.
            with suppress(Exception):
                self._thread.submit(self._finish).result(CLOSE_TIMEOUT_S)
            self._drop_thread()

    def _submit(self, work: Callable[[Any], Awaitable[T]]) -> "Future[T]":
        with self._lock:
            if self._closed:
                raise ClientClosedError("the environment is closed; no more tools can be called")
            if self._thread is None:
                self._thread = LoopThread()
        return self._thread.submit(self._call_client, work)

    def _drop_thread(self) -> None:
        """End the thread with its session; the next request starts another."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._opened = self._holder = self._end = None
        if thread is not None:
            thread.stop()

    async def _call_client(self, work: Callable[[Any], Awaitable[T]]) -> T:
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            # A client's context must be exited by the task that entered it.
            self._holder = asyncio.create_task(self._hold_client(self._opened))
        try:
            client = await asyncio.shield(self._opened)
        except Exception as error:
            raise ToolUnavailableError(f"expected the environment's MCP server to start: {error}") from error
        try:
            return await work(client)
        except Exception as error:
            if str(error) != _CLOSED and getattr(client, "is_connected", lambda: True)():
                raise
            self._drop_thread()
            raise ToolFailedError(CANCELLED) from error

    async def _hold_client(self, opened: "asyncio.Future[Any]") -> None:
        self._end = asyncio.Event()
        try:
            async with self._client(self._server) as client:
                opened.set_result(client)
                await self._end.wait()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)

    async def _finish(self) -> None:
        if self._end is not None:
            self._end.set()
        if self._holder is not None:
            await self._holder


SpecT = TypeVar("SpecT", bound=BaseModel)

_INVALID: Final = re.compile(
    r"(Error executing tool \S+: )?\d+ validation errors? for (call\[|\w+Arguments\b)|Input validation error"
)
"""Prefixes of FastMCP's and the SDK's messages about invalid arguments, for which they have no error code."""


class CallToolResult(BaseModel):
    """A tool's result, with the attributes and JSON of the released package.

    Attributes:
        content: Content blocks of the server object's package.
        structured_content: The value as an object.
        meta: The server's additional metadata.
        data: The value itself.
        is_error: Whether the call failed. False in observations, which have an error instead.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    content: list[Any]
    structured_content: dict[str, Any] | None = None
    meta: dict[str, Any] | None = None
    data: Any = None
    is_error: bool = False


async def ask_tool(
    client: Any, name: str, arguments: Mapping[str, Any], context: ToolContext
) -> CallToolResult:
    """Call a tool with a client of FastMCP or of the SDK. A failure is returned as a result too."""

    async def progress(progress: float, total: float | None, message: str | None) -> None:
        context.progress(progress, total, message)

    if hasattr(client, "call_tool_mcp"):  # FastMCP, whose own result also has the value
        result = await client.call_tool(name, arguments, raise_on_error=False, progress_handler=progress)
    else:
        result = await client.call_tool(name, arguments, progress_callback=progress)
    return _result(result)


def plain_result(value: Any) -> CallToolResult:
    """Return the result of a function that is not a tool of the server object."""
    text = {"type": "text", "text": str(value)}
    return CallToolResult(content=[text], structured_content={"result": value}, data=value)


def _result(result: Any) -> CallToolResult:
    structured = getattr(result, "structured_content", None)
    data = getattr(result, "data", None)
    if data is None and isinstance(structured, dict):
        data = structured["result"] if set(structured) == {"result"} else structured
    return CallToolResult(
        content=list(result.content),
        structured_content=structured,
        meta=getattr(result, "meta", None),
        data=data,
        is_error=bool(getattr(result, "is_error", False)),
    )


def error_text(result: CallToolResult) -> str:
    """Return the text of a failed call's content."""
    texts = [block.text for block in result.content if getattr(block, "type", None) == "text"]
    return "\n".join(texts) or "the tool gave no reason"


def error_type(name: str, text: str, known_names: Iterable[str]) -> ToolErrorType:
    """Return the type of a call's failure."""
    if name not in set(known_names):
        return ToolErrorType.TOOL_NOT_FOUND
    return ToolErrorType.INVALID_ARGS if _INVALID.match(text) else ToolErrorType.EXECUTION_ERROR


def tool_result(observation: Observation) -> ToolResult:
    """Return the observation of an author's step as a result for MCP. It may be any observation."""
    reward_fields: dict[str, Any] = {
        "reward": None if observation.reward is None else float(observation.reward),
        "done": observation.done,
        "truncated": outcome_of(observation).truncated,
        "metadata": observation.metadata,
    }
    if not isinstance(observation, CallToolObservation):
        payload = observation.model_dump(exclude={"reward", "done", "metadata"}) or observation.metadata
        return replace(ToolResult.of(payload), **reward_fields)
    if observation.error is not None:
        failed = ToolResult.failed(observation.error.error_type, observation.error.message)
        return replace(failed, **reward_fields)
    result = observation.result
    if not isinstance(result, CallToolResult):
        return replace(ToolResult.of(result), **reward_fields)
    content = [mcp_json(block) for block in result.content]
    value = from_json(dumps(result.data))
    return ToolResult(content=content, value=value, structured=result.structured_content, **reward_fields)


def mcp_json(model: Any) -> dict[str, Any]:
    """Return MCP's JSON of a model of either package."""
    if isinstance(model, Mapping):
        return dict(model)
    dumped: dict[str, Any] = model.model_dump(mode="json", by_alias=True, exclude_none=True)
    return dumped


def specs(kind: type[SpecT], listed: Any, section: str) -> list[SpecT]:
    """Return the entries of a client's listing; the SDK's has them in an attribute, FastMCP's is a list."""
    known = {field.alias for field in kind.model_fields.values()}
    return [
        kind.model_validate({key: value for key, value in mcp_json(entry).items() if key in known})
        for entry in getattr(listed, section, listed)
    ]
