"""The sync face of a client: the async one, driven from the thread that all sync clients of a process share."""

import inspect
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, ParamSpec, Self, TypeVar

from openenv_core.client.session import ClientSession
from openenv_core.errors import ConfigurationError, OpenEnvError
from openenv_core.loop_thread import LoopThread, shared_loop
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
