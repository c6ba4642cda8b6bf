"""A sandbox at one level of isolation."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from missing import missing

from openenv_core.sandbox import Isolation, Sandbox, SandboxConfig, SandboxUnavailableError


@asynccontextmanager
async def sandbox_at(level: Isolation) -> AsyncIterator[Sandbox]:
    """Run a sandbox at a level; if the level is not available, the test is skipped."""
    sandbox = Sandbox(SandboxConfig(strongest=level, minimum=level))
    try:
        await sandbox.start()
    except SandboxUnavailableError as error:
        missing(f"needs the level {level}: {error}")
    try:
        yield sandbox
    finally:
        await sandbox.close()
