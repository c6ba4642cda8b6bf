"""The deadline of a synchronisation, and what does not count towards it."""

import asyncio
from collections.abc import Mapping

import pytest

from benchmarks.simulated_time import simulated
from rl_bridge.errors import RoleError
from rl_bridge.loops.weight_sync import WeightSync


@pytest.mark.parametrize(("after_s", "served"), [(3.0, True), (8.0, False)])
@simulated
async def test_a_cross_table_does_not_count_towards_the_deadline(after_s: float, served: bool) -> None:
    errors: list[BaseException] = []
    sync = WeightSync(on_error=errors.append, overlapped=False, timeout_s=10.0)

    async def synchronize() -> Mapping[str, float]:
        await asyncio.sleep(5.0)
        with sync.without_deadline():
            await asyncio.sleep(1000.0)
        await asyncio.sleep(after_s)
        return {"sync/push_s": 1.0}

    with sync.without_deadline():  # of no synchronisation
        pass
    if served:
        await sync.begin(synchronize())
    else:
        with pytest.raises(RoleError, match="new weights to be served within 10 s"):
            await sync.begin(synchronize())
    assert (len(errors), len(sync.latest_metrics)) == (not served, served)
