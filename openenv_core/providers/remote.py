"""Servers in hosted sandboxes: the provider for any service with E2B's API, by E2B's client."""

import os
import shlex
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from typing import Any, Final

import httpx

from openenv_core.errors import ConfigurationError, ProviderError, ServerStartError, installed_with
from openenv_core.protocol.http import is_bearer_token
from openenv_core.providers.base import REMOTE_POLL_FACTOR, OwnedServerProvider, wait_healthy
from openenv_core.proxies import client_for

CLIENT: Final = "e2b"
"""The package of E2B's client, and the extra that installs it."""

RENEWALS: Final = 3
"""Renewals per lease period, so that one lost request does no harm."""

OUTPUT_BYTES: Final = 16_384
LOG: Final = "/tmp/ropewalk-server.log"
"""File in the sandbox with the server's output."""


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


class SandboxLease:
    """A sandbox of E2B's client, whose timeout a thread renews while this process is alive.

    Args:
        inner: The client's sandbox.
        lease_s: Seconds after which the service ends the sandbox unless its timeout is renewed.

    Attributes:
        lost: Why the sandbox is gone, if it is.
        ended: Set by `end`.
    """

    def __init__(self, inner: Any, lease_s: float) -> None:
        self.inner = inner
        self.lost: str | None = None
        self.ended = threading.Event()
        self._lease_s = lease_s
        self._pid = os.getpid()
        self._ending = threading.Lock()
        threading.Thread(target=self._renew, name="openenv-sandbox-lease", daemon=True).start()

    def end(self) -> None:
        """End the sandbox. Idempotent. Does nothing in a fork. If the service is unreachable, the lease expires."""
        if os.getpid() != self._pid:
            return
        with self._ending:
            if not self.ended.is_set():
                self.ended.set()
                with suppress(Exception):
                    self.inner.kill()

    def _renew(self) -> None:
        requested_at = time.monotonic()
        expires = requested_at + self._lease_s
        # The interval is from one request to the next, because one without an answer takes that long itself.
        while not self.ended.wait(max(0.0, requested_at + self._lease_s / RENEWALS - time.monotonic())):
            requested_at = time.monotonic()
            try:
                self.inner.set_timeout(round(self._lease_s), request_timeout=self._lease_s / RENEWALS)
            except Exception as error:  # of any kind: lost only if not found, or expired
                if "NotFound" in type(error).__name__ or time.monotonic() > expires:
                    self.lost = f"the sandbox {self.inner.sandbox_id} is gone: {error}"
                    return
            else:
                expires = requested_at + self._lease_s


