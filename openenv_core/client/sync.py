"""The sync face of a client: the async one, driven from a thread with an event loop."""

import inspect
import weakref
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, Self, TypeVar

from openenv_core.client.loop_thread import LoopThread
from openenv_core.client.session import ClientSession
from openenv_core.errors import ConfigurationError
from openenv_core.types import ActT, ObsT, StateT, StepResult

T = TypeVar("T")


class SyncEnvClient(Generic[ActT, ObsT, StateT]):
    """An `EnvClient` for code without asyncio.

    Methods are those of the async client, awaited; what is not spelled out here (methods that a subclass
    adds, for one) is passed through in the same way. Awaiting an unused sync client gives the async one,
    connected.

    Args:
        client: The async client. It belongs to this object from now on.
    """

    def __init__(self, client: ClientSession[ActT, ObsT, StateT]) -> None:
        self._client = client
        self._thread: LoopThread | None = None
        self._closed = False
        self._borrowed = False  # the thread is another client's

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

    def connect(self) -> Self:
        """Start the server if that is this client's to do, and open a session."""
        self._run(self._client.connect())
        return self

    def reset(self, **options: Any) -> StepResult[ObsT]:
        """Start an episode; see `EnvClient.reset`."""
        return self._run(self._client.reset(**options))

    def step(self, action: ActT) -> StepResult[ObsT]:
        """Apply an action; see `EnvClient.step`."""
        return self._run(self._client.step(action))

    def state(self) -> StateT:
        """Return where the episode stands; see `EnvClient.state`."""
        return self._run(self._client.state())

    def disconnect(self) -> None:
        """End the session; see `EnvClient.disconnect`."""
        self._run(self._client.disconnect())

    def close(self) -> None:
        """End the session, the thread, and the server if this client's provider started it. Idempotent.

        In a fork of the process that has the thread, all of these are left to that process.
        """
        if self._closed:
            return
        self._closed = True
        if self._thread is not None and self._thread.inherited:
            return
        try:
            self._run(self._client.close())
        finally:
            if self._thread is not None and not self._borrowed:
                self._thread.stop()

    def new_session(self) -> "SyncEnvClient[ActT, ObsT, StateT]":
        """Return another client on the same server; see `EnvClient.new_session`. They share a thread."""
        other = SyncEnvClient(self._run(self._client.new_session()))
        other._thread = self._thread
        other._borrowed = True
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
        return self._blocking(value)

    def _blocking(self, method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]:
        def call(*args: Any, **options: Any) -> T:
            return self._run(method(*args, **options))

        return call

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._thread is None:
            self._thread = LoopThread()
            # A client that is dropped without close() gives its session and its thread back all the same. At
            # the end of the interpreter both go by themselves.
            weakref.finalize(self, _close_soon, self._client, self._thread).atexit = False
        return self._thread.run(work)


def _close_soon(client: ClientSession[Any, Any, Any], thread: LoopThread) -> None:
    thread.finish(client.close())
