"""The service of sandboxes, in a hurry."""

import pytest


@pytest.fixture
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servers.sandboxes.table.POLL_INTERVAL_S", 0.03)
    monkeypatch.setattr("servers.sandboxes.table.RETRY_INTERVAL_S", 0.01)
