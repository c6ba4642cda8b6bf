"""EnvClient: a client with one session on an environment server; SyncEnvClient: the same without asyncio."""

import asyncio
import inspect
import re
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, ParamSpec, Self, TypeVar, cast

from openenv_core.client.carrier import SESSION_ENDED, CarrierOptions
from openenv_core.client.models import ClientModels
from openenv_core.client.replay import CLOSED, Journal
from openenv_core.client.settings import (
    named_parameters,
    space_label,
    validate_headers,
    validate_mode,
    validate_session_id,
    validate_transport,
    validate_url,
    validate_urls,
)
from openenv_core.client.waiting import SlotWait, try_servers
from openenv_core.errors import (
    CapacityError,
    ClientClosedError,
    ClientError,
    ConfigurationError,
    ConnectionFailedError,
    ConnectionLostError,
    EpisodeLostError,
    OpenEnvError,
    ProtocolError,
    ServerError,
)
from openenv_core.loop_thread import LoopThread, shared_loop, start_in_thread
from openenv_core.protocol.http import http_url, redact_url, websocket_url
from openenv_core.protocol.requests import encode_request
from openenv_core.providers.base import adapt_provider, describe_death
from openenv_core.tracing import EpisodeSpans, tracer
from openenv_core.types import ActT, ObsT, ResetResult, StateT, StepResult

if TYPE_CHECKING:
    from openenv_core.client.conversation import Conversation
    from openenv_core.client.vector import VectorClient
    from openenv_core.providers.base import AnyProvider, Provider

_NOT_SHARED = ("self", "__class__", "base_url", "provider", "session_id")  # by clients of the same server

T = TypeVar("T")
P = ParamSpec("P")


