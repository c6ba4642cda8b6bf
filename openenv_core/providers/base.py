"""The interface of providers, which run a client's server, and what they share: start, health checks, stop, tokens."""

import fcntl
import inspect
import json
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeAlias, runtime_checkable

from openenv_core.errors import ConfigurationError, ProviderError, ServerStartError


class Provider(Protocol):
    """Starts and stops one server. Both methods may block and are called from threads."""

    def start(self) -> str:
        """Start the server, wait until it is healthy, and return its URL. A second call returns the same URL.

        Raises:
            ProviderError: The server could not be started.
        """

    def stop(self) -> None:
        """Stop the server. Idempotent."""


@runtime_checkable
class WatchedProvider(Protocol):
    """A provider that also knows its server's status and output."""

    @property
    def alive(self) -> bool:
        """Whether the started server is still running."""

    def output(self) -> str:
        """Return the last lines of the server's output."""


@runtime_checkable
class FleetProvider(Protocol):
    """A provider of several equal servers."""

    def urls(self) -> list[str]:
        """Return the URLs of the servers that are ready; may block."""


AnyProvider: TypeAlias = Provider | Any
"""A `Provider`, or an object with one of the released interfaces:

- `start()` and `stop()`, and optionally `wait_for_ready()`, called after the start;
- `start_container()`, `stop_container()` and `wait_for_ready(base_url)`.

Its start method is called without arguments.
"""


LOOPBACK: Final = "127.0.0.1"

ANSWER_BYTES: Final = 65_536
"""Maximum size of a response."""

EXIT_WAIT_S: Final = 0.5
"""How long, in seconds, until the end of a process can be observed after its connections broke."""


def status_of(port: int, timeout_s: float, token: str | None = None, *, host: str = LOOPBACK) -> str:
    """Return the status that a server reports on /health.

    The timeout is for the whole response, however slowly it arrives.

    Args:
        port: The server's port.
        timeout_s: Timeout in seconds.
        token: Its bearer token.
        host: The server's IPv4 address.

    Raises:
        OSError: There is no response.
        ValueError: The response has no status.
    """
    deadline = time.monotonic() + timeout_s
    with socket.create_connection((host, port), timeout_s) as connection:
        authorization = "" if token is None else f"Authorization: Bearer {token}\r\n"
        connection.sendall(
            f"GET /health HTTP/1.0\r\nHost: {host}:{port}\r\nConnection: close\r\n{authorization}\r\n".encode()
        )
        answer = b""
        while len(answer) < ANSWER_BYTES:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("no answer in time")
            connection.settimeout(left)
            chunk = connection.recv(ANSWER_BYTES)
            if not chunk:
                break
            answer += chunk
            # Not every server closes the connection after its response.
            if (status := _status(answer)) is not None:
                return status
    if not answer:
        raise ConnectionResetError("the connection was closed without an answer")
    raise ValueError(f"expected a status on /health, got {answer[:200]!r}")


