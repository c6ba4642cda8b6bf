"""EnvClient: one session on an environment server; its sync face; GenericEnvClient, with dicts for models."""

import inspect
import re
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Mapping
from functools import partial
from typing import Any, ClassVar, Generic, ParamSpec, Self, TypeAlias, TypeVar

from openenv_core.client.session import ClientSession
from openenv_core.errors import ConfigurationError, OpenEnvError
from openenv_core.loop_thread import LoopThread, shared_loop
from openenv_core.providers.base import AnyProvider
from openenv_core.types import ActT, ObsT, StateT, StepResult

T = TypeVar("T")
P = ParamSpec("P")


class SyncEnvClient(Generic[ActT, ObsT, StateT]):
    """An `EnvClient` for code without asyncio.

    Methods are those of the async client, awaited; what is not spelled out here (methods that a subclass
    adds, for one) is passed through in the same way. Awaiting an unused sync client gives the async one,
    connected, and `async with` does so too.

    Args:
        client: The async client. It belongs to this object from now on.
    """

    def __init__(self, client: ClientSession[ActT, ObsT, StateT]) -> None:
        self._client = client
        self._thread: LoopThread | None = None
        self._dropped: weakref.finalize[..., Any] | None = None
        self._closed = False
        self._first_use = threading.Lock()
        self._parent: SyncEnvClient[ActT, ObsT, StateT] | None = None  # with whose end this one's comes

    def __repr__(self) -> str:
        return f"{self._client!r}.sync()"

    @property
    def base_url(self) -> str:
        """Where the server is. Connects first, where a provider has yet to start it."""
        if self._client.base_url is None:
            self.connect()
        url = self._client.base_url
        assert url is not None
        return url

    @property
    def _base_url(self) -> str:
        return self.base_url

    @property
    def async_client(self) -> ClientSession[ActT, ObsT, StateT]:
        """The client that this one waits for, by its name in the released package. It is used by the shared thread."""
        return self._client

    def connect(self) -> Self:
        """Start the server if that is this client's to do, and open a session."""
        self._run(self._client.connect)
        return self

    def reset(self, **options: Any) -> StepResult[ObsT]:
        """Start an episode; see `EnvClient.reset`."""
        return self._run(self._client.reset, **options)

    def step(self, action: ActT) -> StepResult[ObsT]:
        """Apply an action; see `EnvClient.step`."""
        return self._run(self._client.step, action)

    def state(self) -> StateT:
        """Return where the episode stands; see `EnvClient.state`."""
        return self._run(self._client.state)

    def disconnect(self) -> None:
        """End the session; see `EnvClient.disconnect`."""
        self._run(self._client.disconnect)

    def close(self) -> None:
        """End the session, and the server if this client's provider started it. Idempotent.

        In a fork of the process that has used the client, both are left to that process.
        """
        if self._closed:
            return
        self._closed = True
        if self._dropped is not None:
            self._dropped.detach()
        if self._thread is None or not self._thread.inherited:
            self._run(self._client.close)

    def new_session(self) -> "SyncEnvClient[ActT, ObsT, StateT]":
        """Return another client on the same server; see `EnvClient.new_session`."""
        other = SyncEnvClient(self._run(self._client.new_session))
        other._parent = self
        other._begin()
        return other

    def sync(self) -> Self:
        """Return this client, which is sync already."""
        return self

    def __enter__(self) -> Self:
        try:
            return self.connect()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> ClientSession[ActT, ObsT, StateT]:
        return await self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    def __await__(self) -> Generator[Any, None, ClientSession[ActT, ObsT, StateT]]:
        if self._thread is not None:
            raise ConfigurationError(
                "expected await before a client's first use, got it after; make a new one"
            )
        return self._client.__aenter__().__await__()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._client, name)
        if not inspect.iscoroutinefunction(value):
            return value
        return partial(self._run, value)

    def _run(self, work: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **options: P.kwargs) -> T:
        try:
            return (self._thread or self._begin()).run(work, *args, **options)
        except OpenEnvError as error:
            # Its traceback leads through the thread, and hides where the caller stands.
            raise error.with_traceback(None) from error.__cause__

    def _begin(self) -> LoopThread:
        with self._first_use:
            if self._thread is None:
                self._thread = shared_loop()
                # A client that is dropped without close() gives its session back all the same. At the end of the
                # interpreter it goes by itself.
                self._dropped = weakref.finalize(self, self._thread.leave, self._client.close)
                self._dropped.atexit = False
        return self._thread


def space_label(repo_id: str) -> str:
    """Return what a Space, `owner/name`, is called in host names and in the names of images."""
    return re.sub("[/._]", "-", repo_id).lower()


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
    `state` keep raising ConnectionLostError.

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
        from openenv_core.providers.docker.container import provider_for

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
        image = f"registry.hf.space/{space_label(repo_id)}:latest"
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


Json: TypeAlias = dict[str, Any]


class GenericAction(dict[str, Any]):
    """An action by its fields: `GenericAction(code="1 + 1")` is the dict `{"code": "1 + 1"}`."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)

    def __repr__(self) -> str:
        return f"GenericAction({', '.join(f'{name}={value!r}' for name, value in self.items())})"


class GenericEnvClient(EnvClient[Json, Json, Json]):
    """A client without the environment's models: actions, observations and states are dicts."""

    def _step_payload(self, action: Json) -> Json:
        if not isinstance(action, Mapping):
            raise TypeError(f"expected a dict of the action's fields, got {type(action).__name__}")
        return dict(action)

    def _parse_result(self, payload: Json) -> StepResult[Json]:
        return StepResult(
            payload.get("observation") or {},
            payload.get("reward"),
            payload.get("done", False),
            payload.get("metadata"),
        )

    def _parse_state(self, payload: Json) -> Json:
        return payload
