"""A policy of one replica whose engine dies or hangs: nobody who asked is told, and another one takes its place."""

import asyncio
import os
from pathlib import Path

import pytest
from generator_fixtures import perturbed, policy_service, prompts

from rl_bridge.types import SamplingSettings

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(900)]

GREEDY = SamplingSettings(temperature=0.0, max_new_tokens=4)
STUCK_S = 30.0


@pytest.fixture(autouse=True)
def _roles_can_import_their_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))


async def test_one_replica(tiny_policy: Path, tmp_path: Path) -> None:
    """One story, since engines take seconds to start: it breaks at new weights, at a step, and hangs at one."""
    from policy_roles import BreakablePolicy

    from rl_bridge.generator.checkpoint import Checkpoint

    async with policy_service(tiny_policy, tmp_path, actor=BreakablePolicy, timeout_s=STUCK_S) as (
        policy,
        store,
    ):
        batch = prompts(8)
        await store.put(1, perturbed(Checkpoint(tiny_policy).tensors(), seed=1))
        await policy.break_load.route()
        fanout = await policy.update_weights.fanout(1)
        assert (sorted(fanout.values), policy.replicas[0].restarts) == ([0], 1)
        assert await policy.version.route() == 1

        answers = await policy.generate_many.route(batch, GREEDY)
        assert {answer.version for answer in answers} == {1}
        await policy.break_engine.route()
        asking = [asyncio.ensure_future(policy.generate_many.route(batch, GREEDY)) for _ in range(4)]
        assert await asyncio.gather(*asking) == [answers] * 4
        assert policy.replicas[0].restarts == 2

        await policy.hang_engine.route()
        assert await policy.generate_many.route(batch, GREEDY) == answers
        assert policy.replicas[0].restarts == 3
