"""One sandbox per level and module: what tests do to their sessions must not affect others."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from sandbox_levels import sandbox_at

from openenv_core.sandbox import Isolation, Sandbox

LEVELS = (Isolation.NAMESPACES, Isolation.LSM)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LEVELS)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with sandbox_at(request.param) as sandbox:
        yield sandbox
