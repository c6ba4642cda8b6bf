"""Fixtures of the tests of services."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from service_waits import descendants, until_gone

SILENCE_S = 15.0
"""Less than the tests wait: to Monarch, a process that dies during a call is silent, not dead."""


@pytest.fixture(autouse=True)
def _replicas_import_their_actors(importable_modules: None) -> None:
    """By the names that the tests have for them."""


@pytest.fixture
def silence_is_a_loss() -> None:
    """For tests of silent processes: keeps the product's own bound."""


@pytest.fixture(autouse=True)
def _who_is_late_is_not_lost(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the bound, so that a stalled machine loses no replica: tests count lost replicas."""
    # Other tests do not need Monarch.
    if request.node.get_closest_marker("heavy") and "silence_is_a_loss" not in request.fixturenames:
        from rl_bridge.services import processes

        monkeypatch.setattr(processes, "MIN_SILENCE_S", SILENCE_S)


@pytest.fixture
def roles() -> ModuleType:
    """The actors of `service_roles`, which import Monarch."""
    import service_roles

    return service_roles


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Any]:
    """An open fleet that looks for deaths five times a second; none of its processes outlives it."""
    from rl_bridge.services.fleet import Fleet

    before = descendants()
    async with Fleet(tmp_path / "logs", heartbeat_s=0.2) as fleet:
        yield fleet
        started = descendants() - before
    await until_gone(started)
