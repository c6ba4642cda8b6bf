"""A sandbox that a service runs, for as long as its lease is renewed."""

import json
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from pydantic import ValidationError

from openenv_core.errors import ConfigurationError, ProviderError, ServerStartError, describe_faults
from openenv_core.providers.base import ELSEWHERE_FACTOR, OwnedServerProvider, wait_healthy
from openenv_core.providers.docker.options import size_of
from openenv_core.providers.remote.api import (
    RemoteSandbox,
    SandboxApi,
    SandboxLostError,
    SandboxRefusedError,
    SandboxSpec,
    SandboxState,
)

RENEWALS: Final = 3
"""How often a lease is renewed within its time, so that one lost request costs nothing."""

JOIN_TIMEOUT_S: Final = 1.0


class LeasedSandbox:
    """A sandbox, and the thread that renews its lease.

    The thread is a daemon: with its process, whatever that dies of, the renewals end, and soon after the lease.

    Args:
        api: The service.
        sandbox_id: Which sandbox.
        lease_s: Seconds that each renewal asks for.
        delete_timeout_s: Seconds that the request to end it may take.
    """

    def __init__(self, api: SandboxApi, sandbox_id: str, lease_s: float, delete_timeout_s: float) -> None:
        self.id = sandbox_id
        self._api = api
        self._lease_s = lease_s
        self._delete_timeout_s = delete_timeout_s
        self._pid = os.getpid()
        self._lost: str | None = None
        self._ended = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="openenv-sandbox-lease", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether it was told to end."""
        return self._ended.is_set()

    @property
    def lost(self) -> str | None:
        """Why it must be taken for gone; None while its lease is kept."""
        if self._lost is None and not self._ended.is_set() and not self._thread.is_alive():
            return "the thread that renews its lease has ended"
        return self._lost

    def wait(self, seconds: float) -> bool:
        """Wait; return whether it was told to end meanwhile."""
        return self._ended.wait(seconds)

    def end(self) -> None:
        """Give it back, and let the connections go. Idempotent. Does nothing in a fork of the owner."""
        if os.getpid() != self._pid:
            return
        with self._ending:
            if self._ended.is_set():
                return
            self._ended.set()
            try:
                # A service that cannot be reached reaps it when the lease runs out.
                with suppress(ProviderError):
                    self._api.delete(self.id, self._delete_timeout_s)
            finally:
                if threading.current_thread() is not self._thread:
                    self._thread.join(JOIN_TIMEOUT_S)
                self._api.close()

    def _main(self) -> None:
        try:
            self._renew()
        except BaseException as error:
            self._lost = f"the thread that renews its lease died of {type(error).__name__}: {error}"

    def _renew(self) -> None:
        pause_s = self._lease_s / RENEWALS
        expires = time.monotonic() + self._lease_s
        while not self._ended.wait(pause_s):
            asked = time.monotonic()
            try:
                seen = self._api.renew(self.id, self._lease_s, min(self._api.timeout_s, pause_s))
            except (SandboxLostError, SandboxRefusedError) as error:
                if not self._ended.is_set():
                    self._lost = str(error)
                return
            except ProviderError as error:
                if time.monotonic() > expires and not self._ended.is_set():
                    self._lost = f"its lease of {self._lease_s:g} s ran out: {error}"
                    return
            else:
                if seen.state is SandboxState.ENDED:
                    self._lost = f"the sandbox has ended: {seen.reason or 'no reason given'}"
                    return
                expires = asked + self._lease_s


_MAX_BYTES: Final = 64 * 1024
_ASKS_FOR_A_TOKEN: Final = (401, 403)


def healthy(url: str, timeout_s: float) -> str | None:
    """Return None where /health says healthy, else what was seen.

    A server that wants a token for /health is ready too: the sandbox service's own token is not for it.

    Args:
        url: Where the server is.
        timeout_s: Seconds for the answer.
    """
    import httpx

    from openenv_core.providers.remote.api import client_for

    deadline = time.monotonic() + timeout_s
    body = bytearray()
    try:
        with (
            client_for(url) as http,
            http.stream("GET", url.rstrip("/") + "/health", timeout=timeout_s) as response,
        ):
            if response.status_code in _ASKS_FOR_A_TOKEN:
                return None
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > _MAX_BYTES or time.monotonic() > deadline:
                    return "an answer on /health without an end"
        status = json.loads(body)["status"]
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        return f"{type(error).__name__}: {error}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"HTTP {response.status_code} on /health, without a status"
    return None if status == "healthy" else f"status {status!r}"


OUTPUT_BYTES: Final = 16_384
"""How much of the server's last output is asked for."""

