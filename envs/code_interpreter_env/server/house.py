"""What all sessions of a process share: the backend, started for the first that needs it, closed after the last."""

import asyncio
import os
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from openenv_core.errors import ConfigurationError
from openenv_core.sandbox import Backend, Isolation, SandboxUnavailableError
from servers.app import EnvironmentApp

from ..grading import JsonlTasks
from .backends import make_backend
from .options import open_tasks
from .settings import InterpreterSettings, remedy


@dataclass(slots=True)
class _Held:
    """A backend on one event loop, and how many hold it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    backend: Backend | None = None
    holders: int = 0


class SharedBackend:
    """Keeps one backend running for as long as anybody holds it.

    A server holds it for as long as it runs. Where nobody runs the server's lifespan (below another application, or
    without a server), sessions hold it from their first use to their end.

    Args:
        settings: What interpreters there are.

    Attributes:
        settings: The same.
        exposed: Whether callers beyond this machine reach the server; None: not known.
    """

    def __init__(self, settings: InterpreterSettings) -> None:
        self.settings = settings
        self.exposed: bool | None = None
        self._held: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Held] = weakref.WeakKeyDictionary()

    @cached_property
    def tasks(self) -> JsonlTasks | None:
        """Where tasks come from; None where the server has none.

        Raises:
            ConfigurationError: They cannot be read.
        """
        return open_tasks(self.settings.tasks)

    async def hold(self) -> Backend:
        """Return the backend, started; each call is to be followed by one of `release`.

        Raises:
            SandboxUnavailableError: It cannot be had here.
            ConfigurationError: The isolation that it has is weaker than it must be, or a setting is wrong.
        """
        held = self._here()
        async with held.lock:
            if held.backend is None:
                held.backend = await self._start()
            held.holders += 1
            return held.backend

    async def release(self) -> None:
        """Let go of it; after the last holder it is closed."""
        held = self._here()
        async with held.lock:
            held.holders -= 1
            if not held.holders and held.backend is not None:
                backend, held.backend = held.backend, None
                await backend.close()

    @asynccontextmanager
    async def lifespan(self, app: EnvironmentApp) -> AsyncIterator[None]:
        """Hold it while an app is served.

        Raises:
            ConfigurationError: The isolation is too weak for whom the server can be reached by.
            SandboxUnavailableError: It cannot be had here.
        """
        self.exposed = app.settings.exposed
        _ = self.tasks  # what cannot be read is told now
        await self.hold()
        try:
            yield
        finally:
            await self.release()

    def _here(self) -> _Held:
        return self._held.setdefault(asyncio.get_running_loop(), _Held())

    async def _start(self) -> Backend:
        least = self.settings.least(self.exposed)
        backend = make_backend(self.settings, least)
        try:
            await backend.start()
            _check(backend, least)
        except BaseException as error:
            await backend.close()
            if isinstance(error, SandboxUnavailableError) and least is not Isolation.PROCESS:
                raise SandboxUnavailableError(f"{error}; {remedy()}") from error
            raise
        return backend


def _check(backend: Backend, least: Isolation) -> None:
    """Refuse a rung of the ladder that is too low. What a hosted backend has instead is its host's affair."""
    try:
        level = Isolation(backend.isolation)
    except ValueError:
        return
    if not level.at_least(least):
        raise ConfigurationError(
            f"expected an isolation of at least {least}, got {level}, the strongest that holds here; {remedy(level)}"
        )


@lru_cache(maxsize=1)
def house() -> SharedBackend:
    """Return the house of this process, by its environment variables.

    Raises:
        ConfigurationError: A variable cannot be used.
    """
    return SharedBackend(InterpreterSettings.from_environment(os.environ))
