"""One session of an environment as an MCP server on standard input and output, for hosts that start it themselves."""

import asyncio
import logging
import signal
from collections.abc import Mapping
from typing import Any, Final

from mcp.server.stdio import stdio_server

from openenv_core.errors import ConfigurationError
from servers.app import EnvironmentApp
from servers.execution import end
from servers.mcp.handlers import Handlers
from servers.mcp.listeners import Hub, Peer
from servers.mcp.seat import Seat
from servers.mcp.server import make_server
from servers.mcp.wire import Lines, Pipe, Wire
from servers.sessions import Session

logger = logging.getLogger("servers")

LAST_WORD_S: Final = 1.0
"""Seconds for the reply that tells why a session has ended."""


async def serve_stdio(app: EnvironmentApp, name: str, options: Mapping[str, Any], wire: Wire) -> bool:
    """Serve one session until the host closes its end, or a signal says to stop.

    Args:
        app: The environment's.
        name: What it was asked for by.
        options: What it is reset with.
        wire: The standard streams.

    Returns:
        Whether that was the end; False where the session ended before.

    Raises:
        ConfigurationError: It has no tools.
        Exception: Whatever the environment raised in its constructor, or at its reset.
    """
    async with app.running():
        if not app.tooling.possible:
            raise _no_tools(name)
        session = await app.sessions.open("")
        session.listeners += 1  # it never goes unused
        try:
            if not app.tooling.has_tools(session.runner):
                raise _no_tools(name)
            await app.sessions.call(session, lambda runner: runner.reset(options))
            return await _serve(app, name, session, wire)
        finally:
            if not session.over:
                await app.sessions.close(session)


async def _serve(app: EnvironmentApp, name: str, session: Session, wire: Wire) -> bool:
    hub, peer = Hub(), Peer()
    hub.peers.add(peer)
    handlers = Handlers(app.sessions, app.tooling, Seat("", session, hub, peer))
    server = make_server(name, handlers, app.tooling)

    async def serve() -> None:
        lines, pipe = Lines(wire.reading, app.settings.max_body_bytes), Pipe(wire.writing)
        # They do what the SDK asks of a file, and no thread of theirs keeps the process from ending.
        async with stdio_server(lines, pipe) as (reading, writing):  # type: ignore[arg-type]
            await server.run(reading, writing, server.create_initialization_options())

    over, stopped = asyncio.Event(), asyncio.Event()
    session.on_over = over.set
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    serving = asyncio.create_task(serve())
    waiting = [asyncio.create_task(event.wait()) for event in (over, stopped)]
    try:
        await asyncio.wait([serving, *waiting], return_when=asyncio.FIRST_COMPLETED)
        if over.is_set():
            logger.error("the session has ended; start %s again for another", name)
            await asyncio.wait([serving], timeout=LAST_WORD_S)
        elif serving.done():
            serving.result()
        return not over.is_set()
    finally:
        session.on_over = None
        hub.close()
        for task in (*waiting, serving):
            await end(task)


def _no_tools(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"expected an environment with tools for MCP, got {name}, which offers none; declare some on a "
        "ToolEnvironment, or serve it with: ropewalk serve"
    )