def _status(answer: bytes) -> str | None:
    """Return the status in a response; None if it has none, or is incomplete."""
    body = answer.partition(b"\r\n\r\n")[2]
    try:
        # Some servers send a chunked body even for HTTP/1.0: take the object between the chunk sizes.
        return str(json.loads(body[body.find(b"{") : body.rfind(b"}") + 1])["status"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def health_of(port: int, timeout_s: float, token: str | None = None, *, host: str = LOOPBACK) -> str | None:
    """Return None if a server is healthy, otherwise a description of the failure.

    Args:
        port: The server's port.
        timeout_s: Seconds to wait for the response.
        token: Its bearer token.
        host: The server's IPv4 address.
    """
    try:
        status = status_of(port, timeout_s, token, host=host)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None if status == "healthy" else f"status {status!r}"


MIN_POLL_INTERVAL_S: Final = 0.003
MAX_POLL_INTERVAL_S: Final = 0.05
"""Intervals between health checks of a starting server. They grow, because a slow server needs the CPU itself."""


def wait_healthy(
    server: str,
    probe: Callable[[float], str | None],
    timeout_s: float,
    pause: Callable[[float], object] = time.sleep,
    *,
    factor: float = 1.0,
    output: Callable[[], str] = str,
) -> None:
    """Poll a server until it is healthy.

    Args:
        server: What the error calls the server.
        probe: One check, given its timeout in seconds; returns None if the server is healthy, otherwise the failure.
        timeout_s: Seconds after which to give up.
        pause: Sleeps for a number of seconds between checks; raises if the server has ended.
        factor: Multiplies the intervals, which are for servers on this machine.
        output: Returns the server's output, for the error.

    Raises:
        ServerStartError: The server was not healthy in time.
    """
    deadline = time.monotonic() + timeout_s
    trouble: str | None = "no answer"
    interval_s = MIN_POLL_INTERVAL_S
    while (left_s := deadline - time.monotonic()) > 0:
        if (trouble := probe(left_s)) is None:
            return
        pause(min(factor * interval_s, left_s))
        interval_s = min(1.2 * interval_s, MAX_POLL_INTERVAL_S)
    raise ServerStartError(
        f"expected {server} to be healthy within {timeout_s:g} s, got {trouble}; raise start_timeout_s if it "
        "needs longer, or name the port where it listens",
        output(),
    )


REMOTE_POLL_FACTOR: Final = 20.0
"""Factor of the intervals for servers on other machines: 60 ms to 1 s."""

RETRY_INTERVAL_S: Final = 0.05


def listen(port: int = 0, backlog: int = 2048, host: str = LOOPBACK) -> socket.socket:
    """Return a listening socket on an IPv4 address whose descriptor a child process can inherit.

    If this program's standard streams are closed, a new socket gets one of their numbers, and the child's own streams
    would replace it; so the descriptor is duplicated to a higher number.
    """
    first_free = 3  # below are the standard streams
    with socket.create_server((host, port), backlog=backlog) as listener:
        return socket.socket(fileno=fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, first_free))


class OwnedServerProvider(ABC):
    """Base class of the providers: starts and stops a server once, from any thread.

    A subclass starts its server in `_launch`, and sets `_ending` as soon as there is something to clean up. What that
    calls is called again if a Ctrl-C has interrupted it.

    Attributes:
        url: The server's URL; None while it is not running.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ending_lock = threading.RLock()
        self.url: str | None = None
        self._ending: weakref.finalize[..., OwnedServerProvider] | None = None

    def start(self) -> str:
        """Start the server, wait until it is healthy, and return its URL. A second call returns the same.

        Raises:
            ServerStartError: The server exited, or did not become healthy in time.
            ProviderError: The server could not be started; subclasses document their errors.
        """
        with self._lock:
            if self.url is None:
                try:
                    self.url = self._launch()
                except BaseException:
                    self._stop()
                    raise
            return self.url

    def stop(self) -> None:
        """Stop the server and wait until it has ended. Idempotent.

        Makes a concurrent start in another thread fail.
        """
        self._interrupt()
        while not self._lock.acquire(timeout=RETRY_INTERVAL_S):
            self._interrupt()  # the first had no effect on a start that had only just begun
        try:
            self._stop()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def _launch(self) -> str:
        """Start the server, wait until it is healthy, and return its URL."""

    def _interrupt(self) -> None:
        """Make a concurrent start fail."""
        if (ending := self._ending) is not None:
            with self._ending_lock:
                if (pending := ending.peek()) is not None:
                    _, end, arguments, _ = pending
                    end(*arguments)
                    ending.detach()

    def _stop(self) -> None:
        """Stop the server, if any. The caller holds the lock."""
        self.url = None
        self._interrupt()
        self._ending = None


TOKENS: Final = "ROPEWALK_TOKENS"
TOKEN_FILE: Final = "ROPEWALK_TOKEN_FILE"

MAX_TOKEN_FILE_CHARS: Final = 65_536
"""Maximum characters read of a token file, because callers of a sandbox service choose the file too."""


def read_first_token(environ: Mapping[str, str], folder: str | Path = ".") -> str | None:
    """Return the first token of a server with these environment variables; None if none can be read.

    Args:
        environ: The server's environment variables.
        folder: The server's working directory.
    """
    tokens = environ.get(TOKENS, "").replace(",", " ").split()
    name = environ.get(TOKEN_FILE, "").strip()
    if not tokens and name and (file := Path(folder, name)).is_file():
        # If the file cannot be read, the server itself reports it.
        with suppress(OSError, ValueError), file.open(encoding="utf-8") as opened:
            lines = [line.strip() for line in opened.read(MAX_TOKEN_FILE_CHARS).splitlines()]
            tokens = [line for line in lines if line and not line.startswith("#")]
    return tokens[0] if tokens else None


class CallableProvider(OwnedServerProvider):
    """A `Provider` made of three functions, for one client: once stopped, it does not start again.

    When a client that waits for the start is cancelled, the start continues in its thread, and the client's stop may
    come before there is a server. So the start checks for a stop, and stops the server itself.

    Args:
        begin: Starts a server and returns its URL.
        wait: Waits until the server at that URL is ready.
        end: Stops the server, if any.
    """

    def __init__(
        self, begin: Callable[[], object], wait: Callable[[str], object], end: Callable[[], object]
    ) -> None:
        super().__init__()
        self._begin, self._wait, self._end = begin, wait, end
        self._has_begun = self._stopped = False

    def start(self) -> str:
        """Start the server, as `OwnedServerProvider.start`; ProviderError once it was stopped."""
        self._require_not_stopped()
        return super().start()

    def stop(self) -> None:
        """Stop the server. A concurrent start in another thread stops its server as soon as it exists."""
        self._stopped = True
        with self._ending_lock:
            self._end()

    def _launch(self) -> str:
        self._require_not_stopped()
        url = str(self._begin())
        self._has_begun = True
        self._require_not_stopped()
        self._wait(url)
        self._require_not_stopped()
        return url

    def _stop(self) -> None:
        """Stop what a failed start has begun; if that is nothing, the failure is not to be hidden by another."""
        if self._has_begun:
            with self._ending_lock:
                self._end()

    def _require_not_stopped(self) -> None:
        if self._stopped:
            raise ProviderError("expected to start a server, but the client was closed; make a new client")


def adapt_provider(provider: AnyProvider, *, started: bool = False) -> Provider:
    """Convert a provider with a released interface to a `Provider`.

    Args:
        provider: A `Provider`, or an object with a released interface.
        started: Whether its server is already running, so that only its stop is needed.

    Raises:
        ConfigurationError: It is not a provider, or its start needs arguments.
    """
    given: Any = provider
    for name, stop in (("start_container", "stop_container"), ("start", "stop")):
        start: Any = getattr(provider, name, None)
        if not callable(start) or not callable(getattr(provider, stop, None)):
            continue
        try:
            inspect.signature(start).bind()
        except TypeError as error:
            if not started:
                raise ConfigurationError(
                    f"expected {type(provider).__name__}.{name}() to need no arguments, got: {error}; "
                    "start it yourself and pass the URL as base_url beside the provider"
                ) from error
        if name == "start_container":
            return CallableProvider(start, given.wait_for_ready, given.stop_container)
        if hasattr(provider, "wait_for_ready"):
            return CallableProvider(start, lambda _: given.wait_for_ready(), given.stop)
        return provider
    raise ConfigurationError(
        "expected a provider with start() and stop(), or start_container() and stop_container(), "
        f"got {type(provider).__name__}"
    )


def has_died(provider: object, *, within_s: float = EXIT_WAIT_S) -> bool:
    """Return whether the provider's server is known to have died, or dies within `within_s` seconds."""
    if not isinstance(provider, WatchedProvider):
        return False
    deadline = time.monotonic() + within_s
    while provider.alive:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def describe_death(provider: Provider) -> str:
    """Return a text to append to an error if the provider's server has died, with its last output; otherwise "".

    A provider whose server's death shows later than `EXIT_WAIT_S` after its connections broke has that time as its
    attribute `death_s`.
    """
    within_s = getattr(provider, "death_s", EXIT_WAIT_S)
    if not isinstance(provider, WatchedProvider) or not has_died(provider, within_s=within_s):
        return ""
    output = provider.output().rstrip()
    return "; the server's process has ended" + (
        f"\n--- the server's last output ---\n{output}" if output else ", and printed nothing"
    )
