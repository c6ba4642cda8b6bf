"""The interface of providers, which run a client's server: start, health, stop, a token."""

import fcntl
import inspect
import json
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeAlias, runtime_checkable

from openenv_core.errors import ConfigurationError, ProviderError


class Provider(Protocol):
    """Starts one server and stops it. Both may block, and both are called from threads."""

    def start(self) -> str:
        """Start the server, wait until it is healthy, and return its URL. A second call returns the same.

        Raises:
            ProviderError: It could not be started.
        """

    def stop(self) -> None:
        """Stop the server. Idempotent."""


@runtime_checkable
class WatchedProvider(Protocol):
    """A provider that also knows its server's status and output."""

    @property
    def alive(self) -> bool:
        """Whether the server that was started still runs."""

    def output(self) -> str:
        """Return the last lines that the server printed."""


AnyProvider: TypeAlias = Provider | Any
"""A `Provider`, or an object of either shape that released packages have:

- `start()` and `stop()`, with a `wait_for_ready()` that is called after the start if there is one;
- `start_container()`, `stop_container()` and `wait_for_ready(base_url)`.

It must know by itself what to start: nothing is passed to its start.
"""


LOOPBACK: Final = "127.0.0.1"

ANSWER_BYTES: Final = 65_536
"""The longest answer that is read."""

EXIT_WAIT_S: Final = 0.5
"""How long, in seconds, the end of a process may take to show after its connections broke."""


