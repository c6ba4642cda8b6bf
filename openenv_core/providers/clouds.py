"""Servers in sandboxes of Daytona and of Modal, by their own clients."""

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
"""Of a signed address: Daytona signs none for longer."""

MODAL_MAX_LIFE_S: Final = 86_400
"""Modal ends every sandbox after a day."""


class _DaytonaSandbox(HostedSandbox):
    def run(self, command: str) -> None:
        # In the background with nothing of the call's output open, or the call would last as long.
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
    """Runs a server in a sandbox of Daytona's, whose time to live is set anew while this process lives.

    Needs the extra `daytona`. The server is reached by a signed address, which is good for a day.

    Args:
        image: The sandbox's image, by its name in a registry.
        command: Words of the server's command. Daytona starts nothing of an image by itself.
        api_key: The account's key; by default DAYTONA_API_KEY. The sandbox never sees it.
        api_url: Where the service is; by default DAYTONA_API_URL, else Daytona's cloud.
        options: `port`, `env_vars`, `lease_s` (rounded up to minutes) and `start_timeout_s` (until the sandbox must
            be there, and then until the server must be healthy): see `HostedOptions`.

    Raises:
        ConfigurationError: There is no key, or the client is not installed. `start` raises SandboxRefusedError where
            the service says no, SandboxServiceUnavailableError where it does not answer.
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
            raise ConfigurationError("expected a key of Daytona's, got none; set DAYTONA_API_KEY")
        self._daytona = self._client.Daytona(self._client.DaytonaConfig(api_key=key, api_url=api_url))

    def _create(self) -> HostedSandbox:
        params = self._client.CreateSandboxFromImageParams(
            image=self._template,
            env_vars=self._env_vars,
            ephemeral=True,
            auto_stop_interval=0,  # its time to live ends it, and nothing else
            ttl_minutes=math.ceil(self._lease_s / 60),
        )
        sandbox = self._daytona.create(params, timeout=self._start_timeout_s)
        return _DaytonaSandbox(sandbox, str(sandbox.id), self._lease_s)


class _ModalSandbox(HostedSandbox):
    def run(self, command: str) -> None:
        """Do nothing: it is the sandbox's own command, as others would count as its use."""

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
    """Runs a server in a sandbox of Modal's, which is used now and then while this process lives.

    Needs the extra `modal`. No time can be set anew there: Modal ends what nobody has used for `lease_s`, and all
    after a day. The server is reached over a tunnel of Modal's, with TLS.

    Args:
        image: The sandbox's image, by its name in a registry; it has Python.
        command: Words of the server's command.
        app: The app that sandboxes belong to; made where there is none.
        options: `port`, `env_vars`, `lease_s`, `start_timeout_s`: see `HostedOptions`.

    Raises:
        ConfigurationError: The client is not installed. `start` raises SandboxRefusedError where the service says no,
            SandboxServiceUnavailableError where it does not answer.
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
