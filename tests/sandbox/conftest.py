"""One sandbox per level and module: what tests do to their sessions must not affect others."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from living import OpenSession
from sandbox_levels import sandbox_at

from openenv_core.sandbox import Isolation, Limits, Sandbox, SandboxSession

LEVELS = (Isolation.NAMESPACES, Isolation.LSM)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LEVELS)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with sandbox_at(request.param) as sandbox:
        yield sandbox


@pytest_asyncio.fixture(loop_scope="module")
async def open_session(sandbox: Sandbox) -> AsyncIterator[OpenSession]:
    """Opens sessions, which are closed after the test."""
    sessions: list[SandboxSession] = []

    async def open_session(limits: Limits | None = None, *, snapshot: bool = False) -> SandboxSession:
        sessions.append(await sandbox.open(limits, snapshot=snapshot))
        return sessions[-1]

    yield open_session
    for session in sessions:
        await session.close()


@pytest_asyncio.fixture(loop_scope="module")
async def session(open_session: OpenSession) -> SandboxSession:
    return await open_session()
