"""State that all sessions of a process share: settings, a limit on concurrent starts, protocols, the validator."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache

from servers.app import EnvironmentApp

from .config import McpToolsSettings
from .upstream.schemas import ArgumentChecker


class SharedState:
    """State that the sessions of a process share.

    Attributes:
        modes: The protocol mode that each tool server accepted, by its name.
        checker: Validates the arguments of calls.
        starts: Limits how many tool servers start at once, because a start costs more than many calls.
    """

    def __init__(self, settings: McpToolsSettings) -> None:
        self.settings = settings
        self.modes: dict[str, str] = {}
        self.checker = ArgumentChecker()
        self.starts = asyncio.Semaphore(settings.starts)


@asynccontextmanager
async def lifespan(app: EnvironmentApp) -> AsyncIterator[None]:
    """Read the settings at start-up, and start the validator, which takes longer to start than a session.

    Raises:
        ConfigurationError: A value is invalid.
    """
    checker = shared_state().checker
    checker.start()
    try:
        yield
    finally:
        checker.close()


@lru_cache(maxsize=1)
def shared_state() -> SharedState:
    """Return the shared state of this process, configured by environment variables.

    Raises:
        ConfigurationError: A variable has an invalid value.
    """
    return SharedState(McpToolsSettings.from_environment(os.environ))
