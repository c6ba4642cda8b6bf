"""What the tests of services share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _roles_can_import_their_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
