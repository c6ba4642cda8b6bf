"""The tool servers of an episode, and the private folder of their processes."""

import asyncio
import fnmatch
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mcp_types as types

from openenv_core.tools import ToolContext, ToolErrorType
from servers.execution import keep

from .config import HttpServer, ServerPolicy, ServerSpec, StdioServer, fill_folder
from .upstream.connection import LATENESS_ALLOWANCE_S, UpstreamConnection
from .upstream.errors import CallError, ServerFailedError, UpstreamWire
from .upstream.http import make_http_wire
from .upstream.schemas import ArgumentChecker
from .upstream.stdio import open_stdio

_PREFIX: Final = "ropewalk-mcp-"

PASSED_VARIABLES: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
"""Environment variables that are passed on to every process; none of them holds a secret."""

_DEFAULTS: Final = {"PATH": os.defpath, "LANG": "C.UTF-8"}


def make_folder() -> Path:
    """Create a folder that only this user can access, with a random name."""
    return Path(tempfile.mkdtemp(prefix=_PREFIX))


def _process_arguments(server: StdioServer, folder: Path) -> tuple[tuple[str, ...], dict[str, str], Path]:
    """Return the command, environment variables and working directory of a server's process."""
    home = str(folder)
    command = (fill_folder(server.command, ""), *(fill_folder(argument, home) for argument in server.args))
    passed_variables = {
        name: os.environ[name]
        for name in (*PASSED_VARIABLES, *server.ropewalk.env_pass)
        if name in os.environ
    }
    configured_variables = {name: fill_folder(value, home) for name, value in server.env.items()}
    cwd = folder if server.cwd is None else Path(fill_folder(server.cwd, home))
    return (
        command,
        {**_DEFAULTS, "HOME": home, "TMPDIR": home, **passed_variables, **configured_variables},
        cwd,
    )


_MODES: Final[Mapping[str, tuple[str, ...]]] = {
    "auto": ("legacy", "auto"),
    "handshake": ("legacy",),
    "stateless": ("auto",),
}
"""The SDK's protocol modes to try. The handshake comes first, because it gives each connection its own session."""


