"""One session on an environment server: requests in order over one socket, models in and out."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, cast
from urllib.parse import urlsplit, urlunsplit

from pydantic import ValidationError

from openenv_core.client.socket import Socket, SocketOptions, open_socket
from openenv_core.errors import (
    CapacityReached,
    ClientClosed,
    ConfigurationError,
    ConnectionLost,
    FactoryFailed,
    ProtocolError,
    RequestTimeout,
    SessionFailed,
)
from openenv_core.protocol.jsonio import reader
from openenv_core.protocol.replies import decode_reply
from openenv_core.protocol.requests import encode_request
from openenv_core.types import Action, ActT, ObsT, State, StateT, StepResult
from openenv_core.watchdog import Watchdog

if TYPE_CHECKING:
    from openenv_core.providers.base import Provider

_SESSION_ENDED = (CapacityReached, FactoryFailed, SessionFailed)


class ClientSession(Generic[ActT, ObsT, StateT]):
    """All of `EnvClient` but the ways to make one; see there. Its sync face needs to know no more."""

    action_type: type[ActT]
    observation_type: type[ObsT]
    state_type: type[StateT]

    def __init__(
        self,
        base_url: str | None = None,
        connect_timeout_s: float = 10.0,
        message_timeout_s: float | None = 60.0,
        max_message_size_mb: float = 100.0,
        websocket_ping_interval_s: float | None = 20.0,
        websocket_ping_timeout_s: float | None = 20.0,
        provider: "Provider | None" = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if base_url is None and provider is None:
            raise ConfigurationError("expected a base_url or a provider, got neither; pass the server's URL")
        self._base_url = base_url
        self._ws_url = None if base_url is None else websocket_url(base_url)
        self._provider = provider
        self._message_timeout_s = message_timeout_s
        self._options = SocketOptions(
            connect_timeout_s=connect_timeout_s,
            max_message_bytes=int(max_message_size_mb * 1e6),
            ping_interval_s=websocket_ping_interval_s,
            ping_timeout_s=websocket_ping_timeout_s,
            headers=dict(headers or {}),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = asyncio.Lock()
        self._socket: Socket | None = None
        self._watchdog: Watchdog | None = None
        self._stale = 0  # replies still to come that nobody waits for
        self._lost: str | None = None
        self._closed = False
        observation_type, state_type = (
            getattr(self, f"{name}_type", None) for name in ("observation", "state")
        )
        self._read_observation = None if observation_type is None else reader(observation_type)
        self._read_state = reader(State if state_type is None else state_type)

    @property
    def base_url(self) -> str | None:
        """Where the server is; None until the provider has started it."""
        return self._base_url

    @property
    def connected(self) -> bool:
        """Whether a socket is open. Anyone may find out at the next request that it has broken."""
        return self._socket is not None

    async def connect(self) -> Self:
        """Start the server if that is this client's to do, and open a session. Does nothing when open.

        Raises:
            ClientClosed: The client was closed.
            ConnectionFailed: The server does not answer.
            ProviderError: The server could not be started.
        """
        self._come_to_loop()
        async with self._turn:
            await self._connect()
        return self

    async def reset(self, **options: Any) -> StepResult[ObsT]:
        """Start an episode.

        Args:
            options: `seed`, `episode_id` and whatever else the environment takes.

        Raises:
            ServerError: The server refused, or the environment raised; the subclass tells which.
            RequestTimeout: No reply came in time; the session is closed.
            ConnectionLost: The connection broke before the reply.
            ConnectionFailed: There was no connection, and none could be made.
        """
        data = await self._request(encode_request("reset", options), "observation", fresh=True)
        return self._parse_result(data)

    async def step(self, action: ActT) -> StepResult[ObsT]:
        """Apply an action and return what follows.

        Raises:
            TypeError: The action is of another type.
            ServerError: The server refused, or the environment raised; the subclass tells which.
            RequestTimeout: No reply came in time; the session is closed.
            ConnectionLost: The connection broke, now or earlier; `reset` opens a new session.
        """
        data = await self._request(encode_request("step", self._step_payload(action)), "observation")
        return self._parse_result(data)

    async def state(self) -> StateT:
        """Return where the episode stands.

        Raises:
            ServerError: The environment raised.
            RequestTimeout: No reply came in time; the session is closed.
            ConnectionLost: The connection broke, now or earlier.
        """
        return self._parse_state(await self._request(encode_request("state"), "state"))

    async def disconnect(self) -> None:
        """End the session. A later request opens a new one."""
        self._come_to_loop()
        async with self._turn:
            await self._hang_up(polite=True)
            self._lost = None

    async def close(self) -> None:
        """End the session and stop the server if this client's provider started it. Idempotent."""
        self._closed = True
        try:
            self._come_to_loop()
            if self._turn.locked() and self._socket is not None:
                self._socket.abort()  # whoever waits for a reply gets ConnectionLost
            async with self._turn:
                await self._hang_up(polite=True)
        finally:
            if self._provider is not None:
                await asyncio.to_thread(self._provider.stop)

    async def __aenter__(self) -> Self:
        try:
            return await self.connect()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _step_payload(self, action: ActT) -> Any:
        """Return what a step frame carries: a model or a dict of the action's fields."""
        expected = getattr(self, "action_type", Action)
        if not isinstance(action, (expected, Mapping)):
            raise TypeError(
                f"expected {expected.__name__} or a dict of its fields, got {type(action).__name__}; "
                f"pass {expected.__name__}(...)"
            )
        return action

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[ObsT]:
        """Turn the data of an observation frame into what the caller gets."""
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
        """Turn the data of a state frame into what the caller gets."""
        try:
            return cast(StateT, self._read_state(payload))
        except ValidationError as error:
            raise self._unreadable("state", payload, error) from error

    def _unreadable(self, what: str, payload: object, error: ValidationError | None) -> ProtocolError:
        expected = getattr(self, f"{what}_type", None)
        if expected is None:
            return ProtocolError(
                f"expected {what}_type on {type(self).__name__}, got none; set it to the model"
            )
        return ProtocolError(
            f"expected {expected.__name__} from {self._base_url}, got {str(payload)[:200]}"
            f"{f': {error}' if error else ''}; check that client and server have the same version"
        )

    async def _request(self, frame: bytes, expected: str, *, fresh: bool = False) -> dict[str, Any]:
        """Send a frame and return the data of its reply."""
        self._come_to_loop()
        async with self._turn:
            socket = self._socket
            if socket is None:
                if self._lost is not None and not fresh:
                    raise ConnectionLost(self._lost)
                socket = await self._connect()
            watchdog = self._watchdog
            assert watchdog is not None
            watchdog.start()
            try:
                reply = await self._exchange(socket, frame)
            except ConnectionLost as error:
                self._forget(str(error))
                if watchdog.expired:
                    raise RequestTimeout(
                        f"expected a reply within {self._message_timeout_s:g} s, got none; the session was "
                        "closed. Call reset() to start a new one, or raise message_timeout_s"
                    ) from None
                raise
            finally:
                watchdog.stop()
            try:
                return decode_reply(reply, expected)
            except (*_SESSION_ENDED, ProtocolError) as error:
                await self._hang_up(polite=False)
                self._lost = str(error)
                raise

    async def _exchange(self, socket: Socket, frame: bytes) -> bytes:
        try:
            await socket.send(frame)
        except ConnectionLost:
            pass  # a server that refuses a session says why before it closes: read that first
        except BaseException:
            self._forget(
                "expected to send a request, but sending was cancelled; call reset() to start a new session"
            )
            socket.abort()
            raise
        self._stale += 1
        while True:
            reply = await socket.recv()  # cancelled here, the reply stays counted as stale
            self._stale -= 1
            if not self._stale:
                return reply

    def _come_to_loop(self) -> None:
        """Make the running event loop the client's; with an earlier loop that has closed, its socket is gone.

        Raises:
            ConfigurationError: The client belongs to another loop, which is still open.
        """
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None:
            if not self._loop.is_closed():
                raise ConfigurationError(
                    "expected every call of a client on one event loop, got a second loop; "
                    "make a client for each, or use sync() where there is no loop"
                )
            self._turn = asyncio.Lock()  # one of the old loop may be bound to it
            if self._socket is not None:
                self._forget(
                    "expected the event loop that the client connected on, but it has closed, and the session "
                    "with it; keep to one asyncio.run(), or use sync()"
                )
        self._loop = loop

    async def _connect(self) -> Socket:
        if self._closed:
            raise ClientClosed("expected an open client, got a closed one; make a new client")
        if self._socket is not None:
            return self._socket
        if self._ws_url is None:
            assert self._provider is not None
            self._base_url = await asyncio.to_thread(self._provider.start)
            self._ws_url = websocket_url(self._base_url)
        socket = await open_socket(self._ws_url, self._options)
        self._socket = socket
        self._watchdog = Watchdog(self._message_timeout_s, socket.abort)
        self._stale = 0
        self._lost = None
        return socket

    def _forget(self, reason: str) -> None:
        """Drop a socket that is of no more use."""
        self._socket = None
        self._lost = reason
        if self._watchdog is not None:
            self._watchdog.close()

    async def _hang_up(self, *, polite: bool) -> None:
        """Close the socket, if any; politely means to say so first."""
        socket = self._socket
        if socket is None:
            return
        self._forget("the session was closed")
        try:
            if polite:
                await socket.send(encode_request("close"))
            await socket.close()
        except ConnectionLost:
            pass
        except BaseException:
            socket.abort()
            raise


def websocket_url(base_url: str) -> str:
    """Return the address of the session socket for a server's URL.

    Raises:
        ConfigurationError: The URL is of another scheme, or names no host.
    """
    parts = urlsplit(base_url)
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.netloc:
        raise ConfigurationError(
            f"expected a URL that starts with http://, https://, ws:// or wss://, got {base_url!r}"
        )
    path = parts.path.rstrip("/")
    return urlunsplit((scheme, parts.netloc, path if path.endswith("/ws") else f"{path}/ws", parts.query, ""))
