"""One episode: its tool servers, the names of their tools, the handling of calls, and the transcript."""

import asyncio
import hashlib
import re
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import mcp_types as types

from openenv_core.guard import remove_tree
from openenv_core.outcomes import INFRASTRUCTURE_ERROR
from openenv_core.protocol.jsonio import dumps
from openenv_core.tools import RESERVED_TOOL_NAMES, ToolContext, ToolErrorType, ToolResult, ToolSpec
from servers.execution import keep

from ..models import McpToolsState, ServerInfo, TranscriptEntry
from .members import EpisodeServer, make_folder, matches_any, start_all
from .options import Budget, ResetOptions
from .shared import SharedState
from .upstream.errors import CallError, ServerFailedError
from .upstream.results import result_of
from .upstream.schemas import describe_unsendable

MAX_CHARS: Final = 64
_FOREIGN: Final = re.compile(r"[^A-Za-z0-9_-]")
_HASH_CHARS: Final = 8
_RESERVED_PREFIX: Final = "tool_"


def prefix_of(server: str, prefix: str | None, servers: int) -> str:
    """Return the prefix of a server's tool names: the configured one, or the server's name if there are several."""
    if prefix is not None:
        return prefix
    return f"{server}__" if servers > 1 else ""


def name_tools(tools: Iterable[tuple[str, str, str]]) -> dict[str, tuple[str, str]]:
    """Assign unique names to tools.

    Args:
        tools: The server, prefix and own name of each tool.

    Returns:
        The server and own name of each tool, by the name under which it is offered, in the same order.
    """
    offers = [(f"{prefix}{name}", server, name) for server, prefix, name in tools]
    names: dict[str, tuple[str, str]] = {}
    pairs = []
    # Names that fit unchanged are assigned first, so that no fitted name takes one of them.
    for full_name, server, name in offers:
        if fit_name(full_name) == full_name and full_name not in names:
            names[full_name] = (server, name)
        elif names.get(full_name) != (server, name):
            pairs.append((full_name, server, name))
    for full_name, server, name in pairs:
        fitted_name = fit_name(full_name)
        if fitted_name in names and names[fitted_name] != (server, name):
            fitted_name = _hash_name(fitted_name, f"{server}\0{name}")
        names.setdefault(fitted_name, (server, name))
    order = {(server, name): place for place, (_, server, name) in reversed(list(enumerate(offers)))}
    return dict(sorted(names.items(), key=lambda entry: order[entry[1]]))


def fit_name(name: str) -> str:
    """Return a tool name that chat templates accept; a name that already fits is unchanged."""
    if name in RESERVED_TOOL_NAMES:
        return f"{_RESERVED_PREFIX}{name}"
    safe_name = _FOREIGN.sub("_", name) or "_"
    return safe_name if len(safe_name) <= MAX_CHARS else _hash_name(safe_name, name)


def _hash_name(name: str, source: str) -> str:
    digest = hashlib.sha256(source.encode(errors="surrogatepass")).hexdigest()[:_HASH_CHARS]
    return f"{name[: MAX_CHARS - _HASH_CHARS - 1]}_{digest}"


MAX_ENTRIES: Final = 512
MAX_ARGUMENT_BYTES: Final = 2048
MAX_RESULT_CHARS: Final = 1024
MAX_NAME_CHARS: Final = 256


class _Transcript:
    """The most recent calls of an episode, in order; `dropped` counts earlier ones that no longer fit."""

    def __init__(self, enabled: bool) -> None:
        self.entries: deque[TranscriptEntry] = deque(maxlen=MAX_ENTRIES if enabled else 0)
        self.dropped = 0

    def add(
        self,
        tool: str,
        arguments: Mapping[str, Any] | str,
        result: ToolResult,
        started_s: float,
        seconds: float,
    ) -> None:
        """Record a call. For arguments that cannot be recorded, pass the reason instead."""
        if self.entries.maxlen == 0:
            return
        self.dropped += len(self.entries) == self.entries.maxlen
        self.entries.append(
            TranscriptEntry(
                tool=tool[:MAX_NAME_CHARS].encode(errors="replace").decode(),
                arguments=_shorten_arguments(arguments),
                outcome="ok" if result.error is None else result.error.error_type.value,
                result=_shorten_result(result),
                started_s=round(started_s, 4),
                seconds=round(seconds, 4),
                metadata=result.metadata,
            )
        )


def _shorten_arguments(arguments: Mapping[str, Any] | str) -> dict[str, Any] | str:
    if isinstance(arguments, str):
        return arguments
    encoded = dumps(arguments)
    return (
        dict(arguments) if len(encoded) <= MAX_ARGUMENT_BYTES else _decode_prefix(encoded, MAX_ARGUMENT_BYTES)
    )


