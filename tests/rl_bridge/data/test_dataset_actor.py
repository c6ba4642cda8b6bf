"""The dataset as a service: its death changes no example's place."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rl_bridge.config import DataConfig
from rl_bridge.data.examples import Dataset, open_source

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

HANG_S = 60.0
"""A bound for what would hang otherwise; none is meant to come near it."""


async def test_each_place_has_the_same_example_after_a_restart(tmp_path: Path) -> None:
    from rl_bridge.data.actor import DatasetActor
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.services.options import RestartPolicy

    path = tmp_path / "examples.jsonl"
    path.write_text("".join(f'{{"prompt": "Say {number}", "target": {number}}}\n' for number in range(100)))
    alone = Dataset(open_source(str(path)), seed=5)
    expected = [alone.sample() for _ in range(20)]
    async with Fleet(tmp_path / "logs"), asyncio.timeout(2 * HANG_S):
        service = DatasetActor.options(name="dataset", restarts=RestartPolicy(backoff_s=0.0))
        dataloader = await service.as_service(DataConfig(source=str(path)), 5)
        assert [await dataloader.sample.route() for _ in range(20)] == expected
        os.kill(dataloader.replicas[0].pids[0], signal.SIGKILL)
        assert await asyncio.gather(*(dataloader.get_example.route(place) for place in range(20))) == [
            alone.get_example(place) for place in range(20)
        ]
        assert await dataloader.identity.route() == alone.identity()
