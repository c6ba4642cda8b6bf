from collections.abc import AsyncIterator

import pytest_asyncio
from missing import missing

from openenv_core.sandbox import Isolation, Sandbox, SandboxConfig, SandboxUnavailableError


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    """A sandbox at the level that starts fastest; verdicts do not depend on the level."""
    box = Sandbox(SandboxConfig(strongest=Isolation.LSM))
    try:
        await box.start()
    except SandboxUnavailableError as error:
        missing(f"there is no sandbox here: {error}")
    try:
        yield box
    finally:
        await box.close()
