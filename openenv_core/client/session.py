"""One session on an environment server: requests in order over one carrier, models in and out."""

import asyncio
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, cast

from pydantic import ValidationError

from openenv_core.client.carrier import Carrier, CarrierOptions
from openenv_core.client.conversation import SESSION_ENDED, Conversation, FairLock
from openenv_core.client.settings import (
    checked_headers,
    checked_mode,
    checked_session_id,
    checked_transport,
    http_url,
    websocket_url,
)
from openenv_core.client.socket import open_socket
from openenv_core.errors import (
    ClientClosedError,
    ClientError,
    ConfigurationError,
    ConnectionFailedError,
    ConnectionLostError,
    ProtocolError,
    ServerError,
)
from openenv_core.protocol.http import redact_url
from openenv_core.protocol.jsonio import reader
from openenv_core.protocol.replies import decode_reply
from openenv_core.protocol.requests import encode_request
from openenv_core.providers.base import adapted, last_words
from openenv_core.types import Action, ActT, ObsT, State, StateT, StepResult

if TYPE_CHECKING:
    from openenv_core.providers.base import AnyProvider, Provider


class Payloads(Generic[ActT, ObsT, StateT]):
    """The hooks of a client, by the models that its class names. Released subclasses bring their own."""

    action_type: type[ActT]
    observation_type: type[ObsT]
    state_type: type[StateT]

    def __init__(self) -> None:
        observation_type, state_type = (
            getattr(self, f"{name}_type", None) for name in ("observation", "state")
        )
        self._read_observation = None if observation_type is None else reader(observation_type)
        self._read_state = reader(State if state_type is None else state_type)

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
            f"expected {expected.__name__} from the server, got {str(payload)[:200]}"
            f"{f': {error}' if error else ''}; check that client and server have the same version"
        )


