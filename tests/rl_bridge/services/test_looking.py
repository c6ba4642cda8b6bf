"""What is asked of replicas beside their traffic changes nothing about it."""

import asyncio
from pathlib import Path

import pytest

from rl_bridge.errors import GeneratorError

pytestmark = pytest.mark.heavy


async def test_one_that_fails_its_calls_is_no_better_for_answering_questions(tmp_path: Path) -> None:
    from service_roles import Policy

    from rl_bridge.metrics import SpanTotals
    from rl_bridge.services import Fleet

    async with Fleet(tmp_path, heartbeat_s=0.2):
        policy = await Policy.options(num_replicas=2).as_service()
        answers = await policy.look("spans")
        assert sorted(answers) == [0, 1]
        assert all(isinstance(answer, SpanTotals) and answer.wall_s > 0 for answer in answers.values())
        await policy.break_down.fanout(policy.replicas[0].pids[0], False)
        errors = 0
        for _ in range(30):
            outcome, _ = await asyncio.gather(
                policy.generate.route(), policy.look("spans"), return_exceptions=True
            )
            errors += isinstance(outcome, GeneratorError)
        assert errors <= 6
        assert await policy.look("fail") == {}
