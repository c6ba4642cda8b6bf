"""EnvClient: one session on an environment server."""

import inspect
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from openenv_core.client.session import ClientSession
from openenv_core.client.sync import SyncEnvClient
from openenv_core.errors import ConfigurationError
from openenv_core.providers.base import AnyProvider
from openenv_core.types import ActT, ObsT, StateT


class EnvClient(ClientSession[ActT, ObsT, StateT]):
    """A session on an environment server, for asyncio; `sync()` gives the same without.

    A subclass names its models and has nothing more to do:

        class BlackjackEnv(EnvClient[BlackjackAction, BlackjackObservation, BlackjackState]):
            action_type = BlackjackAction
            observation_type = BlackjackObservation
            state_type = BlackjackState
            default_app = "envs.blackjack_env.server.app:app"

    Requests of one client are sent one by one, whoever calls; a second caller waits for the first.
    A request that is cancelled, or that takes longer than `message_timeout_s`, leaves the session in order:
    its reply is read and dropped later. After a lost connection, `reset` opens a new session; `step` and
    `state` keep raising ConnectionLost.

    Args:
        base_url: Where the server is: http://, https://, ws:// or wss://. None with a provider, which
            starts the server when the client first connects.
        connect_timeout_s: Seconds until an attempt to connect is given up.
        message_timeout_s: Seconds that a reply may take; None waits for ever.
        max_message_size_mb: The longest message that is received, in 2^20 bytes.
        websocket_ping_interval_s: Seconds of silence until the server is asked whether it lives; None
            never asks.
        websocket_ping_timeout_s: Seconds until a missing answer to that breaks the connection.
        provider: Starts the server, and is stopped by `close`; see `openenv_core.providers.AnyProvider`.
        mode: "simulation", or "production" for servers that offer tools alone; by default what the
            environment variable OPENENV_CLIENT_MODE says, else "simulation". Tool clients heed it.
        headers: Further headers of the opening request, and of every request over plain HTTP.
        token: Sent as `Authorization: Bearer`.
        session_id: A standing session of the server to attach to. It is not this client's: `close` lets
            it stand.
        transport: "websocket", or "http" for servers that speak plain HTTP only, and for networks that
            let nothing else through. Over HTTP a session begins with the first `reset`.

    Raises:
        ConfigurationError: Neither a base_url nor a provider, or a setting that cannot be.
    """

    default_app: ClassVar[str | None] = None

    @classmethod
    def from_process(
        cls,
        app: str | None = None,
        *,
        env_vars: Mapping[str, str] | None = None,
        cwd: str | None = None,
        start_timeout_s: float = 60.0,
        **client_options: Any,
    ) -> SyncEnvClient[ActT, ObsT, StateT]:
        """Serve an app in a process of its own, for as long as the client is open.

        The server starts when the client is first used. The sync client that is returned can be awaited
        to the connected async one. A server that gets tokens by `env_vars` is used with the first of them.

        Args:
            app: `module:attribute` of the ASGI app; by default the class's `default_app`.
            env_vars: Environment variables of the server, beside this process's own but those of tokens.
            cwd: The server's working directory, which is importable there; this process's by default.
            start_timeout_s: Seconds until the server must be healthy.
            client_options: What the constructor takes.

        Raises:
            ConfigurationError: No app is named.
        """
        from openenv_core.providers.process import LocalProcessProvider

        target = app or cls.default_app
        if target is None:
            raise ConfigurationError(
                f'expected an app, got none; call {cls.__name__}.from_process("package.module:app") '
                "or set default_app on the class"
            )
        provider = LocalProcessProvider(target, env_vars=env_vars, cwd=cwd, start_timeout_s=start_timeout_s)
        headers = {name.lower() for name in client_options.get("headers") or ()}
        if (token := provider.token) is not None and "authorization" not in headers:
            client_options.setdefault("token", token)
        return cls(provider=provider, **client_options).sync()

    @classmethod
    def from_docker_image(
        cls, image: str, *, provider: AnyProvider | None = None, **options: Any
    ) -> SyncEnvClient[ActT, ObsT, StateT]:
        """Run an image of the local Docker engine for as long as the client is open.

        The container starts when the client is first used. The sync client that is returned can be awaited
        to the connected async one.

        Args:
            image: Name or id of the image. It is not pulled.
            provider: Starts the container in place of `LocalDockerProvider`: an object with
                `start_container(image, **options)`, `wait_for_ready(base_url)` and `stop_container()`, as
                released packages have it.
            options: What the constructor takes, and fields of `ContainerOptions`, or these together as
                `options=ContainerOptions(...)`.

        Raises:
            ConfigurationError: There is no such option, or a value that no engine could honour.
        """
        from openenv_core.providers.docker.imaged import provider_for

        known = inspect.signature(cls).parameters.keys() | inspect.signature(ClientSession).parameters.keys()
        of_client = known - {"base_url", "provider"}
        starter, client_options = provider_for(image, provider, options, of_client)
        return cls(provider=starter, **client_options).sync()

    @classmethod
    def from_env(
        cls, repo_id: str, *, use_docker: bool = True, provider: AnyProvider | None = None, **options: Any
    ) -> SyncEnvClient[ActT, ObsT, StateT]:
        """Run the image of a Hugging Face Space; see `from_docker_image`, which also says that it is not pulled.

        Args:
            repo_id: The Space, as `owner/name`.
            use_docker: The only way there is here.
            provider: Starts the container.
            options: As `from_docker_image` takes them.

        Raises:
            ConfigurationError: It is no Space's id, or is to run without a container.
        """
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
            raise ConfigurationError(f"expected a Space as 'owner/name', got {repo_id!r}")
        if not use_docker:
            raise ConfigurationError(
                f"expected use_docker=True, got False; git clone https://huggingface.co/spaces/{repo_id}, then "
                f"{cls.__name__}.from_process('FOLDER') serves it without a container"
            )
        image = f"registry.hf.space/{re.sub('[/._]', '-', repo_id).lower()}:latest"
        return cls.from_docker_image(image, provider=provider, **options)

    def sync(self) -> SyncEnvClient[ActT, ObsT, StateT]:
        """Return the same client for code without asyncio.

        Raises:
            ConfigurationError: The client is connected already, on an event loop that a sync caller lacks.
        """
        if self._carrier is not None:
            raise ConfigurationError(
                "expected sync() before the client connects, got it after; make a new client"
            )
        return SyncEnvClient(self)
