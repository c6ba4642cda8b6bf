"""Servers in sandboxes of Daytona and of Modal, by their own clients."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from openenv_core.errors import ConfigurationError, ProviderError, installed_with
from openenv_core.providers.remote import (
    LOG,
    HostedSandbox,
    HostedServerProvider,
    SandboxRefusedError,
    SandboxServiceUnavailableError,
)

COMMAND_TIMEOUT_S: Final = 30
URL_LIFETIME_S: Final = 86_400
"""Of a signed address: Daytona signs none for longer."""

MODAL_MAX_LIFE_S: Final = 86_400
"""Modal ends every sandbox after a day."""


class _DaytonaSandbox:
    def __init__(self, inner: Any) -> None:
        self._inner, self.sandbox_id = inner, str(inner.id)

    def run(self, command: str) -> None:
        # In the background with nothing of the call's output open, or the call would last as long.
        self._inner.process.exec(f"({command}) </dev/null >/dev/null 2>&1 &", timeout=COMMAND_TIMEOUT_S)

    def url(self, port: int) -> str:
        return str(self._inner.create_signed_preview_url(port, expires_in_seconds=URL_LIFETIME_S).url)

    def renew(self, lease_s: float, timeout_s: float) -> None:
        self._inner.set_ttl(math.ceil(lease_s / 60), request_timeout=timeout_s)

    def running(self) -> bool:
        self._inner.refresh_data()
        return str(getattr(self._inner.state, "value", self._inner.state)) == "started"

    def output(self) -> str:
        return str(self._inner.process.exec(f"cat {LOG}", timeout=COMMAND_TIMEOUT_S).result)

    def kill(self) -> None:
        self._inner.delete()


class DaytonaSandboxProvider(HostedServerProvider):
    """Runs a server in a sandbox of Daytona's, whose time to live is set anew while this process lives.

    Needs the extra `daytona`.

    Args:
        image: The sandbox's image, by its name in a registry.
        command: Words of the server's command. Daytona starts nothing of an image by itself.
        port: Where it listens; it is reached by a signed address, which is good for a day.
        env_vars: Environment variables of the sandbox.
        api_key: The account's key; by default DAYTONA_API_KEY. The sandbox never sees it.
        api_url: Where the service is; by default DAYTONA_API_URL, else Daytona's cloud.
        lease_s: Seconds after which the sandbox of a dead owner is ended, rounded up to minutes.
        start_timeout_s: Seconds until the sandbox must be there, and then until the server must be healthy.

    Raises:
        ConfigurationError: There is no key, or the client is not installed. `start` raises SandboxRefusedError where
            the service says no, SandboxServiceUnavailableError where it does not answer.
    """

    def __init__(
        self,
        image: str,
        *,
        command: Sequence[str],
        port: int = 8000,
        env_vars: Mapping[str, str] | None = None,
        api_key: str | None = None,
        api_url: str | None = None,
        lease_s: float = 60.0,
        start_timeout_s: float = 300.0,
    ) -> None:
        super().__init__(
            image,
            command=command,
            port=port,
            env_vars=env_vars,
            lease_s=lease_s,
            start_timeout_s=start_timeout_s,
        )
        with installed_with("daytona", "Daytona's client"):
            import daytona
        if not (key := api_key or os.environ.get("DAYTONA_API_KEY")):
            raise ConfigurationError("expected a key of Daytona's, got none; set DAYTONA_API_KEY")
        self._sdk = daytona
        self._client = daytona.Daytona(daytona.DaytonaConfig(api_key=key, api_url=api_url))

    def _create(self) -> HostedSandbox:
        params = self._sdk.CreateSandboxFromImageParams(
            image=self._template,
            env_vars=self._env_vars,
            ephemeral=True,
            auto_stop_interval=0,  # its time to live ends it, and nothing else
            ttl_minutes=math.ceil(self._lease_s / 60),
        )
        return _DaytonaSandbox(self._client.create(params, timeout=self._start_timeout_s))

    def _refusal(self, error: Exception) -> tuple[type[ProviderError], int | None] | None:
        sdk = self._sdk
        if isinstance(
            error, (sdk.DaytonaTimeoutError, sdk.DaytonaConnectionError, sdk.DaytonaServiceUnavailableError)
        ):
            return SandboxServiceUnavailableError, None
        return (SandboxRefusedError, error.status_code) if isinstance(error, sdk.DaytonaError) else None


class _ModalSandbox:
    def __init__(self, inner: Any) -> None:
        self._inner, self.sandbox_id = inner, str(inner.object_id)

    def run(self, command: str) -> None:
        """Do nothing: it is the sandbox's own command, as others would count as its use."""

    def url(self, port: int) -> str:
        return str(self._inner.tunnels()[port].url)

    def renew(self, lease_s: float, timeout_s: float) -> None:
        self._inner.exec("true", timeout=math.ceil(timeout_s)).wait()

    def running(self) -> bool:
        return self._inner.poll() is None

    def output(self) -> str:
        return str(self._inner.exec("cat", LOG, timeout=COMMAND_TIMEOUT_S).stdout.read())

    def kill(self) -> None:
        self._inner.terminate()


class ModalSandboxProvider(HostedServerProvider):
    """Runs a server in a sandbox of Modal's, which is used now and then while this process lives.

    Needs the extra `modal`. No time can be set anew there: Modal ends what nobody has used for `lease_s`, and all
    after a day.

    Args:
        image: The sandbox's image, by its name in a registry; it has Python.
        command: Words of the server's command.
        port: Where it listens; reached over a tunnel of Modal's, with TLS.
        env_vars: Environment variables of the sandbox.
        app: The app that sandboxes belong to; made where there is none.
        lease_s: Seconds after which the sandbox of a dead owner is ended, unless others use it.
        start_timeout_s: Seconds until the server must be healthy.

    Raises:
        ConfigurationError: The client is not installed. `start` raises SandboxRefusedError where the service says no,
            SandboxServiceUnavailableError where it does not answer.
    """

    def __init__(
        self,
        image: str,
        *,
        command: Sequence[str],
        port: int = 8000,
        env_vars: Mapping[str, str] | None = None,
        app: str = "ropewalk",
        lease_s: float = 60.0,
        start_timeout_s: float = 300.0,
    ) -> None:
        super().__init__(
            image,
            command=command,
            port=port,
            env_vars=env_vars,
            lease_s=lease_s,
            start_timeout_s=start_timeout_s,
        )
        with installed_with("modal", "Modal's client"):
            import modal
        self._sdk, self._app = modal, app

    def _create(self) -> HostedSandbox:
        sdk = self._sdk
        made = sdk.Sandbox.create(
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
        return _ModalSandbox(made)

    def _refusal(self, error: Exception) -> tuple[type[ProviderError], int | None] | None:
        errors = self._sdk.exception
        if isinstance(error, (errors.ConnectionError, errors.TimeoutError, errors.ServiceError)):
            return SandboxServiceUnavailableError, None
        known: list[tuple[Any, int | None]] = [
            (errors.AuthError, 401),
            (errors.PermissionDeniedError, 403),
            (errors.NotFoundError, 404),
            (errors.ResourceExhaustedError, 429),
            (errors.Error, None),
        ]
        return next(
            ((SandboxRefusedError, status) for kind, status in known if isinstance(error, kind)), None
        )