class EpisodeServer:
    """One tool server of an episode.

    Attributes:
        info: What the server reports about itself, as fields of `ServerInfo`; empty before it starts.
        policy: The settings from its configuration.
        folder: The session's folder, if the server is a process.
        calls: The number of calls made.
        restarts: The number of restarts.
        tools: The tools of its last list that its configuration allows, by their own names.
    """

    def __init__(self, name: str, spec: ServerSpec, modes: dict[str, str], checker: ArgumentChecker) -> None:
        self.name = name
        self._spec = spec
        self._known_modes = modes
        self._checker = checker
        self._connection: UpstreamConnection | None = None
        self.info: dict[str, str] = {}
        self.policy: ServerPolicy = spec.ropewalk
        self.folder: Path | None = None
        self._unchecked: set[str] = set()  # tools whose arguments could not be checked
        self.calls = 0
        self.restarts = 0
        self.tools: dict[str, types.Tool] = {}

    @property
    def is_process(self) -> bool:
        """Whether the server is a process of the session, which needs a folder."""
        return not isinstance(self._spec, HttpServer)

    @property
    def death(self) -> str | None:
        """Why the connection can no longer be used; None if it can."""
        return None if self._connection is None else self._connection.dead

    @property
    def stale(self) -> bool:
        """Whether the server has notified us that its list of tools changed."""
        return self._connection is not None and self._connection.stale

    async def start(self) -> None:
        """Start the server and list its tools.

        Raises:
            ServerFailedError: It does not start, or not in time.
        """
        connection = UpstreamConnection(self._open_wire, self._modes())
        self._connection = connection
        timeout_s = self.policy.start_timeout_s
        try:
            await connection.open(timeout_s)
            self.info = connection.describe()
            await self._update_tools(connection)
        except (CallError, ServerFailedError) as error:
            await self.close()
            raise ServerFailedError(f"{self.name}: {error}") from error
        except BaseException:
            await self.close()
            raise
        if self.policy.protocol == "auto":
            self._known_modes[self.name] = connection.mode

    async def close(self) -> None:
        """Close the connection, and end the process if there is one, within a bounded time."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def refresh(self) -> None:
        """List the tools again if they may have changed. A dead server keeps its old list.

        Raises:
            CallError: The server does not respond.
        """
        connection = self._connection
        if connection is not None and connection.dead is None and (connection.stale or connection.stateless):
            await self._update_tools(connection)

    async def ensure_ready(self) -> bool:
        """Restart the server if it cannot be called; return whether that was necessary.

        Raises:
            ServerFailedError: It has died, and restarts are disabled, used up, or fail.
        """
        connection = self._connection
        if connection is not None and connection.dead is None and connection.hung:
            try:
                if not await connection.check_answers():
                    connection.dead = "it gave no sign of life after a call that took too long"
            except CallError as error:
                connection.dead = str(error)
        if connection is not None and connection.dead is None:
            return False
        reason = self.death or "it is not there"
        if not self.policy.restart:
            raise ServerFailedError(f"{self.name}: {reason}")
        if self.restarts >= self.policy.max_restarts:
            raise ServerFailedError(f"{self.name}: {reason}; it was started anew {self.restarts} times")
        self.restarts += 1
        await self.close()
        await self.start()
        return True

    async def call(
        self, tool: str, arguments: Mapping[str, Any], timeout_s: float, context: ToolContext
    ) -> types.CallToolResult:
        """Call a tool by its own name.

        Raises:
            CallError: There is no result.
        """
        connection = self._connection
        if connection is None:
            raise CallError(ToolErrorType.TRANSPORT_ERROR, "the tool server is gone", infrastructure=True)
        self.calls += 1
        return await connection.call(tool, arguments, timeout_s, context)

    async def has_tool(self, tool: str) -> bool:
        """Return whether the server currently lists a tool; true if it does not respond."""
        connection = self._connection
        if connection is None or connection.dead is not None:
            return True
        try:
            await self._update_tools(connection)
        except CallError:
            return True
        return tool in self.tools

    async def find_faults(self, tool: str, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Return how arguments violate the tool's schema; empty if they do not, or this is left to the server."""
        if tool in self._unchecked:
            return ()
        faults = await self._checker.find_faults(self.tools[tool].input_schema, arguments)
        if faults is None:
            self._unchecked.add(tool)  # each try may cost the CPU time of the limit
        return faults or ()

    async def _update_tools(self, connection: UpstreamConnection) -> None:
        try:
            listed_tools = await connection.list_tools(
                min(self.policy.timeout_s, self.policy.start_timeout_s)
            )
        except CallError as error:
            if error.infrastructure or error.error_type is ToolErrorType.TIMEOUT:
                raise
            listed_tools = []  # a server without tools reports an unknown method
        self._unchecked.clear()
        self.tools = {tool.name: tool for tool in listed_tools if self._allows(tool.name)}

    def _allows(self, tool: str) -> bool:
        return matches_any(tool, self.policy.allow) and not matches_any(tool, self.policy.deny)

    async def _open_wire(self) -> UpstreamWire:
        spec = self._spec
        if isinstance(spec, HttpServer):
            allow_private, silence_s = self.policy.allow_private, self.policy.timeout_s + LATENESS_ALLOWANCE_S
            return make_http_wire(spec.url, spec.headers, allow_private=allow_private, silence_s=silence_s)
        assert self.folder is not None
        return await open_stdio(*_process_arguments(spec, self.folder), self.folder)

    def _modes(self) -> tuple[str, ...]:
        # The mode that was accepted last comes first; the server may have been replaced by another version since.
        known = self._known_modes.get(self.name)
        return tuple(sorted(_MODES[self.policy.protocol], key=lambda mode: mode != known))


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name matches one of the glob patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


async def start_all(members: Sequence[EpisodeServer], start_slots: asyncio.Semaphore) -> None:
    """Start servers concurrently. If one fails, pending starts are cancelled; servers already started keep running.

    Raises:
        ServerFailedError: A server does not start.
    """

    async def start(member: EpisodeServer) -> None:
        async with start_slots:
            await member.start()

    tasks = [keep(asyncio.create_task(start(member))) for member in members]
    try:
        for started in asyncio.as_completed(tasks):
            await started
    except BaseException:
        for task in tasks:
            task.cancel()
        # Shielded, because this call may be cancelled again: each cancelled start still cleans up after itself.
        await asyncio.shield(asyncio.gather(*tasks, return_exceptions=True))
        raise