def status_of(port: int, timeout_s: float, token: str | None = None) -> str:
    """Return the status that a server reports on /health.

    The time holds for the whole answer, however slowly it comes.

    Args:
        port: Where it listens, on the loopback interface.
        timeout_s: Seconds that it gets.
        token: Its bearer token.

    Raises:
        OSError: Nobody answers.
        ValueError: What answers is no status.
    """
    deadline = time.monotonic() + timeout_s
    with socket.create_connection((LOOPBACK, port), timeout_s) as connection:
        authorization = "" if token is None else f"Authorization: Bearer {token}\r\n"
        connection.sendall(
            f"GET /health HTTP/1.0\r\nHost: {LOOPBACK}:{port}\r\nConnection: close\r\n{authorization}\r\n".encode()
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
            # Not every server closes its end after it has answered.
            if (status := _status(answer)) is not None:
                return status
    if not answer:
        raise ConnectionResetError("the connection was closed without an answer")
    raise ValueError(f"expected a status on /health, got {answer[:200]!r}")


def _status(answer: bytes) -> str | None:
    """Return the status in an answer, None where there is none, or not yet."""
    body = answer.partition(b"\r\n\r\n")[2]
    try:
        # Some send in chunks whatever the request's version: the object stands between their sizes.
        return str(json.loads(body[body.find(b"{") : body.rfind(b"}") + 1])["status"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def health_of(port: int, timeout_s: float, token: str | None = None) -> str | None:
    """Return None where a server on the loopback interface is healthy, else the failure.

    Args:
        port: Where it listens.
        timeout_s: Seconds that it gets to answer.
        token: Its bearer token.
    """
    try:
        status = status_of(port, timeout_s, token)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None if status == "healthy" else f"status {status!r}"


MIN_POLL_INTERVAL_S: Final = 0.003
MAX_POLL_INTERVAL_S: Final = 0.05
"""Pauses between two looks at a server that starts; they grow, since what starts slowly needs the CPU itself."""


def wait_healthy(
    probe: Callable[[float], str | None],
    timeout_s: float,
    pause: Callable[[float], object] = time.sleep,
    *,
    factor: float = 1.0,
) -> str | None:
    """Look at a server until it is healthy.

    Args:
        probe: Looks once, within so many seconds; returns None where the server is healthy, else what was seen.
        timeout_s: Seconds until it gives up.
        pause: Waits for so many seconds between two looks. It raises where the server has ended meanwhile.
        factor: How many times as long the pauses are as for a server on this machine.

    Returns:
        None where the server is healthy, else what was seen last.
    """
    deadline = time.monotonic() + timeout_s
    trouble: str | None = "no answer"
    interval_s = MIN_POLL_INTERVAL_S
    while (left_s := deadline - time.monotonic()) > 0:
        if (trouble := probe(left_s)) is None:
            return None
        pause(min(factor * interval_s, left_s))
        interval_s = min(1.2 * interval_s, MAX_POLL_INTERVAL_S)
    return trouble


REMOTE_POLL_FACTOR: Final = 20.0
"""How much longer the pauses are where the server is on another machine: 60 ms to 1 s."""

RETRY_INTERVAL_S: Final = 0.05


def listen(port: int = 0, backlog: int = 2048) -> socket.socket:
    """Return a socket that listens on the loopback interface and whose descriptor a child may inherit.

    In a program whose standard streams are closed, a new socket gets one of their numbers, and the child's
    own streams would take its place.
    """
    first_free = 3  # below are the standard streams
    with socket.create_server((LOOPBACK, port), backlog=backlog) as listener:
        return socket.socket(fileno=fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, first_free))


class OwnedServerProvider(ABC):
    """What the providers share: a server that is started once and ended once, by whatever threads.

    A subclass starts its server in `_launch`, and sets `_ending` as soon as there is something to end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._url: str | None = None
        self._ending: weakref.finalize[..., OwnedServerProvider] | None = None

    @property
    def url(self) -> str | None:
        """Where the server is; None while there is none."""
        return self._url

    def start(self) -> str:
        """Start the server, wait until it is healthy, and return its URL. A second call returns the same.

        Raises:
            ServerStartError: It ended, or stayed silent, before it was healthy.
            ProviderError: It could not be started; a subclass says how it tells why.
        """
        with self._lock:
            if self._url is None:
                try:
                    self._url = self._launch()
                except BaseException:
                    self._stop()
                    raise
            return self._url

    def stop(self) -> None:
        """Stop the server and wait until it is gone. Idempotent.

        A start that is under way in another thread fails then.
        """
        with hold_stopped(self._interrupt, self._lock):
            self._stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def _launch(self) -> str:
        """Start the server, wait until it is healthy, and return its URL."""

    def _interrupt(self) -> None:
        """Make a start that is under way fail."""
        if (ending := self._ending) is not None:
            ending()

    def _stop(self) -> None:
        """End the server, if there is one; nobody starts it meanwhile."""
        self._url = None
        self._interrupt()
        self._ending = None


@contextmanager
def hold_stopped(end: Callable[[], object], lock: threading.Lock) -> Iterator[None]:
    """Hold the lock, which a start holds until `end` makes it fail.

    It is called again and again: a start that has just begun may not have come to where it has an effect.
    """
    end()
    while not lock.acquire(timeout=RETRY_INTERVAL_S):
        end()
    try:
        yield
    finally:
        lock.release()


TOKENS: Final = "ROPEWALK_TOKENS"
TOKEN_FILE: Final = "ROPEWALK_TOKEN_FILE"

MAX_TOKEN_FILE_CHARS: Final = 65_536
"""How much of a file is read: callers of a sandbox service name the file too."""


def first_token(environ: Mapping[str, str], folder: str | Path = ".") -> str | None:
    """Return the first token of a server with these variables; None where they name none that can be read.

    Args:
        environ: The server's.
        folder: The server's working directory.
    """
    tokens = environ.get(TOKENS, "").replace(",", " ").split()
    name = environ.get(TOKEN_FILE, "").strip()
    if not tokens and name and (file := Path(folder, name)).is_file():
        # Where it cannot be read, the server says so itself.
        with suppress(OSError, ValueError), file.open(encoding="utf-8") as opened:
            lines = [line.strip() for line in opened.read(MAX_TOKEN_FILE_CHARS).splitlines()]
            tokens = [line for line in lines if line and not line.startswith("#")]
    return tokens[0] if tokens else None


class CallableProvider:
    """A `Provider` over these three calls, for one client: once it has been stopped, it does not start again.

    A start goes on in its thread when the client that waits for it is cancelled. The stop that follows may come
    before there is anything to stop, so the start looks for it, and stops what it has made.

    Args:
        begin: Starts a server and returns its URL.
        wait: Returns when the server at that URL is ready.
        end: Stops the server, if there is one.
    """

    def __init__(
        self, begin: Callable[[], object], wait: Callable[[str], object], end: Callable[[], object]
    ) -> None:
        self._begin, self._wait, self._end = begin, wait, end
        self._starting = threading.Lock()
        self._ending = threading.Lock()
        self._stopped = False
        self._url: str | None = None

    def start(self) -> str:
        """Start the server and wait until it is ready.

        Raises:
            ProviderError: It was stopped, before or meanwhile.
        """
        with self._starting:
            self._require_not_stopped()
            if self._url is None:
                url = str(self._begin())
                try:
                    self._require_not_stopped()
                    self._wait(url)
                    self._require_not_stopped()
                except BaseException:
                    self._stop()
                    raise
                self._url = url
            return self._url

    def stop(self) -> None:
        """Stop the server. A start that is under way in another thread stops it too, as soon as there is one."""
        self._stopped = True
        self._stop()

    def _stop(self) -> None:
        with self._ending:
            self._end()

    def _require_not_stopped(self) -> None:
        if self._stopped:
            raise ProviderError("expected to start a server, but the client was closed; make a new client")


def adapt_provider(provider: AnyProvider, *, started: bool = False) -> Provider:
    """Return the provider as a client uses it.

    Args:
        provider: Ours, or of a released shape.
        started: Whether its server runs already, so that it has to be stopped and nothing else.

    Raises:
        ConfigurationError: It is none, or wants to be told what to start.
    """
    given: Any = provider
    for name, stop in (("start_container", "stop_container"), ("start", "stop")):
        start: Any = getattr(provider, name, None)
        if not callable(start) or not callable(getattr(provider, stop, None)):
            continue
        parameters = inspect.signature(start).parameters.values()
        wanted = [
            each.name
            for each in parameters
            if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        if wanted and not started:
            raise ConfigurationError(
                f"expected {type(provider).__name__}.{name}() to need no arguments, got {', '.join(wanted)}; "
                "start it yourself and pass the URL as base_url beside the provider"
            )
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
    """Return whether the provider's server has died, as far as it can be told, or does so in that many seconds."""
    if not isinstance(provider, WatchedProvider):
        return False
    deadline = time.monotonic() + within_s
    while provider.alive:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def describe_death(provider: Provider) -> str:
    """Return what to add to an error if the provider's server has died: that, and its last output.

    One whose deaths show later than `EXIT_WAIT_S` after the connections broke says so in its attribute `death_s`.
    """
    within_s = getattr(provider, "death_s", EXIT_WAIT_S)
    if not has_died(provider, within_s=within_s) or not isinstance(provider, WatchedProvider):
        return ""
    output = provider.output().rstrip()
    return "; the server's process has ended" + (
        f"\n--- the server's last output ---\n{output}" if output else ", and printed nothing"
    )
