"""Servers for episodes, each in its test's event loop; servers that tests kill are processes."""

from collections.abc import AsyncIterator

import pytest
from serving import serving

from rl_bridge.rollout import episode as attempts


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.001)


@pytest.fixture
async def notebook(no_backoff: None) -> AsyncIterator[str]:
    from rollout_fixtures import notebook_app

    async with serving(notebook_app) as address:
        yield f"http://{address}"


@pytest.fixture
async def desk(no_backoff: None) -> AsyncIterator[str]:
    from tool_fixtures import desk_app

    async with serving(desk_app) as address:
        yield f"http://{address}"