def _shorten_result(result: ToolResult) -> str:
    if result.error is not None:
        return result.error.message[:MAX_RESULT_CHARS]
    if isinstance(result.value, str):
        return result.value[:MAX_RESULT_CHARS]
    return "" if result.value is None else _decode_prefix(dumps(result.value), MAX_RESULT_CHARS)


def _decode_prefix(encoded: bytes, max_bytes: int) -> str:
    return encoded[:max_bytes].decode(errors="ignore")


STATE_LOST: Final = "state_lost"
"""The observation metadata key that reports that a server was restarted and lost its state."""

BUDGET: Final = "budget"
"""The observation metadata key that says which budget is exhausted: "calls", "time" or a server's name."""

MAX_TEXT: Final = 4096
"""The maximum length of a tool's description, in characters."""

_INVALID: Final = f"MCP error {types.INVALID_PARAMS}:"
"""The prefix by which servers on the TypeScript SDK report unknown tools or invalid arguments in a normal result."""


class Episode:
    """An episode. Call `start` first and `close` last.

    Attributes:
        ended: Why it ended; None while it is running.
        specs: The tools as last listed, under the names by which they are offered.
    """

    def __init__(self, shared: SharedState, options: ResetOptions) -> None:
        self._shared = shared
        self._options = options
        self._folder: Path | None = None
        self._members = {
            name: EpisodeServer(name, shared.settings.servers[name], shared.modes, shared.checker)
            for name in options.servers
        }
        self._budget = Budget(options.calls, options.time_s)
        self._transcript = _Transcript(options.transcript)
        self._names: dict[str, tuple[str, str]] = {}
        self._time_left_s = options.time_s  # as of the last call, so that repeated reads of the state agree
        self.ended: Literal["calls", "time", "infrastructure"] | None = None
        self.specs: list[ToolSpec] = []

    @property
    def server_infos(self) -> list[ServerInfo]:
        """A description of each server."""
        return [
            ServerInfo(
                name=member.name,
                tools=len(member.tools),
                calls=member.calls,
                restarts=member.restarts,
                dead=member.death,
                **member.info,
            )
            for member in self._members.values()
        ]

    async def start(self) -> None:
        """Start the servers concurrently. On any error, all of them are closed.

        Raises:
            ServerFailedError: A server does not start.
        """
        try:
            if any(member.is_process for member in self._members.values()):
                self._folder = make_folder()
                for member in self._members.values():
                    member.folder = self._folder
            await start_all(list(self._members.values()), self._shared.starts)
            # The time of the start does not count towards the policy's budget.
            self._budget = Budget(self._options.calls, self._options.time_s)
            self._update_names()
        except BaseException as error:
            await self.close()
            if isinstance(error, OSError):
                raise ServerFailedError(f"expected to start the tool servers, got: {error}") from error
            raise

    async def close(self) -> None:
        """Close the servers and remove their folder, within a bounded time.

        Closing continues if this call is cancelled, as it is when the client disconnects.
        """
        await asyncio.shield(keep(asyncio.create_task(self._close())))

    async def list_tools(self) -> list[ToolSpec]:
        """Return the tools currently offered. A server that does not respond keeps its last list."""
        for member in self._members.values():
            try:
                await member.refresh()
            except CallError:
                continue  # the next call of one of its tools reports it
        self._update_names()
        return self.specs

    async def call_tool(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Call a tool by the name under which it is offered."""
        started_s = self._budget.elapsed_s()
        start = time.monotonic()
        reason = describe_unsendable(arguments)
        if (limit := self._budget.find_exhausted()) is not None:
            self.ended = limit
            kind = ToolErrorType.TIMEOUT if limit == "time" else ToolErrorType.EXECUTION_ERROR
            result = replace(
                ToolResult.failed(kind, self._budget.describe_exhausted(limit), **{BUDGET: limit}),
                done=True,
                truncated=True,
            )
        else:
            self._budget.calls_made += 1
            if reason is None:
                result = await self._call_by_name(name, arguments, context)
            else:
                result = _make_failure(ToolErrorType.INVALID_ARGS, reason)
            if self.ended is None and not self._budget.time_left_s():
                self.ended = "time"
                metadata = {**result.metadata, BUDGET: "time"}
                result = replace(result, done=True, truncated=True, metadata=metadata)
        self._transcript.add(name, reason or arguments, result, started_s, time.monotonic() - start)
        self._time_left_s = round(self._budget.time_left_s(), 3)
        return result

    def describe(self, state: McpToolsState) -> None:
        """Update a state from the episode."""
        state.servers = self.server_infos
        state.calls = self._budget.calls_made
        state.calls_left = self._budget.calls_left
        state.time_left_s = self._time_left_s
        state.done = self.ended is not None
        state.ended = self.ended
        state.transcript = list(self._transcript.entries)
        state.transcript_dropped = self._transcript.dropped

    async def _close(self) -> None:
        self.ended = self.ended or "infrastructure"
        await asyncio.gather(*(member.close() for member in self._members.values()), return_exceptions=True)
        if self._folder is not None:
            await asyncio.to_thread(remove_tree, str(self._folder))

    async def _call_by_name(
        self, name: str, arguments: Mapping[str, Any], context: ToolContext
    ) -> ToolResult:
        if name not in self._names:
            await self.list_tools()
        if name not in self._names:
            return self._make_not_found(name)
        server, tool = self._names[name]
        member = self._members[server]
        metadata: dict[str, Any] = {}
        try:
            if await member.ensure_ready():
                self._update_names()
                metadata[STATE_LOST] = f"{server} had died and was started anew: what it knew is gone"
                if tool not in member.tools:
                    return replace(self._make_not_found(name), metadata=metadata)
        except ServerFailedError as error:
            self.ended = "infrastructure"
            return _make_failure(ToolErrorType.TRANSPORT_ERROR, str(error), infrastructure=True, done=True)
        if faults := await member.find_faults(tool, arguments):
            return _make_failure(ToolErrorType.INVALID_ARGS, "; ".join(faults), metadata)
        if member.policy.calls is not None and member.calls >= member.policy.calls:
            message = f"the {member.policy.calls} calls that {server} takes in an episode are used up"
            return _make_failure(ToolErrorType.EXECUTION_ERROR, message, {**metadata, BUDGET: server})
        result = await self._call(member, name, tool, arguments, context)
        return replace(result, metadata={**metadata, **result.metadata})

    async def _call(
        self, member: EpisodeServer, name: str, tool: str, arguments: Mapping[str, Any], context: ToolContext
    ) -> ToolResult:
        timeout_s = max(0.001, min(member.policy.timeout_s, self._budget.time_left_s()))
        try:
            answer = await member.call(tool, arguments, timeout_s, context)
        except CallError as error:
            if error.error_type is ToolErrorType.INVALID_ARGS and not await member.has_tool(tool):
                self._update_names()
                return self._make_not_found(name)
            if error.infrastructure and member.death is not None and not member.policy.restart:
                self.ended = "infrastructure"
            return _make_failure(
                error.error_type, str(error), infrastructure=error.infrastructure, done=self.ended is not None
            )
        result = result_of(answer, member.policy.max_result_bytes)
        if result.error is not None and (member.stale or result.error.message.startswith(_INVALID)):
            if not await member.has_tool(tool):
                self._update_names()
                return self._make_not_found(name)
            if result.error.message.startswith(_INVALID):
                error_type = ToolErrorType.INVALID_ARGS
                return replace(result, error=result.error.model_copy(update={"error_type": error_type}))
        return result

    def _update_names(self) -> None:
        """Recompute the names of the offered tools from the servers' last lists."""
        count = len(self._shared.settings.servers)
        places = name_tools(
            (member.name, prefix_of(member.name, member.policy.prefix, count), tool)
            for member in self._members.values()
            for tool in member.tools
        )
        self._names = {
            name: place
            for name, place in places.items()
            if matches_any(name, self._options.allow) and not matches_any(name, self._options.deny)
        }
        self.specs = [
            _to_spec(name, self._members[place[0]].tools[place[1]]) for name, place in self._names.items()
        ]

    def _make_not_found(self, name: str) -> ToolResult:
        known = ", ".join(self._names)
        return _make_failure(
            ToolErrorType.TOOL_NOT_FOUND,
            f"expected one of the tools {known[:1000] or 'none'}, got {name[:200]!r}",
        )


def _make_failure(
    error_type: ToolErrorType,
    message: str,
    metadata: Mapping[str, Any] | None = None,
    *,
    infrastructure: bool = False,
    done: bool = False,
) -> ToolResult:
    all_metadata = dict(metadata or {})
    if infrastructure:
        all_metadata[INFRASTRUCTURE_ERROR] = message
    return replace(ToolResult.failed(error_type, message, **all_metadata), done=done)


def _to_spec(name: str, tool: types.Tool) -> ToolSpec:
    annotations = None
    if tool.annotations is not None:
        annotations = tool.annotations.model_dump(mode="json", by_alias=True, exclude_none=True)
    return ToolSpec(
        name=name,
        title=tool.title,
        description=(tool.description or "")[:MAX_TEXT],
        input_schema=tool.input_schema,
        output_schema=tool.output_schema,
        annotations=annotations,
    )