class ClientSession(Payloads[ActT, ObsT, StateT]):
    """All of `EnvClient` but the ways to make one; see there. Its sync face needs to know no more."""

    def __init__(
        self,
        base_url: str | None = None,
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
        transport: str = "websocket",
    ) -> None:
        super().__init__()
        if base_url is None and provider is None:
            raise ConfigurationError("expected a base_url or a provider, got neither; pass the server's URL")
        self._base_url = None if base_url is None else _checked_url(base_url)
        self._provider = None if provider is None else adapted(provider, started=base_url is not None)
        self._mode = checked_mode(mode)
        self._transport = checked_transport(transport)
        self._session_id = None if session_id is None else checked_session_id(session_id)
        self._message_timeout_s = message_timeout_s
        self._options = CarrierOptions(
            connect_timeout_s=connect_timeout_s,
            max_message_bytes=int(max_message_size_mb * 1024 * 1024),
            ping_interval_s=websocket_ping_interval_s,
            ping_timeout_s=websocket_ping_timeout_s,
            headers=checked_headers(headers, token),
        )
        self._for_new_sessions = {
            "connect_timeout_s": connect_timeout_s,
            "message_timeout_s": message_timeout_s,
            "max_message_size_mb": max_message_size_mb,
            "websocket_ping_interval_s": websocket_ping_interval_s,
            "websocket_ping_timeout_s": websocket_ping_timeout_s,
            "mode": mode,
            "headers": headers,
            "token": token,
            "transport": transport,
        }
        self._others: list[ClientSession[ActT, ObsT, StateT]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Future[str] | None = None
        self._turn = FairLock()
        self._former: Carrier | None = None  # given up, and perhaps not quite gone yet
        self._conversation: Conversation | None = None
        self._lost: str | None = None
        self._closed = False

    def __repr__(self) -> str:
        where = "a server that it starts" if self._base_url is None else redact_url(self._base_url)
        how = "closed" if self._closed else "connected" if self.connected else "not connected"
        return f"<{type(self).__name__} {where}, {how}>"

    @property
    def base_url(self) -> str | None:
        """Where the server is; None until the provider has started it."""
        return self._base_url

    @property
    def connected(self) -> bool:
        """Whether a session is open. Anyone may find out at the next request that it has broken."""
        return self._conversation is not None

    async def connect(self) -> Self:
        """Start the server if that is this client's to do, and open a session. Does nothing when open.

        Raises:
            ClientClosedError: The client was closed.
            ConnectionFailedError: The server does not answer, or lets nobody in without a token.
            CapacityError: The server takes no more sessions, and says so before one is made.
            ProviderError: The server could not be started.
        """
        self._come_to_loop()
        with await self._turn.wait():
            await self._connect()
        return self

    async def new_session(self) -> Self:
        """Return another client of this class, connected to the same server with the same settings.

        It is closed when this one is, at the latest.

        Raises:
            CapacityError: The server takes no more sessions.
            ConnectionFailedError: The server does not answer.
        """
        self._come_to_loop()
        with await self._turn.wait():
            base_url = await self._located()
        taken = inspect.signature(type(self)).parameters
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        settings: dict[str, Any] = {
            name: value for name, value in self._for_new_sessions.items() if anything or name in taken
        }
        other = type(self)(base_url=base_url, **settings)
        self._others = [*(known for known in self._others if not known._closed), other]
        try:
            return await other.connect()
        except BaseException:
            self._others = [known for known in self._others if known is not other]
            await other.close()
            raise

    async def reset(self, **options: Any) -> StepResult[ObsT]:
        """Start an episode.

        Args:
            options: `seed`, `episode_id` and whatever else the environment takes.

        Raises:
            ServerError: The server refused, or the environment raised; the subclass tells which.
            RequestTimeoutError: No reply came in time. The session and its episode live on, and the late reply
                is dropped; a further request waits until the environment is done with this one.
            ConnectionLostError: The connection broke before the reply.
            ConnectionFailedError: There was no connection, and none could be made.
        """
        data = await self._request(encode_request("reset", options), "observation", fresh=True)
        return self._parse_result(data)

    async def step(self, action: ActT) -> StepResult[ObsT]:
        """Apply an action and return what follows.

        Raises:
            TypeError: The action is of another type.
            ServerError: The server refused, or the environment raised; the subclass tells which.
            RequestTimeoutError: No reply came in time; see `reset`. The step may still happen.
            ConnectionLostError: The connection broke, now or earlier; `reset` opens a new session.
        """
        data = await self._request(encode_request("step", self._step_payload(action)), "observation")
        return self._parse_result(data)

    async def state(self) -> StateT:
        """Return where the episode stands.

        Raises:
            ServerError: The environment raised.
            RequestTimeoutError: No reply came in time; see `reset`.
            ConnectionLostError: The connection broke, now or earlier.
        """
        return self._parse_state(await self._request(encode_request("state"), "state"))

    async def disconnect(self) -> None:
        """End the session, whatever is under way in it. A later request opens a new one."""
        self._come_to_loop()
        self._abort_carrier()
        with await self._turn.wait():
            await self._hang_up()
            self._lost = None

    async def close(self) -> None:
        """End the session, those that `new_session` made, and the server if this client's provider runs it.

        Idempotent.
        """
        self._closed = True
        try:
            self._come_to_loop()
            if self._starting is not None:
                self._starting.cancel()
            self._abort_carrier()
            others, self._others = self._others, []
            await asyncio.gather(*(other.close() for other in others), return_exceptions=True)
            with await self._turn.wait():
                await self._hang_up()
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

    async def _request(self, frame: bytes, expected: str, *, fresh: bool = False) -> dict[str, Any]:
        """Send a frame and return the data of its reply."""
        self._come_to_loop()
        turn = self._turn
        with turn if turn.take() else await turn.wait():
            conversation = self._conversation
            if conversation is None:
                if self._lost is not None and not fresh and not self._closed:
                    raise ConnectionLostError(self._lost)
                conversation = await self._connect()
            try:
                reply = await conversation.ask(frame)
            except ConnectionLostError as error:
                self._abort(str(error))
                raise await self._explained(error) from None
            except (ConnectionFailedError, ServerError, ProtocolError) as error:
                self._abort(str(error))
                raise
            try:
                return decode_reply(reply, expected)
            except (*SESSION_ENDED, ProtocolError) as error:
                self._abort(str(error))
                raise

    @property
    def _carrier(self) -> Carrier | None:
        """What carries the frames of this moment's session."""
        return None if self._conversation is None else self._conversation.carrier

    def _come_to_loop(self) -> None:
        """Make the running event loop the client's; with an earlier loop that has closed, its session is over.

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
            self._turn = FairLock()  # some of the old loop may wait for it
            self._starting = None
            left = self._carrier or self._former
            if self._carrier is not None:
                self._drop_carrier(
                    "expected the event loop that the client connected on, but it has closed, and the session "
                    "with it; keep to one asyncio.run(), or use sync()"
                )
            if left is not None:
                left.orphan()  # or the server would keep the session, and the room that it takes
            self._former = left
        self._loop = loop

    async def _connect(self) -> Conversation:
        if self._conversation is not None:
            return self._conversation
        base_url = await self._located()
        await (
            self._wait_former_closed()
        )  # a server with room for one session has to be rid of the former first
        try:
            carrier = await self._open(base_url)
        except ConnectionFailedError as error:
            raise await self._explained(error) from error.__cause__
        self._conversation = Conversation(carrier, self._message_timeout_s)
        self._lost = None
        return self._conversation

    async def _open(self, base_url: str) -> Carrier:
        if self._transport == "websocket":
            return await open_socket(websocket_url(base_url, self._session_id), self._options)
        from openenv_core.client.http import open_http  # httpx is not needed by those who use the socket

        return await open_http(http_url(base_url), self._session_id, self._options)

    async def _located(self) -> str:
        """Return where the server is, starting it first if that is this client's to do."""
        if self._closed:
            raise ClientClosedError("this client is closed; make a new one")
        if self._base_url is None:
            assert self._provider is not None
            self._base_url = _checked_url(await self._started(self._provider))
        return self._base_url

    async def _started(self, provider: "Provider") -> str:
        """Start the server in a thread. `close` ends the wait; the start is then ended by the provider's stop."""
        self._starting = starting = asyncio.ensure_future(asyncio.to_thread(provider.start))
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
            # A later loop may have begun another start by the time that this one is collected.
            if self._starting is starting:
                self._starting = None

    async def _stop_provider(self) -> None:
        if self._provider is None:
            return
        try:
            stopping = asyncio.get_running_loop().run_in_executor(None, self._provider.stop)
        except RuntimeError:  # the interpreter is at its exit, and lends no more threads
            self._provider.stop()
        else:
            await stopping

    async def _explained(self, error: ClientError) -> ClientError:
        """Add what became of the server's process, where the provider can tell."""
        if self._provider is None or type(error) not in (ConnectionFailedError, ConnectionLostError):
            return error
        words = await asyncio.to_thread(last_words, self._provider)
        return type(error)(f"{error}{words}") if words else error

    def _drop_carrier(self, reason: str) -> None:
        """Drop a carrier that is of no more use."""
        if self._conversation is not None:
            self._conversation.end()
        self._conversation = None
        self._lost = reason

    def _abort(self, reason: str) -> None:
        """Break a session off that has no next request, without waiting for anything."""
        self._former = carrier = self._carrier
        self._drop_carrier(reason)
        if carrier is not None:
            carrier.abort()

    def _abort_carrier(self) -> None:
        """Make whoever waits for a reply get ConnectionLostError."""
        if self._turn.taken and self._carrier is not None:
            self._carrier.abort()

    async def _wait_former_closed(self) -> None:
        """Wait until nothing is left of a session that was given up."""
        former, self._former = self._former, None
        if former is not None:
            await former.close()

    async def _hang_up(self) -> None:
        """Close the carrier in order, if there is one; say so first, where the session is this client's."""
        await self._wait_former_closed()
        carrier = self._carrier
        if carrier is None:
            return
        self._drop_carrier("the session was closed")
        try:
            if self._session_id is None:
                async with asyncio.timeout(self._options.connect_timeout_s):
                    await carrier.room()
                carrier.send(encode_request("close"))
            await carrier.close()
        except (ConnectionLostError, TimeoutError):
            carrier.abort()
            await carrier.close()
        except BaseException:
            carrier.abort()
            raise


def _checked_url(base_url: str) -> str:
    websocket_url(base_url)  # raises if it is none
    return base_url.rstrip("/")
