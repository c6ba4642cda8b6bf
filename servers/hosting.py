"""Runs one server process: uvicorn with limits, and a shutdown that always completes."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final, NamedTuple, TypeAlias

import uvicorn

from openenv_core.errors import ConfigurationError, OpenEnvError
from openenv_core.garbage import tune_garbage_collector
from servers.app import EnvironmentApp, building_apps
from servers.listening import BACKLOG, handling_stop_signals
from servers.protocols import PING_INTERVAL_S, PONG_TIMEOUT_S, raise_descriptor_limit
from servers.security import Guard
from servers.settings import ServerSettings
from servers.target import load_app

logger = logging.getLogger("servers")

Drain: TypeAlias = Callable[[float], Coroutine[Any, Any, None]]


class Assembled(NamedTuple):
    """An ASGI application and its hooks.

    Attributes:
        app: The application.
        drain: Ends its sessions within the given number of seconds; None if it has no sessions.
        refusal: Returns the error that refused the application's start, if known.
        cordon: Has it refuse new sessions, while the open ones go on; called on SIGUSR1.
    """

    app: Any
    drain: Drain | None = None
    refusal: Callable[[], OpenEnvError | None] = lambda: None
    cordon: Callable[[], None] = lambda: None


def assemble(target: str, settings: ServerSettings, options: Sequence[str]) -> Assembled:
    """Import the application that a target names, built with these settings, and return it with its hooks.

    An application that is not of `create_app` gets a guard only.

    Raises:
        ConfigurationError: As `load_app`; or the application does not support `options`.
        Exception: Whatever the environment's own code raised on import.
    """
    with building_apps(lambda served, _: EnvironmentApp(served, settings)):
        app = load_app(target)
    if isinstance(app, EnvironmentApp):
        if app.settings is not settings:
            raise ConfigurationError(
                f"expected {target!r} to call create_app as it is imported, got an app that was made before, without "
                "the settings of this server; call it in the module that is served"
            )
        return Assembled(app, app.drain, app.collect_refusals(), app.cordon)
    if options:
        raise ConfigurationError(
            f"expected an app of create_app for {', '.join(options)}, got {type(app).__name__} at {target!r}; "
            "leave the options out, or build the app with create_app"
        )
    return Assembled(Guard(app, settings))


SETTINGS: Final[dict[str, Any]] = {
    "loop": "auto",  # uvloop if installed
    "http": "servers.protocols:HttpProtocol",
    # The sans-I/O protocol takes about two thirds of the default one's CPU a message, and frames of a few
    # hundred bytes are not worth compressing; 14 kB of compressed frames can be 15 MB.
    "ws": "servers.protocols:SocketProtocol",
    "ws_per_message_deflate": False,
    "ws_max_size": 16 * 1024 * 1024,
    "ws_ping_interval": PING_INTERVAL_S,
    "ws_ping_timeout": PONG_TIMEOUT_S,
    "h11_max_incomplete_event_size": 64 * 1024,
    # Longer than the keep-alive of common proxies, so that the proxy closes idle connections.
    "timeout_keep_alive": 75,
    "backlog": BACKLOG,
    "access_log": False,
    "server_header": False,
}
"""uvicorn's settings in every process that serves an app."""

_KILL_AFTER_DRAIN_S: Final = 3.0
"""Seconds after the drain's deadline at which the process is ended even if something hangs."""
_FORCED_EXIT_GRACE_S: Final = 0.5
_POLL_INTERVAL_S: Final = 0.05


