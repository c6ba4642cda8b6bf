"""One session of an environment as an MCP server on standard input and output, started by an MCP host."""

import asyncio
import logging
import os
import signal
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import anyio
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server

from openenv_core.protocol.frames import Reset
from servers.acting import ActionTooling
from servers.app import EnvironmentApp
from servers.execution import cancel_task
from servers.mcp.context import RequestOrigin
from servers.mcp.handlers import CHANGES, Handlers, make_server
from servers.mcp.hub import Hub, Peer
from servers.routes.http import answer_request
from servers.threads import ThreadPool

logger = logging.getLogger("servers")


class StandardStreams:
    """Standard input and output as the wire, with the methods of a file that the SDK's transport calls.

    They are read and written in daemon threads: a host that neither writes nor reads blocks only these, and does not
    keep the process from exiting.

    Args:
        reading: The descriptor of the input.
        writing: The descriptor of the output.
        limit: Bytes of a line; longer ones are dropped.
    """

    def __init__(self, reading: int, writing: int, limit: int) -> None:
        self._input, self._output = os.fdopen(reading, "rb"), writing
        self._limit = limit
        self._reader, self._writer = ThreadPool(1, "lines of MCP"), ThreadPool(1, "replies of MCP")

    def __aiter__(self) -> "StandardStreams":
        return self

    async def __anext__(self) -> str:
        succeeded, line = await self._reader.run(self._read)
        if not succeeded:
            logger.error("cannot read from the host: %s", line)
        if not succeeded or not line:
            raise StopAsyncIteration
        return str(line)

    async def write(self, text: str) -> None:
        """Write a text; ClosedResourceError if the host is gone."""
        succeeded, value = await self._writer.run(partial(self._write, text.encode()))
        if not succeeded:
            logger.info("cannot write to the host: %s", value)
            raise anyio.ClosedResourceError

    async def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def _read(self) -> str:
        """Return the next line that is not empty or too long; an empty one at the end."""
        while line := self._input.readline(self._limit + 1):
            if len(line) > self._limit:
                logger.error("a message of more than %d bytes was dropped", self._limit)
                while line and not line.endswith(b"\n"):
                    line = self._input.readline(self._limit)
            elif line.strip():
                return line.decode("utf-8", "replace")
        return ""

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._output, view) :]


def take_standard_streams(limit: int) -> StandardStreams:
    """Reserve standard input and output for the wire; a line may have `limit` bytes.

    From now on standard input is empty and standard output is standard error: the output of an environment, and of
    the processes that it starts, goes to the log.
    """
    wire = StandardStreams(os.dup(0), os.dup(1), limit)  # no child process inherits them
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    os.dup2(2, 1)
    return wire


FINAL_REPLY_TIMEOUT_S: Final = 1.0
"""Seconds for the last reply, which says why the session has ended."""


async def serve_stdio(
    app: EnvironmentApp, name: str, options: Mapping[str, Any], wire: StandardStreams
) -> bool:
    """Serve one session until the host closes its end, or SIGINT or SIGTERM arrives.

    Args:
        app: The environment's application.
        name: The environment's name, as the user gave it.
        options: Arguments of the environment's reset.
        wire: The standard streams.

    Returns:
        True if the host or a signal ended it; False if the session ended first.

    Raises:
        Exception: Whatever the environment raised in its constructor or reset.
    """
    async with app.running(), app.sessions.session() as session:
        tooling = app.tooling
        if not tooling.has_tools(session):
            tooling = ActionTooling(app.served.factory, app.served.action)
        await answer_request(session, Reset(dict(options)))
        hub, peer = Hub[Peer](), Peer()
        hub.peers[session.id] = peer
        server = make_server(
            name, Handlers(app.sessions, tooling, RequestOrigin("", session, hub, peer)), tooling
        )
        serve_task = asyncio.create_task(_serve(server, wire))
        over = asyncio.Event()
        serve_task.add_done_callback(lambda _: over.set())
        session.on_end = over.set
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, over.set)
        try:
            await over.wait()
            if session.ended:
                logger.error("the session has ended; start %s again for another", name)
                await asyncio.wait([serve_task], timeout=FINAL_REPLY_TIMEOUT_S)
            elif serve_task.done():
                serve_task.result()
            return not session.ended
        finally:
            session.on_end = None
            hub.close()
            await cancel_task(serve_task)


async def _serve(server: Server[dict[str, Any]], wire: StandardStreams) -> None:
    async with stdio_server(wire, wire) as (reading, writing):  # type: ignore[arg-type]
        await server.run(reading, writing, server.create_initialization_options(CHANGES))
