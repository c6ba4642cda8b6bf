"""The store between real processes of a run."""

import os
from pathlib import Path

import pytest
import torch

from rl_bridge.errors import WeightsError

pytestmark = pytest.mark.heavy

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _roles_can_import_their_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


async def test_what_one_role_puts_another_gets(tmp_path: Path) -> None:
    from store_roles import Publisher, Reader, state_of

    from rl_bridge.services.fleet import Fleet
    from rl_bridge.weights import WeightStore

    store = WeightStore.create()
    async with Fleet(tmp_path / "logs") as fleet:
        publisher = fleet.spawn("publisher", Publisher, store)
        reader = fleet.spawn("reader", Reader, store)
        assert await reader.latest.call_one() is None
        for version in range(1, 6):
            await publisher.put.call_one(version, float(version))
            assert await reader.latest.call_one() == version
            read = await reader.get.call_one(version)
            for name, tensor in state_of(float(version)).items():
                assert torch.equal(read[name], tensor)
        assert await store.latest() == 5
        assert torch.equal((await store.get(4))["bias"], torch.full((3,), -4.0))
        with pytest.raises(WeightsError, match="expected version 1 to have been published and kept"):
            await store.get(1)
    await store.close()
    with pytest.raises(WeightsError, match="closed"):
        await store.latest()
