"""One server process: uvicorn with bounds, and an end that always comes."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final, NamedTuple, TypeAlias

import uvicorn

from openenv_core.errors import ConfigurationError, OpenEnvError
from servers.app import EnvironmentApp
from servers.listening import BACKLOG
from servers.protocols import PING_INTERVAL_S, PONG_TIMEOUT_S, raise_descriptor_limit
from servers.security import Guard
from servers.settings import ServerSettings

logger = logging.getLogger("servers")

Drain: TypeAlias = Callable[[float], Awaitable[None]]


class Assembled(NamedTuple):
    """An ASGI application, and what there is to know of it.

    Attributes:
        app: The application.
        drain: Ends its sessions within the seconds that it is given, if it has some.
        refusal: Tells why the application would not start, where it knows.
    """

    app: Any
    drain: Drain | None = None
    refusal: Callable[[], OpenEnvError | None] = lambda: None


def assemble(app: Any, name: str, settings: ServerSettings, options: Sequence[str]) -> Assembled:
    """Apply the settings."""
    if isinstance(app, EnvironmentApp):
        app.configure(settings)
        return Assembled(app, app.drain, app.collect_refusals())
    if options:
        raise ConfigurationError(
            f"expected an app of create_app for {', '.join(options)}, got {type(app).__name__} at {name!r}; "
            "leave the options out, or build the app with create_app"
        )
    return Assembled(Guard(app, settings))


SETTINGS: Final[dict[str, Any]] = {
    "loop": "auto",  # uvloop's, where that is installed
    "http": "servers.protocols:HttpProtocol",
    # The sans-I/O protocol takes about two thirds of the default one's CPU a message, and frames of a few
    # hundred bytes are not worth compressing; 14 kB of compressed frames can be 15 MB.
    "ws": "servers.protocols:SocketProtocol",
    "ws_per_message_deflate": False,
    "ws_max_size": 16 * 1024 * 1024,
    "ws_ping_interval": PING_INTERVAL_S,
    "ws_ping_timeout": PONG_TIMEOUT_S,
    "h11_max_incomplete_event_size": 64 * 1024,
    # Longer than what usual proxies keep a connection for, so that it is theirs to close.
    "timeout_keep_alive": 75,
    "backlog": BACKLOG,
    "access_log": False,
    "server_header": False,
}
"""What uvicorn is told, whoever starts it."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KILL_AFTER_DRAIN_S: Final = 3.0
"""Seconds beyond the drain after which the process ends, whatever still hangs."""
_GC_THRESHOLD: Final = 50_000
"""New objects between two looks for cycles: some MB at most."""
_FORCED_EXIT_GRACE_S: Final = 0.5
_POLL_INTERVAL_S: Final = 0.05


def host(
    assembled: Assembled,
    listeners: Sequence[socket.socket],
    *,
    drain_s: float,
    on_started: Callable[[], None] | None = None,
    lifeline: int | None = None,
    on_cut: Callable[[], None] | None = None,
) -> int:
    """Serve until a signal says to stop, and return the exit status.

    Args:
        assembled: The ASGI application.
        listeners: The sockets to accept connections on.
        drain_s: Seconds that its sessions get to end.
        on_started: Called once connections are accepted.
        lifeline: A descriptor whose end of file says to stop as a signal does.
        on_cut: Called where the process is ended because something hangs, in another thread.

    Raises:
        OpenEnvError: The application would not start, and says why.
    """
    raise_descriptor_limit()
    _tune_garbage_collector()
    config = uvicorn.Config(assembled.app, log_config=None, **SETTINGS)
    server = _Server(config, assembled.drain, drain_s, on_started, lifeline, ExitTimer(on_cut))
    try:
        server.run(sockets=list(listeners))
    except SystemExit:  # how uvicorn says that the application would not start
        _raise_refusal(server, assembled)
        raise
    server.end.exit_within(_KILL_AFTER_DRAIN_S)  # the interpreter waits for threads too
    _raise_refusal(server, assembled)
    return 0 if server.started else 1


def _raise_refusal(server: uvicorn.Server, assembled: Assembled) -> None:
    """Raise why the application would not start, if it would not and says so."""
    if not server.started and (refusal := assembled.refusal()) is not None:
        raise refusal from None


def _tune_garbage_collector() -> None:
    """Collect garbage less often, and never again among the objects that were loaded at start.

    By default the garbage collector goes through the young objects after every 700 new ones. With thousands of
    sessions each look finds nothing but sessions, and all looks together take as long as the steps.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 10, 100)


class ExitTimer:
    """Ends the process after a time, whatever its threads do.

    A step that hangs would keep the event loop from closing, or the interpreter from ending.

    Args:
        on_cut: Called before the process is ended.
    """

    def __init__(self, on_cut: Callable[[], None] | None = None) -> None:
        self._on_cut = on_cut
        self._deadline = float("inf")
        self._deadline_moved = threading.Event()
        self._thread: threading.Thread | None = None

    def exit_within(self, seconds: float) -> None:
        """End the process in so many seconds, or sooner if that was said before."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)
        self._deadline_moved.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="ropewalk-end", daemon=True)
            self._thread.start()

    def _wait(self) -> None:
        while (left_s := self._deadline - time.monotonic()) > 0:
            if self._deadline_moved.wait(left_s):
                self._deadline_moved.clear()
        with suppress(Exception):
            print("ropewalk: ended while something still hung", file=sys.stderr, flush=True)  # noqa: T201
        if self._on_cut is not None:
            with suppress(Exception):
                self._on_cut()
        os._exit(0)


class _Server(uvicorn.Server):
    """Stops in this order: no more connections, the sessions' end, the connections' end, the application's end."""

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Drain | None,
        drain_s: float,
        on_started: Callable[[], None] | None,
        lifeline: int | None,
        end: ExitTimer,
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._drain_s = drain_s
        self._on_started = on_started
        self._lifeline = lifeline
        self._interrupts = 0
        self.end = end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if (lifeline := self._lifeline) is not None:  # not before signals are heeded: it sends one
            watch = threading.Thread(
                target=self._watch_lifeline, args=(lifeline,), name="ropewalk-lifeline", daemon=True
            )
            watch.start()
        await super().startup(sockets)
        if self.started and self._on_started is not None:
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
        async def run_drain() -> None:
            await drain(self._drain_s)

        task = asyncio.create_task(run_drain())
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
        # uvicorn raises the signals again when it is done, which turns an orderly end into a death by signal.
        # No bound method: the library that sends streams of events looks for one here, to cut them all at the signal,
        # with the replies to calls that have time to end.
        def handle(number: int, frame: FrameType | None) -> None:
            self.handle_exit(number, frame)

        before = {}
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                before[number] = signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A worker in a terminal gets one SIGINT from there and one SIGTERM from its supervisor: that is no hurry.
        self._interrupts += sig == signal.SIGINT
        if self._interrupts > 1:
            self.force_exit = True
            self.end.exit_within(_FORCED_EXIT_GRACE_S)
        self.should_exit = True
        self.end.exit_within(self._drain_s + _KILL_AFTER_DRAIN_S)

    def _watch_lifeline(self, lifeline: int) -> None:
        # A thread, because the loop may hang in an environment's step when it matters.
        while os.read(lifeline, 512):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        self.end.exit_within(self._drain_s + _KILL_AFTER_DRAIN_S)