class EnvClient(ClientModels[ActT, ObsT, StateT]):
    """An asyncio client with one session on an environment server; `sync()` wraps it for code without asyncio.

    A subclass only names its models:

        class BlackjackEnv(EnvClient[BlackjackAction, BlackjackObservation, BlackjackState]):
            action_type = BlackjackAction
            observation_type = BlackjackObservation
            state_type = BlackjackState
            default_app = "envs.blackjack_env.server.app:app"

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

    default_app: ClassVar[str | None] = None

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
        self._client_settings = {name: value for name, value in locals().items() if name not in _NOT_SHARED}
        super().__init__()
        self._urls = validate_urls(base_url)
        self._base_url = self._urls[0] if self._urls else None
        self._provider = None if provider is None else adapt_provider(provider, started=base_url is not None)
        self._mode = validate_mode(mode)
        self._transport = validate_transport(transport)
        self._session_id = None if session_id is None else validate_session_id(session_id)
        self._timeout_s = message_timeout_s
        self._lease_s = lease_s
        self._options = CarrierOptions(
            connect_timeout_s=connect_timeout_s,
            max_message_bytes=int(max_message_size_mb * 1024 * 1024),
            ping_interval_s=websocket_ping_interval_s,
            ping_timeout_s=websocket_ping_timeout_s,
            headers=validate_headers(headers, token),
            queue_timeout_s=queue_timeout_s,
        )
        self._children: list[EnvClient[ActT, ObsT, StateT]] = []
        self._snapshot: str | None = None  # id of the snapshot that its first session starts from
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start_task: asyncio.Future[str] | None = None
        self._request_lock = asyncio.Lock()
        self._aborted: Conversation | None = None  # aborted, and perhaps not closed yet
        self._conversation: Conversation | None = None
        self._was_answered = False  # a request was answered in this session
        self._wait: SlotWait | None = None  # for a session
        self._lost_reason: str | None = None
        self._journal = Journal(attached=session_id is not None)
        self._closed = False
        self._spans = None if tracer() is None else EpisodeSpans()

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
        if self._conversation is not None:
            raise ConfigurationError(
                "the client is already connected, so sync() comes too late; make a new client"
            )
        return SyncEnvClient(self)

    def __repr__(self) -> str:
        address = "a server that it starts" if self._base_url is None else redact_url(self._base_url)
        how = "closed" if self._closed else "connected" if self.connected else "not connected"
        return f"<{type(self).__name__} {address}, {how}>"

    @property
    def base_url(self) -> str | None:
        """URL of the server, of several the one in use; None until the provider has started it."""
        return self._base_url

    @property
    def connected(self) -> bool:
        """Whether a session is open. A broken connection shows only at the next request."""
        return self._conversation is not None

    async def connect(self) -> Self:
        """Start the server if this client has a provider, and open a session if none is open.

        Raises:
            ClientClosedError: The client was closed.
            ConnectionFailedError: The server does not answer, or refuses this client.
            ProviderError: The server could not be started.
        """
        self._bind_loop()
        async with self._request_lock:
            if self._conversation is None:
                self._wait = None
                await self._find_session(fresh=self._journal.obstacle is not None)
        return self

    async def new_session(self) -> Self:
        """Return another client of this class, connected to the same server with the same settings.

        Closing this client closes it too.

        Raises:
            ConnectionFailedError: The server does not answer.
        """
        self._bind_loop()
        async with self._request_lock:
            await self._locate_server()
        return await self._connect_another()

    async def fork(self, count: int) -> list[Self]:
        """Return clients as `new_session` does, whose sessions start in this session's state: all, or none.

        Args:
            count: Number of clients.

        Raises:
            ServerError: The environment cannot be forked, or the server has no room for all of them.
        """
        from openenv_core.client.vector import VectorClient

        self._bind_loop()
        async with self._request_lock:
            if self._conversation is not None and self._conversation.error is not None:
                self._abort(str(self._conversation.error))
            self._wait = None
            conversation = self._conversation or await self._find_session(fresh=False)
            if not conversation.v1:
                raise ConfigurationError(
                    "expected a server of Ropewalk's over WebSocket, which alone has forks, got the released dialect"
                )
            return await VectorClient(conversation).fork_clients(count, self._connect_another)

    async def _connect_another(self, snapshot: str | None = None) -> Self:
        parameters = inspect.signature(type(self)).parameters
        accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        settings = {k: v for k, v in self._client_settings.items() if accepts_any or k in parameters}
        child = type(self)(base_url=self._urls if len(self._urls) > 1 else self._base_url, **settings)
        self._children = [*(known for known in self._children if not known._closed), child]
        if snapshot is not None:
            child._snapshot, child._urls, child._base_url = snapshot, self._urls, self._base_url
        try:
            return await child.connect()
        except BaseException:
            self._children = [known for known in self._children if known is not child]
            await child.close()
            raise

    async def vector(self, count: int) -> "VectorClient":
        """Open `count` sessions on the same server over one connection, for batched requests.

        The caller closes them; if this client runs the server, before closing this client.

        Args:
            count: Number of sessions, numbered from 0.

        Raises:
            CapacityError: The server had no room for all of them within `queue_timeout_s`; none was opened.
            ConnectionFailedError: The server does not answer, or speaks only the released dialect.
        """
        from openenv_core.client.vector import VectorClient

        self._bind_loop()
        async with self._request_lock:
            base_url = await self._locate_server()
        return await VectorClient.open(base_url, self._options, self._timeout_s, self._lease_s, count)

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
        return ResetResult(**vars(await self._play("reset", b"", options)))

    async def step(self, action: ActT) -> StepResult[ObsT]:
        """Apply an action and return its result.

        Raises:
            TypeError: The action has the wrong type.
            ServerError: The server refused the request, or the environment raised; the subclass tells which.
            RequestTimeoutError: No reply came in time; see `reset`. The step may still happen.
            EpisodeLostError: The connection broke, now or earlier, and the episode could not be replayed on another
                server; `reset` opens a new session.
        """
        return await self._play("step", encode_request("step", self._step_payload(action)))

    async def state(self) -> StateT:
        """Return the episode's state.

        Raises:
            OpenEnvError: As `step`.
        """
        return self._parse_state(await self._request(encode_request("state"), "state", read_only=True))

    async def disconnect(self) -> None:
        """End the session, aborting a request in progress. A later request opens a new session."""
        self._bind_loop()
        self._abort_request()
        try:
            async with self._request_lock:
                await self._close_session()
                self._lost_reason = None
        finally:
            self._journal.clear()

    async def close(self) -> None:
        """End the session, the clients of `new_session` and `fork`, and the provider's server. Idempotent."""
        self._closed = True
        try:
            self._bind_loop()
            if self._start_task is not None:
                self._start_task.cancel()
            self._abort_request()
            children, self._children = self._children, []
            await asyncio.gather(*(child.close() for child in children), return_exceptions=True)
            async with self._request_lock:
                await self._close_session()
        finally:
            await self._stop_provider()

    def __enter__(self) -> NoReturn:
        raise TypeError(
            f"expected `async with`, as {type(self).__name__} is for asyncio, got `with`; without asyncio write "
            f"`with {type(self).__name__}(...).sync() as env:`"
        )

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> Self:
        try:
            return await self.connect()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _play(
        self, kind: str, frame: bytes, reset: Mapping[str, Any] | None = None
    ) -> StepResult[ObsT]:
        """Send a reset or a step and return its result."""
        request = self._request(frame, "observation", reset=reset)
        payload = await (request if self._spans is None else self._spans.request(kind, request))
        result = self._parse_result(payload)
        if isinstance(result, StepResult) and result.metadata is None:
            result.metadata = payload.get("metadata")  # `_parse_result` of released subclasses may omit it
        return result

    async def _request(
        self, frame: bytes, expected: str, *, reset: Mapping[str, Any] | None = None, read_only: bool = False
    ) -> dict[str, Any]:
        """Send a frame, or a reset with these options, and return its reply's data; reads are not replayed."""
        if self._loop is not asyncio.get_running_loop():
            self._bind_loop()
        await (lock := self._request_lock).acquire()
        try:
            journal, losses = self._journal, 0
            self._wait = None if self._was_answered else SlotWait(self._options.queue_timeout_s)
            while True:
                conversation = self._conversation or await self._find_session(fresh=reset is not None)
                if journal.obstacle == CLOSED:  # while this request waited for the lock, or connected
                    raise ConnectionLostError(CLOSED)
                if (stuck := conversation.stuck) is not None:
                    if reset is None:
                        raise stuck
                    self._abort(str(stuck))
                    continue
                if reset is not None and not losses:
                    reset = journal.complete(reset, conversation.carrier.deterministic)
                    frame = encode_request("reset", reset)
                try:
                    data = await conversation.ask(frame, expected)
                except asyncio.CancelledError:  # the server may execute it nevertheless
                    if not read_only:
                        journal.record(frame, expected, conversation.last_call)
                    raise
                except ClientError as error:
                    if conversation.error is None and not isinstance(error, (*SESSION_ENDED, ProtocolError)):
                        if not read_only:
                            journal.record(frame, expected, conversation.last_call)
                        if losses and reset is not None and isinstance(error, ServerError):
                            self._abort(str(error))  # no episode began here; the last one is lost
                        raise
                    self._abort(str(error))
                    if isinstance(error, CapacityError) and self._wait is not None:  # was not executed
                        self._use_next_server()
                        await self._wait.pause(error, len(self._urls))
                        continue
                    losses += 1
                    lost = journal.record_loss(error, losses, len(self._urls), fresh=reset is not None)
                    if lost is not None:
                        self._lost_reason = str(lost)
                        raise await self._add_server_output(lost) from None
                    self._use_next_server()
                else:
                    self._was_answered = True
                    if reset is not None:
                        journal.record_reset(frame, conversation.last_call)
                    elif not read_only:
                        journal.record(frame, expected, conversation.last_call)
                    return data
        finally:
            lock.release()

    async def _find_session(self, *, fresh: bool) -> "Conversation":
        """Open a session. Unless `fresh` (a reset follows), replay the episode of a lost session in it."""
        self._wait = wait = self._wait or SlotWait(self._options.queue_timeout_s)
        if self._snapshot is not None:  # only this server has the snapshot, and a fork does not wait for room
            return await self._connect()
        journal, lost, use_next = self._journal, self._lost_reason, self._use_next_server
        if fresh or lost is None or self._closed:
            return await try_servers(self._urls, self._connect, use_next, wait)
        if journal.obstacle is not None:
            raise (ConnectionLostError if journal.attached else EpisodeLostError)(lost)
        retry_for_s = self._options.connect_timeout_s if self._provider is None else 0.0
        try:
            return await try_servers(self._urls, partial(self._replay, lost), use_next, wait, retry_for_s)
        except ClientError as error:
            if journal.obstacle is not None:
                raise ConnectionLostError(f"{CLOSED}; before, {lost}") from None
            known = isinstance(error, EpisodeLostError | CapacityError)
            reason = "" if known else f"no server was found to play it again on, within {retry_for_s:g} s: "
            journal.clear(f"{reason}{error}")
            self._lost_reason = f"{lost}. The episode is lost: {journal.obstacle}"
            raise await self._add_server_output(EpisodeLostError(self._lost_reason)) from error

    async def _replay(self, lost: str) -> "Conversation":
        """Replay the episode on the current server; raises ConnectionFailedError if another attempt may succeed."""
        try:
            conversation = await self._connect()
            if self._journal.obstacle is None:
                await self._journal.replay(conversation)
                return conversation
            raise ConnectionLostError(CLOSED)
        except BaseException as error:
            self._abort(lost)
            if not isinstance(error, ClientError) or isinstance(error, EpisodeLostError | CapacityError):
                raise
            if self._journal.obstacle is not None:
                raise EpisodeLostError(CLOSED) from None
            raise ConnectionFailedError(str(error)) from error

    def _bind_loop(self) -> None:
        """Bind the client to the running event loop; a session of an earlier loop, which has closed, is over."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None:
            if not self._loop.is_closed():
                raise ConfigurationError(
                    "expected every call of a client on one event loop, got a second loop; "
                    "make a client for each, or use sync() where there is no loop"
                )
            self._request_lock = asyncio.Lock()  # tasks of the old loop may still wait for the old lock
            self._start_task = None
            conversation = self._conversation or self._aborted
            if self._conversation is not None:
                self._journal.clear()
                self._drop(
                    "expected the event loop that the client connected on, but it has closed, and the session "
                    "with it; keep to one asyncio.run(), or use sync()"
                )
            if conversation is not None:
                conversation.carrier.abort_without_loop()  # or the server would keep the session and its slot
            self._aborted = conversation
        self._loop = loop

    async def _connect(self) -> "Conversation":
        """Open a session on the current server."""
        from openenv_core.client.conversation import Conversation, Opening, open_conversation

        await self._wait_aborted_closed()  # a server with a single slot has to release it first
        base_url = await self._locate_server()
        try:
            if self._transport == "websocket":
                url = websocket_url(base_url, self._session_id)
                snapshot, self._snapshot = self._snapshot, None
                assert self._wait is not None
                options = replace(self._options, queue_timeout_s=self._wait.attempt_s(len(self._urls)))
                notice = self._wait.start_notice
                opening = Opening(url, options, self._lease_s, notice, 1, snapshot, len(self._urls) != 1)
                # Wait for the open: the snapshot may be gone by the first request.
                conversation = await open_conversation(opening, self._timeout_s, wait=snapshot is not None)
            else:
                from openenv_core.client.http import open_http  # lazily: it imports httpx

                carrier = await open_http(http_url(base_url), self._session_id, self._options)
                conversation = Conversation(carrier, self._timeout_s)
        except ConnectionFailedError as error:
            raise await self._add_server_output(error) from error.__cause__
        self._conversation, self._lost_reason = conversation, None
        return conversation

    def _use_next_server(self) -> None:
        if self._urls:
            self._urls = [*self._urls[1:], self._urls[0]]
            self._base_url = self._urls[0]

    async def _locate_server(self) -> str:
        """Return the URL of the server, which the provider starts first if need be."""
        if self._closed:
            raise ClientClosedError("this client is closed; make a new one")
        if self._base_url is None:
            self._base_url = validate_url(await self._start(cast("Provider", self._provider)))
        return self._base_url

    async def _start(self, provider: "Provider") -> str:
        """Start the server in a thread. `close` cancels the wait; the provider's `stop` then ends the start."""
        self._start_task = starting = start_in_thread(provider.start)
        try:
            return await starting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._closed or task is None or task.cancelling():
                raise
            raise ClientClosedError(
                "expected a server to start, but the client was closed meanwhile; make a new client"
            ) from None
        finally:
            if self._start_task is starting:  # a later loop may have started another
                self._start_task = None

    async def _stop_provider(self) -> None:
        if self._provider is None:
            return
        try:
            stopping = asyncio.get_running_loop().run_in_executor(None, self._provider.stop)
        except RuntimeError:  # the interpreter is exiting, and starts no more threads
            self._provider.stop()
        else:
            await stopping

    async def _add_server_output(self, error: ClientError) -> ClientError:
        """Add the last output of the server's process, if the provider has it."""
        if self._provider is None or not isinstance(error, ConnectionFailedError | ConnectionLostError):
            return error
        output = await asyncio.to_thread(describe_death, self._provider)
        return type(error)(f"{error}{output}") if output else error

    def _drop(self, reason: str) -> "Conversation | None":
        """Detach the session's conversation and return it, so that the caller ends it."""
        self._was_answered = False
        conversation, self._conversation = self._conversation, None
        self._lost_reason = reason
        return conversation

    def _abort(self, reason: str) -> None:
        """End the session without waiting."""
        self._aborted = self._drop(reason)
        if self._aborted is not None:
            self._aborted.abort()

    def _abort_request(self) -> None:
        """Fail a request in progress: with ConnectionLostError, or CapacityError while it waits for a session."""
        if self._wait is not None:
            self._wait.stop()
        self._journal.clear(CLOSED)
        if self._request_lock.locked() and self._conversation is not None:
            self._conversation.abort()

    async def _wait_aborted_closed(self) -> None:
        aborted, self._aborted = self._aborted, None
        if aborted is not None:
            await aborted.carrier.close()

    async def _close_session(self) -> None:
        """Close the connection in order, if any; a session that this client owns is ended first."""
        await self._wait_aborted_closed()
        if self._spans is not None:
            self._spans.end()
        if (conversation := self._drop("the session was closed")) is not None:
            await conversation.close(end_session=self._session_id is None)


