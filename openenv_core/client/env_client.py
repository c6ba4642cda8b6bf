"""EnvClient: a client with one session on an environment server; SyncEnvClient: the same without asyncio."""

import asyncio
import inspect
import re
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, Self, TypeVar, cast

from pydantic import ValidationError

from openenv_core.client.servers import Servers
from openenv_core.client.session import ClientSession, Open, TracedSession
from openenv_core.client.settings import (
    ClientSettings,
    named_parameters,
    space_label,
    validate_session_id,
    validate_urls,
)
from openenv_core.errors import ConfigurationError, OpenEnvError, ProtocolError
from openenv_core.loop_thread import LoopThread, shared_loop
from openenv_core.protocol.frames import encode_request
from openenv_core.protocol.http import redact_url
from openenv_core.protocol.jsonio import reader
from openenv_core.providers.base import adapt_provider
from openenv_core.tracing import tracer
from openenv_core.types import Action, ActT, ObsT, ResetResult, State, StateT, StepResult

if TYPE_CHECKING:
    from openenv_core.client.vector import VectorClient
    from openenv_core.providers.base import AnyProvider

T = TypeVar("T")
P = ParamSpec("P")


class _NotAwaited(Coroutine[Any, Any, T]):
    """A call of a client's method that is to be awaited; its result's attributes are refused with a hint."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self.__qualname__ = getattr(coroutine, "__qualname__", "")  # for the name of a task

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"expected a result that has .{name}, got a coroutine, since an event loop runs here, as in a notebook; "
            "`await` the call, or take the client's .sync(), whose calls wait",
            name=name,
            obj=self,
        )


def waits_without_loop(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Have an async method of an `EnvClient` return its result where no event loop runs, as the released client does.

    There the coroutine runs in the shared loop thread, as with `sync()`. The annotation stays that of the coroutine.
    """

    @wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> Any:
        client = cast("EnvClient[Any, Any, Any]", args[0])
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return client._run(method, *args, **options)
        coroutine = method(*args, **options)
        return coroutine if client._session.loop is loop else _NotAwaited(coroutine)

    call._waits_without_loop = True  # type: ignore[attr-defined]
    return call


