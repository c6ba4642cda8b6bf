"""One sandbox a level for a whole module: what tests do to their own sessions must not matter to others."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from missing import missing

from openenv_core.sandbox import Isolation, Sandbox, SandboxConfig, SandboxUnavailableError

LEVELS = (Isolation.NAMESPACES, Isolation.LSM)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LEVELS)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    level = request.param
    sandbox = Sandbox(SandboxConfig(strongest=level, minimum=level))
    try:
        await sandbox.start()
    except SandboxUnavailableError as error:
        missing(f"the level {level} cannot be had here: {error}")
    try:
        yield sandbox
    finally:
        await sandbox.close()
