"""State that all sessions of a process share: settings, a limit on concurrent starts, and what is known of servers."""

import asyncio
import os
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache

from servers.app import EnvironmentApp

from .config import McpToolsSettings


class SharedState:
    """What the sessions of a process share.

    Attributes:
        modes: The protocol that each tool server took, by its name.
    """

    def __init__(self, settings: McpToolsSettings) -> None:
        self.settings = settings
        self.modes: dict[str, str] = {}
        self._starts: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def starts(self) -> asyncio.Semaphore:
        """Bounds how many tool servers start at once: a start costs more than many calls."""
        loop = asyncio.get_running_loop()
        return self._starts.setdefault(loop, asyncio.Semaphore(self.settings.starts))


@asynccontextmanager
async def lifespan(app: EnvironmentApp) -> AsyncIterator[None]:
    """Read the settings before anybody is served. ConfigurationError: A value cannot be used."""
    shared_state()
    yield


@lru_cache(maxsize=1)
def shared_state() -> SharedState:
    """Return the shared state of this process, configured by environment variables.

    Raises:
        ConfigurationError: A variable cannot be used.
    """
    return SharedState(McpToolsSettings.from_environment(os.environ))