class EnvClient(Generic[ActT, ObsT, StateT]):
    """A client with one session on an environment server, for asyncio and for code without it.

    Where an event loop runs, its methods are coroutines. Where none runs, they wait and return the result, as those of
    the released client do: `env.reset()`, `with env:`. `sync()` returns a wrapper whose methods always wait, which type
    checkers and notebooks need.

    A subclass only names its models:

        class BlackjackEnv(EnvClient[BlackjackAction, BlackjackObservation, BlackjackState]):
            action_type = BlackjackAction
            observation_type = BlackjackObservation
            state_type = BlackjackState
            default_app = "envs.blackjack_env.server.app:app"

    Released subclasses override `_step_payload`, `_parse_result` and `_parse_state` instead.

    Requests of one client are sent one at a time; concurrent callers wait their turn. A request that is cancelled, or
    exceeds `message_timeout_s`, leaves the session usable: its late reply is dropped. If the server dies and the
    environment declares itself deterministic, the episode is replayed and continued on another server; otherwise
    EpisodeLostError is raised until `reset` opens a new session.

    Args:
        base_url: URL of the server: http://, https://, ws:// or wss://. Of several URLs of equal servers each client
            picks one at random, and tries the others if that one fails. None with a provider, which starts the
            server when the client first connects.
        connect_timeout_s: Deadline in seconds of an attempt to connect.
        message_timeout_s: Reply timeout in seconds; None waits for ever.
        max_message_size_mb: Size limit of a received message, in 2^20 bytes.
        websocket_ping_interval_s: Seconds of silence after which a ping is sent; None sends none.
        websocket_ping_timeout_s: Seconds without an answer to a ping after which the connection is lost.
        provider: Starts the server, and is stopped by `close`; see `openenv_core.providers.AnyProvider`.
        mode: "simulation", or "production" for servers that offer only tools; defaults to the environment variable
            OPENENV_CLIENT_MODE, else "simulation". Only tool clients use it.
        headers: Extra headers of the WebSocket handshake, and of every request over plain HTTP.
        token: Sent as `Authorization: Bearer`.
        session_id: Id of a standing session to attach to. This client does not own it: `close` leaves it open.
        lease_s: Seconds for which a session outlives a broken connection and this client tries to resume it; 0: none.
        transport: "websocket", or "http" for servers and networks without WebSockets. Over HTTP a session begins
            with the first `reset`.
        queue_timeout_s: Seconds the first request waits for a session of a full server; 0: CapacityError at once.

    Raises:
        ConfigurationError: Neither a base_url nor a provider was given, or a setting is invalid.
    """

    action_type: type[ActT]
    observation_type: type[ObsT]
    state_type: type[StateT]
    default_app: ClassVar[str | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Have overridden methods, too, wait where no event loop runs."""
        super().__init_subclass__(**options)
        for name, value in list(vars(cls).items()):
            known = getattr(super(cls, cls), name, None)
            if inspect.iscoroutinefunction(value) and hasattr(known, "_waits_without_loop"):
                setattr(cls, name, waits_without_loop(value))

    def __init__(
        self,
        base_url: str | Sequence[str] | None = None,
        connect_timeout_s: float = 10.0,
        message_timeout_s: float | None = 60.0,
        max_message_size_mb: float = 100.0,
        websocket_ping_interval_s: float | None = 20.0,
        websocket_ping_timeout_s: float | None = 20.0,
        provider: "AnyProvider | None" = None,
        mode: str | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        token: str | None = None,
        session_id: str | None = None,
        lease_s: float = 30.0,
        transport: str = "websocket",
        queue_timeout_s: float = 1800.0,
    ) -> None:
        """Make a client with the arguments of the class, among them the mode, "simulation" or "production"."""
        if base_url is None and provider is None:
            raise ConfigurationError("neither base_url nor provider is given; pass the server's URL")
        settings = ClientSettings(
            connect_timeout_s=connect_timeout_s,
            message_timeout_s=message_timeout_s,
            max_message_size_mb=max_message_size_mb,
            websocket_ping_interval_s=websocket_ping_interval_s,
            websocket_ping_timeout_s=websocket_ping_timeout_s,
            mode=mode,
            headers=headers,
            token=token,
            lease_s=lease_s,
            transport=transport,
            queue_timeout_s=queue_timeout_s,
        )
        servers = Servers(
            validate_urls(base_url),
            None if provider is None else adapt_provider(provider, started=base_url is not None),
            settings.request_headers,
        )
        session_id = None if session_id is None else validate_session_id(session_id)
        # Decided once, so that a step without tracing does not ask.
        kind = ClientSession if tracer() is None else TracedSession
        self._session = kind(settings, servers, session_id)
        self._parent: EnvClient[ActT, ObsT, StateT] | None = None  # keeps it alive: its end ends this client
        observation_type = getattr(self, "observation_type", None)
        self._read_observation = None if observation_type is None else reader(observation_type)
        self._read_state = reader(getattr(self, "state_type", None) or State)
        self._thread: LoopThread | None = None  # runs it where no loop runs
        self._thread_lock = threading.Lock()
        self._finalizer: weakref.finalize[..., Any] | None = None

    @classmethod
    def from_process(
        cls,
        app: str | None = None,
        *,
        env_vars: Mapping[str, str] | None = None,
        cwd: str | None = None,
        start_timeout_s: float = 60.0,
        **client_options: Any,
    ) -> "SyncEnvClient[ActT, ObsT, StateT]":
        """Serve an app in a separate process while the client is open.

        The server starts when the client is first used. Awaiting the returned sync client gives the connected async
        one. If `env_vars` sets tokens for the server, the client uses the first of them.

        Args:
            app: `module:attribute` of the ASGI app; defaults to the class's `default_app`.
            env_vars: Extra environment variables of the server, which inherits this process's except for tokens.
            cwd: The server's working directory, importable there; defaults to this process's.
            start_timeout_s: Deadline in seconds for the server to become healthy.
            client_options: Arguments of the constructor.

        Raises:
            ConfigurationError: There is neither an `app` nor a `default_app`.
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
        cls, image: str, provider: "AnyProvider | None" = None, **options: Any
    ) -> "SyncEnvClient[ActT, ObsT, StateT]":
        """Run an image on the local Docker engine while the client is open.

        The container starts when the client is first used. Awaiting the returned sync client gives the connected
        async one.

        Args:
            image: Name or id of the image. It is not pulled.
            provider: Starts the container in place of `LocalDockerProvider`: an object with `start_container(image,
                **options)`, `wait_for_ready(base_url)` and `stop_container()`, as in released packages.
            options: Arguments of the constructor, and fields of `ContainerOptions`, one by one or as
                `options=ContainerOptions(...)`.

        Raises:
            ConfigurationError: An option is unknown, or has a value that no engine supports.
        """
        from openenv_core.providers.docker.container import provider_for

        known = named_parameters(cls) | named_parameters(EnvClient)
        starter, client_options = provider_for(image, provider, options, known - {"base_url", "provider"})
        return cls(provider=starter, **client_options).sync()

    @classmethod
    def from_env(
        cls, repo_id: str, *, use_docker: bool = True, provider: "AnyProvider | None" = None, **options: Any
    ) -> "SyncEnvClient[ActT, ObsT, StateT]":
        """Run the image of a Hugging Face Space; see `from_docker_image`. The image is not pulled.

        Args:
            repo_id: The Space, as `owner/name`.
            use_docker: Must be True: a Space runs only in a container.
            provider: Starts the container; see `from_docker_image`.
            options: See `from_docker_image`.

        Raises:
            ConfigurationError: `repo_id` is malformed, or `use_docker` is False.
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

    def sync(self) -> "SyncEnvClient[ActT, ObsT, StateT]":
        """Wrap this client for code without asyncio.

        Raises:
            ConfigurationError: The client is already connected on an event loop, which a sync caller does not run.
        """
        if self._thread is None and self.connected:
            raise ConfigurationError(
                "the client is already connected, so sync() comes too late; make a new client"
            )
        return SyncEnvClient(self)

    def __repr__(self) -> str:
        address = "a server that it starts" if self.base_url is None else redact_url(self.base_url)
        how = "closed" if self.closed else "connected" if self.connected else "not connected"
        return f"<{type(self).__name__} {address}, {how}>"

    @property
    def base_url(self) -> str | None:
        """URL of the server, of several the one in use; None until the provider has started it."""
        return self._session.servers.url

    _base_url = base_url

    @property
    def _mode(self) -> str | None:
        return self._session.settings.mode

    @property
    def connected(self) -> bool:
        """Whether a session is open. A broken connection shows only at the next request."""
        return isinstance(self._session.state, Open)

    @property
    def closed(self) -> bool:
        """Whether the client was closed. It cannot be used again."""
        return self._session.closed

    @waits_without_loop
    async def connect(self) -> Self:
        """Start the server if this client has a provider, and open a session if none is open.

        Raises:
            ClientClosedError: The client was closed.
            ConnectionFailedError: The server does not answer, or refuses this client.
            ProviderError: The server could not be started.
        """
        await self._session.connect()
        return self

    @waits_without_loop
    async def new_session(self) -> Self:
        """Return another client of this class, connected to the same server with the same settings.

        Closing this client closes it too.

        Raises:
            ConnectionFailedError: The server does not answer.
        """
        await self._session.locate()
        return await self._connect_another()

    @waits_without_loop
    async def fork(self, count: int) -> list[Self]:
        """Return clients as `new_session` does, whose sessions start in this session's state: all, or none.

        Args:
            count: Number of clients.

        Raises:
            ServerError: The environment cannot be forked, or the server has no room for all of them.
        """
        return await self._session.fork(count, self._connect_another)

    async def _connect_another(self, snapshot: str | None = None) -> Self:
        session = self._session
        urls = session.servers.urls
        child = type(self)(
            base_url=urls if len(urls) > 1 else session.servers.url,
            **session.settings.arguments_of(type(self)),
        )
        child._parent = self
        session.add_child(child._session, snapshot)
        if self._thread is not None:
            child._use_thread()
        try:
            return await child.connect()
        except BaseException:
            await child.close()
            raise

    async def vector(self, count: int) -> "VectorClient":
        """Open `count` sessions on the same server over one connection, for batched requests with asyncio.

        The caller closes them; if this client runs the server, before closing this client.

        Args:
            count: Number of sessions, numbered from 0.

        Raises:
            CapacityError: The server had no room for all of them within `queue_timeout_s`; none was opened.
            ConnectionFailedError: The server does not answer, or speaks only the released dialect.
        """
        from openenv_core.client.vector import VectorClient

        return await VectorClient.open(await self._session.locate(), self._session.settings, count)

    @waits_without_loop
    async def reset(self, **options: Any) -> StepResult[ObsT]:
        """Start an episode; the result also unpacks as `observation, info` (`ResetResult`).

        Args:
            options: `seed`, `episode_id` and other arguments of the environment's `reset`.

        Raises:
            ServerError: The server refused the request, or the environment raised; the subclass tells which.
            RequestTimeoutError: No reply came in time. The session lives on; the next request waits for this one.
            ConnectionLostError: The connection broke before the reply.
            ConnectionFailedError: No connection could be made.
        """
        payload = await self._session.request(b"", "observation", reset=options)
        result = self._parse_result(payload)
        _add_metadata(result, payload)
        if type(result) is not StepResult:  # from the hook of a subclass
            return result
        return ResetResult(result.observation, result.reward, result.done, result.metadata)

    @waits_without_loop
    async def step(self, action: ActT) -> StepResult[ObsT]:
        """Apply an action and return its result.

        Raises:
            TypeError: The action has the wrong type.
            ServerError: The server refused the request, or the environment raised; the subclass tells which.
            RequestTimeoutError: No reply came in time; see `reset`. The step may still happen.
            EpisodeLostError: The connection broke, now or earlier, and the episode could not be replayed on another
                server; `reset` opens a new session.
        """
        frame = encode_request("step", self._step_payload(action))
        payload = await self._session.request(frame, "observation")
        result = self._parse_result(payload)
        if "metadata" in payload:
            _add_metadata(result, payload)
        return result

    @waits_without_loop
    async def step_seats(self, actions: Mapping[str, ActT]) -> StepResult[ObsT]:
        """Act for several seats of the session at once, in one request; see docs/players.md.

        Args:
            actions: An action for each of these seats, whose turn it is: `result.metadata["turn"]` has them.

        Raises:
            ValidationFailedError: It is not the turn of one of the seats, or an action is not allowed.
            OpenEnvError: As `step`.
        """
        data = {"seats": {seat: self._step_payload(action) for seat, action in actions.items()}}
        payload = await self._session.request(encode_request("step", data), "observation")
        result = self._parse_result(payload)
        _add_metadata(result, payload)
        return result

    @waits_without_loop
    async def state(self) -> StateT:
        """Return the episode's state.

        Raises:
            OpenEnvError: As `step`.
        """
        frame = encode_request("state")
        return self._parse_state(await self._session.request(frame, "state", read_only=True))

    @waits_without_loop
    async def disconnect(self) -> None:
        """End the session, aborting a request in progress. A later request opens a new session."""
        await self._session.disconnect()

    @waits_without_loop
    async def close(self) -> None:
        """End the session, the clients of `new_session` and `fork`, and the provider's server. Idempotent.

        In a forked child of the process that used the client without an event loop this does nothing: all of them
        belong to the parent.
        """
        try:
            await self._session.close()
        finally:
            if self._finalizer is not None:
                self._finalizer.detach()

    def __enter__(self) -> Self:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            raise TypeError(
                f"expected `async with`, as an event loop runs here, got `with`; to wait without asyncio (in a "
                f"notebook, too) write `with {type(self).__name__}(...).sync() as env:`"
            )
        try:
            self._run(self.connect)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self.close)

    async def __aenter__(self) -> Self:
        try:
            return await self.connect()
        except GeneratorExit:  # its loop has closed, and this is garbage collection, which must not wait
            raise
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Hooks of released subclasses

    def _step_payload(self, action: ActT) -> Any:
        """Return the data of a step frame: a model, or a dict of the action's fields."""
        expected = getattr(self, "action_type", Action)
        if not isinstance(action, (expected, Mapping)):
            raise TypeError(
                f"expected {expected.__name__} or a dict of its fields, got {type(action).__name__}; "
                f"pass {expected.__name__}(...)"
            )
        return action

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[ObsT]:
        """Decode the data of an observation frame."""
        fields = payload.get("observation")
        read = self._read_observation
        if not isinstance(fields, dict) or read is None:
            raise self._unreadable("observation", payload, None)
        reward = fields["reward"] = payload.get("reward")
        done = fields["done"] = payload.get("done", False)
        try:
            return StepResult(read(fields), reward, done, payload.get("metadata"))
        except ValidationError as error:
            raise self._unreadable("observation", payload, error) from error

    def _parse_state(self, payload: dict[str, Any]) -> StateT:
        """Decode the data of a state frame."""
        try:
            return cast(StateT, self._read_state(payload))
        except ValidationError as error:
            raise self._unreadable("state", payload, error) from error

    def _unreadable(self, kind: str, payload: object, error: ValidationError | None) -> ProtocolError:
        expected = getattr(self, f"{kind}_type", None)
        if expected is None:
            return ProtocolError(
                f"expected {kind}_type on {type(self).__name__}, got none; set it to the model"
            )
        return ProtocolError(
            f"expected {expected.__name__} from the server, got {str(payload)[:200]}"
            f"{f': {error}' if error else ''}; check that client and server have the same version"
        )

    # Without an event loop

    def _run(self, work: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **options: P.kwargs) -> T:
        """Call a coroutine function in the shared loop thread and wait for its result."""
        thread = self._thread or self._use_thread()
        if thread.is_forked and getattr(work, "__name__", "") == "close":
            return cast(T, None)  # all that it would end belongs to the parent process
        try:
            return thread.run(work, *args, **options)
        except OpenEnvError as error:
            # Frames of the loop thread would bury the caller's.
            raise error.with_traceback(None) from error.__cause__

    def _use_thread(self) -> LoopThread:
        with self._thread_lock:
            if self._thread is None:
                self._thread = shared_loop()
                # Release the session of a client that is garbage-collected unclosed. At the interpreter's exit the
                # connection closes by itself.
                close = self._session.close
                self._finalizer = weakref.finalize(self, self._thread.call_detached, close)
                self._finalizer.atexit = False
        return self._thread


