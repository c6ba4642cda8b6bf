"""Servers in hosted sandboxes: the base classes for all services, and the provider for E2B's API, by E2B's client."""

import copy
import json
import os
import shlex
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from operator import attrgetter
from typing import Any, ClassVar, Final, Self, TypedDict, Unpack

import httpx

from openenv_core.errors import ConfigurationError, ProviderError, ServerStartError, installed_with
from openenv_core.protocol.http import is_bearer_token
from openenv_core.providers.base import REMOTE_POLL_FACTOR, OwnedServerProvider, wait_healthy
from openenv_core.proxies import client_for

RENEWALS: Final = 3
"""Renewals per lease period, so that one lost request does no harm."""

OUTPUT_BYTES: Final = 16_384
LOG: Final = "/tmp/ropewalk-server.log"
"""File in the sandbox with the server's output."""

UNAVAILABLE: Final = 503
"""Marks errors of a service that does not respond."""


class SandboxRefusedError(ProviderError):
    """The service rejected a request: its key or template, or because of a limit.

    Attributes:
        status: The HTTP status; None if unknown.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class SandboxServiceUnavailableError(ProviderError):
    """The service is unreachable, does not respond in time, or is overloaded."""


class HostedSandbox(ABC):
    """A sandbox of a service, whose lease a thread renews while this process is alive.

    The abstract methods wrap the service's client and raise its exceptions.

    Args:
        inner: The sandbox object of the service's client.
        sandbox_id: The service's id of the sandbox.
        lease_s: Seconds after which the service ends the sandbox unless its lease is renewed.
    """

    def __init__(self, inner: Any, sandbox_id: str, lease_s: float) -> None:
        self.inner, self.sandbox_id = inner, sandbox_id
        self.lost: str | None = None
        self.paused = False
        self.ended = threading.Event()
        self._lease_s = lease_s
        self._pid = os.getpid()
        self._ending = threading.Lock()
        threading.Thread(target=self._renew_lease, name="openenv-sandbox-lease", daemon=True).start()

    @abstractmethod
    def run(self, command: str) -> None:
        """Start a shell command in the background."""

    @abstractmethod
    def url(self, port: int) -> str:
        """Return the URL of a port of the sandbox."""

    @abstractmethod
    def renew(self, lease_s: float, timeout_s: float) -> None:
        """Renew the lease for `lease_s` seconds from now; `timeout_s` is the timeout of the request."""

    @abstractmethod
    def running(self) -> bool:
        """Whether the sandbox is running."""

    @abstractmethod
    def output(self) -> str:
        """Return its server's output."""

    @abstractmethod
    def kill(self) -> None:
        """End the sandbox."""

    def end(self) -> None:
        """End the sandbox. Idempotent. Does nothing in a fork. If the service is unreachable, the lease expires."""
        if os.getpid() != self._pid:
            return
        with self._ending:
            if not self.ended.is_set():
                self.ended.set()
                with suppress(Exception):
                    self.kill()

    def _renew_lease(self) -> None:
        requested_at = time.monotonic()
        expires = requested_at + self._lease_s
        # The interval is from one request to the next, because one without an answer takes that long itself.
        while not self.ended.wait(max(0.0, requested_at + self._lease_s / RENEWALS - time.monotonic())):
            requested_at = time.monotonic()
            try:
                if not self.paused:
                    self.renew(self._lease_s, self._lease_s / RENEWALS)
            except Exception as error:  # of any kind: lost only if not found, or expired
                gone = "NotFound" in type(error).__name__ or time.monotonic() > expires
                if gone and not self.paused:
                    self.lost = f"the sandbox {self.sandbox_id} is gone: {error}"
                    return
            else:
                expires = requested_at + self._lease_s