LOOK_TIMEOUT_S: Final = 2.0
"""How long a question whether it lives may take: whoever asks has an error to tell of."""

FAILURE_REASON_WAIT_S: Final = 2.0
"""How long the service may take, beyond the start's own time, to say why it came to nothing."""

MIN_POLL_INTERVAL_S: Final = 0.02
MAX_POLL_INTERVAL_S: Final = 1.0
LONG_POLL_S: Final = 10.0
"""How long the service is asked to hold its answer back while the sandbox starts. One that does not is polled."""


class RemoteSandboxProvider(OwnedServerProvider):
    """Runs a server in a sandbox of a service that speaks the interface of docs/sandboxes.md.

    While the provider lives it renews the sandbox's lease from a thread of its own. When this process dies, of
    whatever cause, nobody does, and the service ends the sandbox when the lease runs out.

    Args:
        base_url: Where the service is.
        image: The container image to run.
        command: Words of the command to run: instead of the image's own, or, where the service allows it,
            without an image. `{port}` in them is replaced by the port to listen on.
        token: The service's bearer token. The sandbox never sees it.
        port: Where the server inside of an image listens.
        env_vars: Environment variables of the server.
        memory: The limit on its memory: bytes, or as in "512m".
        cpus: The limit on its CPU time, in cores.
        pids: The limit on its processes and threads.
        network: "none" for a sandbox that reaches nothing.
        lease_s: Seconds after which the sandbox of a dead owner is ended.
        start_timeout_s: Seconds until the server must be healthy.
        stop_timeout_s: Seconds that the request to end the sandbox may take.
        request_timeout_s: Seconds that any other request may take.

    Raises:
        ConfigurationError: Neither an image nor a command, or a setting that cannot be. `start` raises
            SandboxRefusedError where the service says no (the token, its limits, an image that it does not have),
            SandboxServiceUnavailableError where it does not answer. A service that cannot be reached by `stop` ends
            the sandbox when the lease runs out.
    """

    def __init__(
        self,
        base_url: str,
        *,
        image: str | None = None,
        command: Sequence[str] | None = None,
        token: str | None = None,
        port: int = 8000,
        env_vars: Mapping[str, str] | None = None,
        memory: str | int | None = None,
        cpus: float | None = None,
        pids: int | None = None,
        network: Literal["bridge", "none"] | None = None,
        lease_s: float = 60.0,
        start_timeout_s: float = 60.0,
        stop_timeout_s: float = 15.0,
        request_timeout_s: float = 10.0,
    ) -> None:
        super().__init__()
        if isinstance(command, str):
            raise ConfigurationError(
                f"expected the command as a list of words, got {command!r}; shlex.split makes one"
            )
        self._spec = _checked_spec(
            image=image,
            command=None if command is None else list(command),
            port=port,
            env_vars=dict(env_vars or {}),
            memory_bytes=None if memory is None else size_of("memory", memory),
            cpus=cpus,
            pids=pids,
            network=network,
            lease_s=lease_s,
            start_timeout_s=start_timeout_s,
        )
        self._service = (base_url, token, request_timeout_s)
        self._stop_timeout_s = stop_timeout_s
        SandboxApi(*self._service).close()  # says at once what is wrong with the URL or the token
        self._api: SandboxApi | None = None
        self._leased: LeasedSandbox | None = None

    @property
    def sandbox_id(self) -> str | None:
        """What the service calls the sandbox; None while there is none."""
        return None if self._leased is None else self._leased.id

    @property
    def alive(self) -> bool:
        """Whether the sandbox that was started still runs, as far as can be told within a moment."""
        leased, api = self._leased, self._api
        if leased is None or api is None or leased.ended or leased.lost is not None:
            return False
        try:
            return api.get(leased.id, timeout_s=LOOK_TIMEOUT_S).state is SandboxState.RUNNING
        except SandboxLostError:
            return False
        except ProviderError:
            return True  # a service that does not answer says nothing of its sandboxes

    def output(self) -> str:
        """Return the last of what the server printed; where its lease was lost, that as well."""
        leased, api = self._leased, self._api
        if leased is None or api is None or leased.ended:
            return ""
        lines = [] if leased.lost is None else [f"[{leased.lost}]"]
        try:
            lines.insert(0, api.logs(leased.id, OUTPUT_BYTES))
        except ProviderError as error:
            lines.append(f"[no output: {error}]")
        return "\n".join(line for line in lines if line)

    def _launch(self) -> str:
        deadline = time.monotonic() + self._spec.start_timeout_s
        api = SandboxApi(*self._service)
        try:
            made = api.create(self._spec)
        except BaseException:
            api.close()
            raise
        leased = LeasedSandbox(api, made.id, self._spec.lease_s, self._stop_timeout_s)
        self._api, self._leased = api, leased
        self._ending = weakref.finalize(self, leased.end)
        url = self._wait_until_running(api, leased, made, deadline + FAILURE_REASON_WAIT_S)
        self._wait_until_healthy(leased, url, deadline)
        return url

    def _wait_until_running(
        self, api: SandboxApi, leased: LeasedSandbox, seen: RemoteSandbox, deadline: float
    ) -> str:
        pause_s = MIN_POLL_INTERVAL_S
        while True:
            if leased.ended:
                raise SandboxLostError(
                    f"expected the sandbox {leased.id} to start, but it was stopped meanwhile"
                )
            if seen.state is SandboxState.RUNNING and seen.url is not None:
                return seen.url
            if seen.state is SandboxState.ENDED:
                raise ServerStartError(
                    f"expected the sandbox {leased.id} to start, but it ended: {seen.reason or 'no reason given'}",
                    self.output(),
                )
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ServerStartError(
                    f"expected the sandbox {leased.id} to run within {self._spec.start_timeout_s:g} s, got state "
                    f"{seen.state.value!r}; raise start_timeout_s if it needs longer",
                    self.output(),
                )
            if leased.wait(min(pause_s, left_s)):
                continue
            pause_s = min(2 * pause_s, MAX_POLL_INTERVAL_S)
            try:
                seen = api.get(leased.id, wait_s=min(LONG_POLL_S, left_s))
            except (ProviderError, RuntimeError):
                if not leased.ended:
                    raise

    def _wait_until_healthy(self, leased: LeasedSandbox, url: str, deadline: float) -> None:
        asked_s = self._service[2]

        def pause(seconds: float) -> None:
            if leased.wait(seconds):
                raise SandboxLostError(
                    f"expected the sandbox {leased.id} to start, but it was stopped meanwhile"
                )
            if not self.alive:
                raise ServerStartError(
                    f"expected the sandbox {leased.id} to be healthy, but it ended", self.output()
                )

        left_s = deadline - time.monotonic()
        seen = wait_healthy(
            lambda left_s: healthy(url, min(left_s, asked_s)), left_s, pause, factor=ELSEWHERE_FACTOR
        )
        if seen is not None:
            raise ServerStartError(
                f"expected {url} to be healthy within {self._spec.start_timeout_s:g} s, got {seen}; can this machine "
                "reach it? raise start_timeout_s if it needs longer",
                self.output(),
            )


def _checked_spec(**fields: Any) -> SandboxSpec:
    try:
        return SandboxSpec(**fields)
    except ValidationError as error:
        faults = describe_faults(error, "sandbox")
        raise ConfigurationError(f"expected settings that a sandbox can have, got: {faults}") from None