def _add_metadata(result: Any, payload: Mapping[str, Any]) -> None:
    """Add the metadata to a result, which `_parse_result` of released subclasses may omit."""
    if isinstance(result, StepResult) and result.metadata is None:
        result.metadata = payload.get("metadata")


class SyncEnvClient(Generic[ActT, ObsT, StateT]):
    """An `EnvClient` whose methods wait, also where an event loop runs.

    Other attributes, such as methods that a subclass adds, are forwarded; coroutine functions wait too. Awaiting an
    unused sync client, or entering it by `async with`, gives the connected async client.

    Args:
        client: The client, which this object owns from now on.
    """

    def __init__(self, client: EnvClient[ActT, ObsT, StateT]) -> None:
        self._client = client

    def __repr__(self) -> str:
        return f"{self._client!r}.sync()"

    @property
    def base_url(self) -> str:
        """URL of the server. Connects first if a provider has yet to start it."""
        if self._client.base_url is None:
            self.connect()
        return cast(str, self._client.base_url)

    _base_url = base_url

    @property
    def async_client(self) -> EnvClient[ActT, ObsT, StateT]:
        """The client; it runs in the shared loop thread."""
        return self._client

    def connect(self) -> Self:
        """Start the server if this client has a provider, and open a session; see `EnvClient.connect`."""
        self._client._run(self._client.connect)
        return self

    def reset(self, **options: Any) -> StepResult[ObsT]:
        """Start an episode; see `EnvClient.reset`."""
        return self._client._run(self._client.reset, **options)

    def step(self, action: ActT) -> StepResult[ObsT]:
        """Apply an action; see `EnvClient.step`."""
        return self._client._run(self._client.step, action)

    def step_seats(self, actions: Mapping[str, ActT]) -> StepResult[ObsT]:
        """Act for several seats at once; see `EnvClient.step_seats`."""
        return self._client._run(self._client.step_seats, actions)

    def state(self) -> StateT:
        """Return the episode's state; see `EnvClient.state`."""
        return self._client._run(self._client.state)

    def disconnect(self) -> None:
        """End the session; see `EnvClient.disconnect`."""
        self._client._run(self._client.disconnect)

    def close(self) -> None:
        """End the session and the provider's server; see `EnvClient.close`. Idempotent."""
        self._client._run(self._client.close)

    def new_session(self) -> "SyncEnvClient[ActT, ObsT, StateT]":
        """Return another client on the same server; see `EnvClient.new_session`."""
        return self._client._run(self._client.new_session).sync()

    def fork(self, count: int) -> "list[SyncEnvClient[ActT, ObsT, StateT]]":
        """Return other clients that start in this session's state; see `EnvClient.fork`."""
        return [child.sync() for child in self._client._run(self._client.fork, count)]

    def sync(self) -> Self:
        """Return this client."""
        return self

    def __enter__(self) -> Self:
        try:
            return self.connect()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> EnvClient[ActT, ObsT, StateT]:
        return await self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    def __await__(self) -> Generator[Any, None, EnvClient[ActT, ObsT, StateT]]:
        if self._client._thread is not None:
            raise ConfigurationError("the client is already in use, so await comes too late; make a new one")
        return self._client.__aenter__().__await__()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._client, name)
        if inspect.iscoroutinefunction(value) or hasattr(value, "_waits_without_loop"):
            return partial(self._client._run, value)
        return value