class HostedOptions(TypedDict, total=False):
    """Options of all providers of hosted sandboxes.

    Attributes:
        port: The server's port in the sandbox; by default 8000.
        env_vars: Environment variables of the sandbox.
        lease_s: Seconds after which the sandbox of a dead owner ends; by default 60.
        start_timeout_s: Seconds within which the server must become healthy; by default 60, or 300 for services that
            pull an image first.
    """

    port: int
    env_vars: Mapping[str, str] | None
    lease_s: float
    start_timeout_s: float


class HostedServerProvider(OwnedServerProvider):
    """Runs a server in a hosted sandbox, which the service ends unless its lease is renewed.

    A subclass defines the package of the service's client and the meaning of its errors.

    Args:
        template: Template or image of the sandbox.
        command: The server's command, as a list of words; None if the template starts the server.
        port: See `HostedOptions`.
        env_vars: See `HostedOptions`.
        lease_s: See `HostedOptions`.
        start_timeout_s: See `HostedOptions`; None for the class's `START_TIMEOUT_S`.

    Raises:
        ConfigurationError: An option is invalid, or the client is not installed.
    """

    CLIENT: ClassVar[str]
    """The client's package, and the extra that installs it."""

    ERRORS: ClassVar[Mapping[str, int | None]]
    """HTTP statuses by the names of the client's errors, of which the first match counts; None: the error's own."""

    START_TIMEOUT_S: ClassVar[float] = 60.0

    def __init__(
        self,
        template: str,
        *,
        command: Sequence[str] | None,
        port: int = 8000,
        env_vars: Mapping[str, str] | None = None,
        lease_s: float = 60.0,
        start_timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        if isinstance(command, str):
            raise ConfigurationError(
                f"expected the command as a list of words, got {command!r}; shlex.split makes one"
            )
        self._template, self._command, self._port = template, command, port
        self._env_vars = dict(env_vars or {})
        self._lease_s = lease_s
        self._start_timeout_s = self.START_TIMEOUT_S if start_timeout_s is None else start_timeout_s
        if lease_s < 1 or self._start_timeout_s <= 0:
            raise ConfigurationError(
                f"expected lease_s of at least 1 and start_timeout_s above 0, got {lease_s} and {self._start_timeout_s}"
            )
        with installed_with(self.CLIENT, f"the client {self.CLIENT}"):
            self._client = import_module(self.CLIENT)
        self._sandbox: HostedSandbox | None = None

    @property
    def sandbox_id(self) -> str | None:
        """The service's id of the sandbox; None while there is none."""
        return None if self._sandbox is None else self._sandbox.sandbox_id

    @property
    def alive(self) -> bool:
        """Whether the sandbox is still running, as far as is known."""
        sandbox = self._sandbox
        if sandbox is None or sandbox.ended.is_set() or sandbox.lost is not None:
            return False
        try:
            return sandbox.running()
        except Exception:
            return True  # unknown if the service does not respond

    def output(self) -> str:
        """Return the end of the command's output, and why the sandbox was lost, if so."""
        sandbox = self._sandbox
        if sandbox is None or sandbox.ended.is_set():
            return ""
        text = "" if sandbox.lost is None else f"[{sandbox.lost}]"
        if self._command is not None:
            with suppress(Exception):
                text = sandbox.output()[-OUTPUT_BYTES:] + text
        return text

    @abstractmethod
    def _create(self) -> HostedSandbox:
        """Create a sandbox; called within `_translate_errors`."""

    def _launch(self) -> str:
        deadline = time.monotonic() + self._start_timeout_s
        with self._translate_errors():
            sandbox = self._create()
            self._adopt(sandbox)
            if self._command is not None:
                sandbox.run(f"exec {shlex.join(self._command)} >{LOG} 2>&1")
        return self._wait_served(sandbox, deadline)

    def _adopt(self, sandbox: HostedSandbox) -> None:
        self._sandbox = sandbox
        self._ending = weakref.finalize(self, sandbox.end)

    def _wait_served(self, sandbox: HostedSandbox, deadline: float) -> str:
        """Wait until the server in a sandbox is healthy, and return its URL."""

        def pause(seconds: float) -> None:
            if sandbox.ended.wait(seconds):
                raise ProviderError(f"expected {self._template} to start, but it was stopped meanwhile")
            if not self.alive:
                raise ServerStartError(
                    f"expected {self._template} to start, but its sandbox ended", self.output()
                )

        with self._translate_errors():
            url = sandbox.url(self._port)
        left_s = deadline - time.monotonic()
        fault = wait_healthy(
            lambda left: healthy(url, min(left, 10.0)), left_s, pause, factor=REMOTE_POLL_FACTOR
        )
        if fault is None:
            return url
        raise ServerStartError(
            f"expected {url} to be healthy within {self._start_timeout_s:g} s, got {fault}; name its command and its "
            "port, or raise start_timeout_s",
            self.output(),
        )

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Convert exceptions of the service's client in the block to ours."""
        try:
            yield
        except Exception as error:
            status: int | None = UNAVAILABLE
            if not isinstance(error, (httpx.HTTPError, OSError)):
                status = next(
                    (
                        status
                        for name, status in self.ERRORS.items()
                        if isinstance(error, attrgetter(name)(self._client))
                    ),
                    0,
                )
            if status == 0:  # not an error of the client
                raise
            if status == UNAVAILABLE:
                raise SandboxServiceUnavailableError(
                    f"expected an answer of the service, got {type(error).__name__}: {error}; does it run there?"
                ) from error
            raise SandboxRefusedError(
                f"the service refused {self._template}: {error}",
                status or getattr(error, "status_code", None),
            ) from error


class _E2BSandbox(HostedSandbox):
    """A sandbox of E2B's client.

    Args:
        base: Base URL of all sandboxes, for a service that has one.
    """

    def __init__(self, inner: Any, lease_s: float, base: str | None) -> None:
        self._base = base
        super().__init__(inner, inner.sandbox_id, lease_s)

    def run(self, command: str) -> None:
        self.inner.commands.run(command, background=True, timeout=0)

    def url(self, port: int) -> str:
        if self._base is not None:
            return f"{self._base}/sandboxes/{self.sandbox_id}/ports/{port}"
        return f"https://{self.inner.get_host(port)}"

    def renew(self, lease_s: float, timeout_s: float) -> None:
        self.inner.set_timeout(round(lease_s), request_timeout=timeout_s)

    def running(self) -> bool:
        return bool(self.inner.is_running())

    def output(self) -> str:
        return str(self.inner.files.read(LOG))

    def kill(self) -> None:
        self.inner.kill()


class RemoteSandboxProvider(HostedServerProvider):
    """Runs a server in a sandbox of a service with E2B's API. Needs the extra `e2b`.

    A thread renews the sandbox's lease while this process is alive; after this process's death, however it died, the
    service ends the sandbox when the lease expires.

    Args:
        template: E2B template, or image of `ropewalk sandboxes`.
        command: The server's command, as a list of words; None if the template starts the server.
        api_key: The service's API key; by default E2B_API_KEY. Not passed to the sandbox.
        api_url: URL of the service; by default E2B_API_URL, or else E2B's cloud.
        sandbox_url: Base URL of all sandboxes, for a service that has one (default: E2B_SANDBOX_URL). The server's URL
            is then `/sandboxes/ID/ports/PORT` below it; otherwise it has its own host name.
        request_timeout_s: Timeout of a request to the service, in seconds.
        options: `port`, `env_vars`, `lease_s`, `start_timeout_s`: see `HostedOptions`.

    Raises:
        ConfigurationError: There is no key, or the client is not installed. `start` raises SandboxRefusedError if the
            service rejects the request, SandboxServiceUnavailableError if it does not respond.
    """

    CLIENT = "e2b"
    ERRORS: ClassVar = {
        "AuthenticationException": 401,
        "ServiceBusyException": UNAVAILABLE,
        "TimeoutException": UNAVAILABLE,
        "SandboxException": None,
    }

    def __init__(
        self,
        template: str,
        *,
        command: Sequence[str] | None = None,
        api_key: str | None = None,
        api_url: str | None = None,
        sandbox_url: str | None = None,
        request_timeout_s: float = 30.0,
        **options: Unpack[HostedOptions],
    ) -> None:
        super().__init__(template, command=command, **options)
        key = api_key or os.environ.get("E2B_API_KEY")
        if not key or not is_bearer_token(key):
            raise ConfigurationError(
                "expected a key of the service, got none that can be one; set E2B_API_KEY"
            )
        if request_timeout_s <= 0:
            raise ConfigurationError(f"expected a request_timeout_s above 0, got {request_timeout_s}")
        sandbox_url = sandbox_url or os.environ.get("E2B_SANDBOX_URL")
        self._base = None if sandbox_url is None else sandbox_url.rstrip("/")
        self._options: dict[str, Any] = {
            "api_key": key,
            "api_url": api_url,
            "sandbox_url": sandbox_url,
            "request_timeout": request_timeout_s,
        }

    def pause(self) -> None:
        """Pause the sandbox with its server and memory. While paused it does not end with this process.

        Raises:
            SandboxRefusedError: The service does not support pausing.
        """
        sandbox = self._require_started()
        sandbox.paused = True
        try:
            with self._translate_errors():
                sandbox.inner.pause()
        except BaseException:
            sandbox.paused = False
            raise

    def resume(self) -> str:
        """Resume a paused sandbox; return the server's URL once it is healthy."""
        sandbox = self._require_started()
        with self._translate_errors():
            sandbox.inner.connect(timeout=round(self._lease_s))
        sandbox.paused = False
        return self._wait_served(sandbox, time.monotonic() + self._start_timeout_s)

    def fork(self, count: int = 1) -> list[Self]:
        """Fork the sandbox and return providers of the copies, whose servers are running. Stop each of them.

        Args:
            count: Number of copies, at most 20.

        Raises:
            SandboxRefusedError: The service cannot fork running sandboxes (none can fork containers), or has no
                capacity for all copies.
        """
        with self._translate_errors():
            forks = self._require_started().inner.fork(count=count, timeout=round(self._lease_s))
        copies: list[Self] = []
        try:
            for each in forks:  # adopt all before waiting for any, because their leases are running
                if not isinstance(each, Exception):
                    provider = copy.copy(self)
                    OwnedServerProvider.__init__(provider)
                    provider._adopt(_E2BSandbox(each, self._lease_s, self._base))
                    copies.append(provider)
            for each in forks:
                if isinstance(each, Exception):
                    with self._translate_errors():
                        raise each
            for provider in copies:
                assert provider._sandbox is not None
                deadline = time.monotonic() + self._start_timeout_s
                provider._url = provider._wait_served(provider._sandbox, deadline)
        except BaseException:
            for provider in copies:
                provider.stop()
            raise
        return copies

    def _require_started(self) -> HostedSandbox:
        if self._sandbox is None or self._url is None:
            raise ProviderError("the sandbox was not started; start() it")
        return self._sandbox

    def _create(self) -> HostedSandbox:
        sandbox = self._client.Sandbox.create(
            self._template, timeout=round(self._lease_s), envs=self._env_vars, **self._options
        )
        return _E2BSandbox(sandbox, self._lease_s, self._base)


def healthy(url: str, timeout_s: float) -> str | None:
    """Return None if /health reports healthy or requires a token, otherwise the failure.

    Args:
        url: The server's URL.
        timeout_s: Timeout in seconds.
    """
    try:
        with client_for(url) as http:
            response = http.get(url.rstrip("/") + "/health", timeout=timeout_s)
        if response.status_code in (401, 403):
            return None
        status = response.json()["status"]
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        return f"HTTP {response.status_code} on /health, without a status"
    return None if status == "healthy" else f"status {status!r}"
