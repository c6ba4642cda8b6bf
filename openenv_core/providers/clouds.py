"""Servers in sandboxes of Daytona and Modal, through their own clients."""

import math
import os
from collections.abc import Sequence
from typing import ClassVar, Final, Unpack

from openenv_core.errors import ConfigurationError
from openenv_core.providers.remote import (
    LOG,
    UNAVAILABLE,
    HostedOptions,
    HostedSandbox,
    HostedServerProvider,
)

COMMAND_TIMEOUT_S: Final = 30
URL_LIFETIME_S: Final = 86_400
"""Lifetime of a signed URL: Daytona's maximum."""

MODAL_MAX_LIFE_S: Final = 86_400
"""Modal ends every sandbox after a day."""


class _DaytonaSandbox(HostedSandbox):
    def run(self, command: str) -> None:
        # In the background, with the call's streams closed; otherwise the call would last as long as the command.
        self.inner.process.exec(f"({command}) </dev/null >/dev/null 2>&1 &", timeout=COMMAND_TIMEOUT_S)

    def url(self, port: int) -> str:
        return str(self.inner.create_signed_preview_url(port, expires_in_seconds=URL_LIFETIME_S).url)

    def renew(self, lease_s: float, timeout_s: float) -> None:
        self.inner.set_ttl(math.ceil(lease_s / 60), request_timeout=timeout_s)

    def running(self) -> bool:
        self.inner.refresh_data()
        return str(getattr(self.inner.state, "value", self.inner.state)) == "started"

    def output(self) -> str:
        return str(self.inner.process.exec(f"cat {LOG}", timeout=COMMAND_TIMEOUT_S).result)

    def kill(self) -> None:
        self.inner.delete()


class DaytonaSandboxProvider(HostedServerProvider):
    """Runs a server in a Daytona sandbox, whose time to live is renewed while this process is alive.

    Needs the extra `daytona`. The server is reached by a signed URL, valid for a day.

    Args:
        image: Name of the sandbox's image in a registry.
        command: The server's command, as a list of words. Daytona does not run an image's own command.
        api_key: The account's API key; by default DAYTONA_API_KEY. Not passed to the sandbox.
        api_url: URL of the service; by default DAYTONA_API_URL, or else Daytona's cloud.
        options: `port`, `env_vars`, `lease_s` (rounded up to minutes) and `start_timeout_s` (for the creation of the
            sandbox, and for the server to become healthy): see `HostedOptions`.

    Raises:
        ConfigurationError: There is no key, or the client is not installed. `start` raises SandboxRefusedError if the
            service rejects the request, SandboxServiceUnavailableError if it does not respond.
    """

    CLIENT = "daytona"
    ERRORS: ClassVar = {
        "DaytonaTimeoutError": UNAVAILABLE,
        "DaytonaConnectionError": UNAVAILABLE,
        "DaytonaServiceUnavailableError": UNAVAILABLE,
        "DaytonaError": None,
    }
    START_TIMEOUT_S = 300.0

    def __init__(
        self,
        image: str,
        *,
        command: Sequence[str],
        api_key: str | None = None,
        api_url: str | None = None,
        **options: Unpack[HostedOptions],
    ) -> None:
        super().__init__(image, command=command, **options)
        if not (key := api_key or os.environ.get("DAYTONA_API_KEY")):
            raise ConfigurationError("there is no key of Daytona's; set DAYTONA_API_KEY")
        self._daytona = self._client.Daytona(self._client.DaytonaConfig(api_key=key, api_url=api_url))

    def _create(self) -> HostedSandbox:
        params = self._client.CreateSandboxFromImageParams(
            image=self._template,
            env_vars=self._env_vars,
            ephemeral=True,
            auto_stop_interval=0,  # only its time to live ends it
            ttl_minutes=math.ceil(self._lease_s / 60),
        )
        sandbox = self._daytona.create(params, timeout=self._start_timeout_s)
        return _DaytonaSandbox(sandbox, str(sandbox.id), self._lease_s)


class _ModalSandbox(HostedSandbox):
    def run(self, command: str) -> None:
        """Do nothing: `_create` made it the sandbox's own command, because an exec would count as use."""

    def url(self, port: int) -> str:
        return str(self.inner.tunnels()[port].url)

    def renew(self, lease_s: float, timeout_s: float) -> None:
        self.inner.exec("true", timeout=math.ceil(timeout_s)).wait()

    def running(self) -> bool:
        return self.inner.poll() is None

    def output(self) -> str:
        return str(self.inner.exec("cat", LOG, timeout=COMMAND_TIMEOUT_S).stdout.read())

    def kill(self) -> None:
        self.inner.terminate()


class ModalSandboxProvider(HostedServerProvider):
    """Runs a server in a Modal sandbox, which is kept from idling while this process is alive.

    Needs the extra `modal`. Modal has no renewable time to live: it ends a sandbox that is idle for `lease_s`, and any
    after a day. The server is reached over a Modal tunnel, with TLS.

    Args:
        image: Name of the sandbox's image in a registry; it must contain Python.
        command: The server's command, as a list of words.
        app: Modal app of the sandboxes; created if missing.
        options: `port`, `env_vars`, `lease_s`, `start_timeout_s`: see `HostedOptions`.

    Raises:
        ConfigurationError: The client is not installed. `start` raises SandboxRefusedError if the service rejects the
            request, SandboxServiceUnavailableError if it does not respond.
    """

    CLIENT = "modal"
    ERRORS: ClassVar = {
        "exception.ConnectionError": UNAVAILABLE,
        "exception.TimeoutError": UNAVAILABLE,
        "exception.ServiceError": UNAVAILABLE,
        "exception.AuthError": 401,
        "exception.PermissionDeniedError": 403,
        "exception.NotFoundError": 404,
        "exception.ResourceExhaustedError": 429,
        "exception.Error": None,
    }
    START_TIMEOUT_S = 300.0

    def __init__(
        self, image: str, *, command: Sequence[str], app: str = "ropewalk", **options: Unpack[HostedOptions]
    ) -> None:
        super().__init__(image, command=command, **options)
        self._app = app

    def _create(self) -> HostedSandbox:
        sdk = self._client
        sandbox = sdk.Sandbox.create(
            "sh",
            "-c",
            f'exec "$@" >{LOG} 2>&1',
            "sh",
            *(self._command or ()),
            app=sdk.App.lookup(self._app, create_if_missing=True),
            image=sdk.Image.from_registry(self._template),
            env=self._env_vars,
            timeout=MODAL_MAX_LIFE_S,
            idle_timeout=math.ceil(self._lease_s),
            encrypted_ports=[self._port],
        )
        return _ModalSandbox(sandbox, str(sandbox.object_id), self._lease_s)
