"""The dataset as a service: its death costs no example twice."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rl_bridge.data.dataset import Dataset
from rl_bridge.data.examples import open_source
from rl_bridge.data.settings import DatasetSettings

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

HANG_S = 60.0
"""A bound for what would hang otherwise; none is meant to come near it."""


async def test_what_was_handed_out_is_not_handed_out_again(tmp_path: Path) -> None:
    from rl_bridge.data.actor import DatasetActor
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.services.restarts import RestartPolicy

    path = tmp_path / "examples.jsonl"
    path.write_text("".join(f'{{"prompt": "Say {number}", "target": {number}}}\n' for number in range(100)))
    settings = DatasetSettings(source=str(path), seed=5, cursor=str(tmp_path / "dataset.cursor"))
    async with Fleet(tmp_path / "logs"), asyncio.timeout(2 * HANG_S):
        service = DatasetActor.options(name="dataset", restarts=RestartPolicy(backoff_s=0.0))
        dataloader = await service.as_service(settings)
        seen = [await dataloader.sample.route() for _ in range(10)]
        for _ in range(2):
            os.kill(dataloader.replicas[0].pids[0], signal.SIGKILL)
            seen += await asyncio.gather(*(dataloader.sample.route() for _ in range(10)))
        targets = [example.target for example in seen]
        assert len(set(targets)) == 30
        alone = Dataset(open_source(str(path)), seed=5)
        # At most what was on its way when the process died is skipped.
        taken = (await dataloader.state.route())["taken"]
        assert 30 <= taken <= 50
        assert set(targets) <= {alone.at(number).target for number in range(taken)}
        # A run that goes back to a checkpoint sees again what came after it, and a restart does not undo that.
        state = {**await dataloader.state.route(), "taken": 10}
        await dataloader.restore.route(state)
        os.kill(dataloader.replicas[0].pids[0], signal.SIGKILL)
        after = [await dataloader.sample.route() for _ in range(3)]
        assert {example.target for example in after} <= {alone.at(number).target for number in range(10, 16)}
        assert (await dataloader.at.route(0)).target == alone.at(0).target