def host(
    assembled: Assembled,
    listeners: Sequence[socket.socket],
    *,
    drain_s: float,
    on_started: Callable[[], None] = lambda: None,
    lifeline: int | None = None,
    on_cut: Callable[[], None] = lambda: None,
) -> int:
    """Serve until a signal requests the shutdown, and return the exit status.

    Args:
        assembled: The ASGI application.
        listeners: Sockets to accept connections on.
        drain_s: Seconds that sessions have to end.
        on_started: Called once connections are accepted.
        lifeline: A descriptor whose end of file requests the shutdown as a signal does.
        on_cut: Called in another thread before the process is ended because something hangs.

    Raises:
        OpenEnvError: The application refused to start, for this reason.
    """
    raise_descriptor_limit()
    tune_garbage_collector()
    config = uvicorn.Config(assembled.app, log_config=None, **SETTINGS)
    server = _Server(config, assembled, drain_s, on_started, lifeline, ExitTimer(on_cut))
    try:
        server.run(sockets=list(listeners))
    except SystemExit:  # uvicorn exits if the application does not start
        if server.started:  # the environment's code exits
            raise
    if not server.started and (refusal := assembled.refusal()) is not None:
        raise refusal
    server.end.set_deadline(_KILL_AFTER_DRAIN_S)  # the interpreter also waits for threads
    return 0 if server.started else 1


class ExitTimer:
    """Ends the process at a deadline, whatever its threads do.

    A hanging step would otherwise keep the event loop from closing, or the interpreter from exiting.

    Args:
        on_cut: Called before the process is ended.
    """

    def __init__(self, on_cut: Callable[[], None] = lambda: None) -> None:
        self._on_cut = on_cut

    def set_deadline(self, seconds: float) -> None:
        """End the process in this many seconds, unless an earlier deadline does."""
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        with suppress(Exception):
            print("ropewalk: process ended while something still hung", file=sys.stderr, flush=True)  # noqa: T201
        with suppress(Exception):
            self._on_cut()
        os._exit(0)


class _Server(uvicorn.Server):
    """A uvicorn server that shuts down in order: listeners, sessions, connections, application."""

    def __init__(
        self,
        config: uvicorn.Config,
        assembled: Assembled,
        drain_s: float,
        on_started: Callable[[], None],
        lifeline: int | None,
        end: ExitTimer,
    ) -> None:
        super().__init__(config)
        self._drain, self._cordon = assembled.drain, assembled.cordon
        self._drain_s = drain_s
        self._on_started = on_started
        self._lifeline = lifeline
        self._interrupts = 0
        self.end = end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        signal.signal(signal.SIGUSR1, lambda *_: loop.call_soon_threadsafe(self._cordon))
        if (lifeline := self._lifeline) is not None:  # after the handlers are installed: it sends a signal
            watch = threading.Thread(
                target=self._watch_lifeline, args=(lifeline,), name="ropewalk-lifeline", daemon=True
            )
            watch.start()
        await super().startup(sockets)
        if self.started:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        started = asyncio.get_running_loop().time()
        if self._drain is not None:
            await self._drain_within(self._drain)
        elapsed_s = asyncio.get_running_loop().time() - started
        self.config.timeout_graceful_shutdown = max(1, int(self._drain_s - elapsed_s))
        await super().shutdown([])

    async def _drain_within(self, drain: Drain) -> None:
        task = asyncio.create_task(drain(self._drain_s))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_s + 1
        while not task.done() and not self.force_exit and loop.time() < deadline:
            await asyncio.wait([task], timeout=_POLL_INTERVAL_S)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        except Exception:
            logger.exception("draining failed")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own version raises the signals again at the end, so that an orderly exit becomes a death by signal.
        # The handler must not be a bound method: sse-starlette looks for one, to cut all event streams at the signal,
        # including replies to calls that still have time to finish.
        with handling_stop_signals(lambda number, frame: self.handle_exit(number, frame)):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A worker in a terminal gets a SIGINT from there and a SIGTERM from its supervisor: not a hurried stop.
        self._interrupts += sig == signal.SIGINT
        if self._interrupts > 1:
            self.force_exit = True
            self.end.set_deadline(_FORCED_EXIT_GRACE_S)
        self.should_exit = True
        self.end.set_deadline(self._drain_s + _KILL_AFTER_DRAIN_S)

    def _watch_lifeline(self, lifeline: int) -> None:
        # In a thread, because the event loop may hang in an environment's step.
        # The read fails if the other end was closed before all that was sent to it was read.
        with suppress(ConnectionResetError):
            while os.read(lifeline, 512):
                pass
        os.kill(os.getpid(), signal.SIGTERM)
        self.end.set_deadline(self._drain_s + _KILL_AFTER_DRAIN_S)
