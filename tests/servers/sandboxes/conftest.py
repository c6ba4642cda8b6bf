"""Fixtures of the tests of `ropewalk sandboxes`: a service, E2B's clients of it, an engine."""

from pathlib import Path

import pytest
from docker_engine import engine
from e2b_service import client, create, sandbox, service, template

__all__ = ["client", "create", "engine", "sandbox", "service", "template"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move one of the four combinations, the async client with an image, to the third tier."""
    for item in items:
        words = set(item.name.rstrip("]").replace("[", "-").split("-"))
        if item.path.parent == Path(__file__).parent and {"async", "image"} <= words:
            item.add_marker(pytest.mark.soak)
