"""A store in this process."""

from collections.abc import AsyncIterator

import pytest
from store_stage import Directory

from rl_bridge.weights import WeightStore


@pytest.fixture
def directory() -> Directory:
    return Directory()


@pytest.fixture
async def store(directory: Directory) -> AsyncIterator[WeightStore]:
    store = WeightStore(directory, transport="shared_memory", timeout_s=0.3)
    yield store
    await store.close()