@dataclass(eq=False, repr=False)
class RemoteSandboxProvider(OwnedServerProvider):
    """Runs a server in a sandbox of a service with E2B's API. Needs the extra `e2b`.

    A thread renews the sandbox's timeout while this process is alive; after this process's death, however it died, the
    service ends the sandbox when the timeout expires.

    Args:
        template: E2B template, or image of `ropewalk sandboxes`.
        command: The server's command, as a list of words; None if the template starts the server.
        port: The server's port in the sandbox.
        env_vars: Environment variables of the sandbox.
        lease_s: Seconds after which the sandbox of a dead owner ends.
        start_timeout_s: Seconds within which the server must become healthy.
        api_key: The service's API key; by default E2B_API_KEY. Not passed to the sandbox.
        api_url: URL of the service; by default E2B_API_URL, or else E2B's cloud.
        sandbox_url: Base URL of all sandboxes, for a service that has one (default: E2B_SANDBOX_URL). The server's URL
            is then `/sandboxes/ID/ports/PORT` below it; otherwise it has its own host name.
        request_timeout_s: Timeout of a request to the service, in seconds.

    Raises:
        ConfigurationError: An option is invalid, there is no key, or the client is not installed. `start` raises
            SandboxRefusedError if the service rejects the request, SandboxServiceUnavailableError if it does not
            respond.
    """

    template: str
    _: KW_ONLY
    command: Sequence[str] | None = None
    port: int = 8000
    env_vars: Mapping[str, str] | None = None
    lease_s: float = 60.0
    start_timeout_s: float = 60.0
    api_key: str | None = None
    api_url: str | None = None
    sandbox_url: str | None = None
    request_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        super().__init__()
        if isinstance(self.command, str):
            raise ConfigurationError(
                f"expected the command as a list of words, got {self.command!r}; shlex.split makes one"
            )
        if self.lease_s < 1 or self.start_timeout_s <= 0 or self.request_timeout_s <= 0:
            raise ConfigurationError(
                "expected lease_s of at least 1, start_timeout_s and request_timeout_s above 0, "
                f"got {self.lease_s}, {self.start_timeout_s} and {self.request_timeout_s}"
            )
        key = self.api_key or os.environ.get("E2B_API_KEY")
        if not key or not is_bearer_token(key):
            raise ConfigurationError(
                "expected a key of the service, got none that can be one; set E2B_API_KEY"
            )
        with installed_with(CLIENT, f"the client {CLIENT}"):
            self._client = import_module(CLIENT)
        self.sandbox_url = self.sandbox_url or os.environ.get("E2B_SANDBOX_URL")
        self._service = {"api_key": key, "api_url": self.api_url, "sandbox_url": self.sandbox_url}
        self._lease: SandboxLease | None = None

    @property
    def sandbox_id(self) -> str | None:
        """The service's id of the sandbox; None while there is none."""
        return None if self._lease is None else str(self._lease.inner.sandbox_id)

    @property
    def alive(self) -> bool:
        """Whether the sandbox is still running, as far as is known."""
        lease = self._lease
        if lease is None or lease.ended.is_set() or lease.lost is not None:
            return False
        try:
            return bool(lease.inner.is_running())
        except Exception:
            return True  # unknown if the service does not respond

    def output(self) -> str:
        """Return the end of the command's output, and why the sandbox was lost, if so."""
        lease = self._lease
        if lease is None or lease.ended.is_set():
            return ""
        text = "" if lease.lost is None else f"[{lease.lost}]"
        if self.command is not None:
            with suppress(Exception):
                text = str(lease.inner.files.read(LOG))[-OUTPUT_BYTES:] + text
        return text

    def _launch(self) -> str:
        with self._translate_errors():
            sandbox = self._client.Sandbox.create(
                self.template,
                timeout=round(self.lease_s),
                envs=dict(self.env_vars or {}),
                request_timeout=self.request_timeout_s,
                **self._service,
            )
            lease = self._lease = SandboxLease(sandbox, self.lease_s)
            self._ending = weakref.finalize(self, lease.end)
            if self.command is not None:
                command = f"exec {shlex.join(self.command)} >{LOG} 2>&1"
                sandbox.commands.run(command, background=True, timeout=0)
            url = f"https://{sandbox.get_host(self.port)}"
            if self.sandbox_url is not None:
                url = f"{self.sandbox_url.rstrip('/')}/sandboxes/{sandbox.sandbox_id}/ports/{self.port}"

        def pause(seconds: float) -> None:
            if lease.ended.wait(seconds):
                raise ProviderError(f"expected {self.template} to start, but it was stopped meanwhile")
            if not self.alive:
                raise ServerStartError(
                    f"expected {self.template} to start, but its sandbox ended", self.output()
                )

        wait_healthy(
            f"{self.template} at {url}",
            lambda left_s: healthy(url, min(left_s, 10.0)),
            self.start_timeout_s,
            pause,
            factor=REMOTE_POLL_FACTOR,
            output=self.output,
        )
        return url

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Convert exceptions of the client in the block to ours."""
        client = self._client
        try:
            yield
        except (
            client.ServiceBusyException,
            client.TimeoutException,
            httpx.HTTPError,
            OSError,
        ) as error:
            raise SandboxServiceUnavailableError(
                f"expected an answer of the service, got {type(error).__name__}: {error}; does it run there?"
            ) from error
        except (client.AuthenticationException, client.SandboxException) as error:
            refused_key = isinstance(error, client.AuthenticationException)
            status = 401 if refused_key else getattr(error, "status_code", None)
            raise SandboxRefusedError(f"the service refused {self.template}: {error}", status) from error


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
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"HTTP {response.status_code} on /health, without a status"
    return None if status == "healthy" else f"status {status!r}"