class SyncEnvClient(Generic[ActT, ObsT, StateT]):
    """An `EnvClient` for code without asyncio.

    Methods run those of the async client and wait for them; other attributes, such as methods that a subclass adds,
    are forwarded likewise. Awaiting an unused sync client, or entering it by `async with`, gives the connected async
    client.

    Args:
        client: The async client, which this object owns from now on.
    """

    def __init__(self, client: EnvClient[ActT, ObsT, StateT]) -> None:
        self._client = client
        self._thread: LoopThread | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._closed = False
        self._thread_lock = threading.Lock()
        self._parent: SyncEnvClient[ActT, ObsT, StateT] | None = None  # keeps it alive: its end ends this

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
        """The async client; it runs in the shared loop thread."""
        return self._client

    def connect(self) -> Self:
        """Start the server if this client has a provider, and open a session; see `EnvClient.connect`."""
        self._run(self._client.connect)
        return self

    def reset(self, **options: Any) -> StepResult[ObsT]:
        """Start an episode; see `EnvClient.reset`."""
        return self._run(self._client.reset, **options)

    def step(self, action: ActT) -> StepResult[ObsT]:
        """Apply an action; see `EnvClient.step`."""
        return self._run(self._client.step, action)

    def state(self) -> StateT:
        """Return the episode's state; see `EnvClient.state`."""
        return self._run(self._client.state)

    def disconnect(self) -> None:
        """End the session; see `EnvClient.disconnect`."""
        self._run(self._client.disconnect)

    def close(self) -> None:
        """End the session and the provider's server; see `EnvClient.close`. Idempotent.

        In a forked child of the process that used the client this does nothing: both belong to the parent.
        """
        if self._closed:
            return
        self._closed = True
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._thread is None or not self._thread.is_forked:
            self._run(self._client.close)

    def new_session(self) -> "SyncEnvClient[ActT, ObsT, StateT]":
        """Return another client on the same server; see `EnvClient.new_session`."""
        return self._make_child(self._run(self._client.new_session))

    def fork(self, count: int) -> "list[SyncEnvClient[ActT, ObsT, StateT]]":
        """Return other clients that start in this session's state; see `EnvClient.fork`."""
        return [self._make_child(child) for child in self._run(self._client.fork, count)]

    def _make_child(self, client: EnvClient[ActT, ObsT, StateT]) -> "SyncEnvClient[ActT, ObsT, StateT]":
        child = SyncEnvClient(client)
        child._parent = self
        child._start_thread()
        return child

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
        if self._thread is not None:
            raise ConfigurationError("the client is already in use, so await comes too late; make a new one")
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
            return (self._thread or self._start_thread()).run(work, *args, **options)
        except OpenEnvError as error:
            # Frames of the loop thread would bury the caller's.
            raise error.with_traceback(None) from error.__cause__

    def _start_thread(self) -> LoopThread:
        with self._thread_lock:
            if self._thread is None:
                self._thread = shared_loop()
                # Release the session of a client that is garbage-collected unclosed. At the interpreter's exit the
                # connection closes by itself.
                self._finalizer = weakref.finalize(self, self._thread.call_detached, self._client.close)
                self._finalizer.atexit = False
        return self._thread
