"""What is asked of replicas beside their traffic changes nothing about it."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.errors import GeneratorError

pytestmark = pytest.mark.heavy

HANG_S = 60.0
"""A bound for what would hang otherwise; none is meant to come near it."""


async def test_one_that_fails_its_calls_is_no_better_for_answering_questions(tmp_path: Path) -> None:
    from service_roles import Policy

    from rl_bridge.metrics import SpanTotals
    from rl_bridge.services import Fleet

    async with Fleet(tmp_path, heartbeat_s=0.2):
        policy = await Policy.options(num_replicas=2).as_service()
        answers = await policy.look("spans", timeout_s=HANG_S)
        assert sorted(answers) == [0, 1]
        assert all(isinstance(answer, SpanTotals) and answer.wall_s > 0 for answer in answers.values())
        await policy.break_down.fanout(policy.replicas[0].pids[0], False)
        errors = 0
        for _ in range(30):
            outcome, _ = await asyncio.gather(
                policy.generate.route(), policy.look("spans", timeout_s=HANG_S), return_exceptions=True
            )
            errors += isinstance(outcome, GeneratorError)
        assert errors <= 6
        assert await policy.look("fail", timeout_s=HANG_S) == {}


async def test_one_that_does_not_answer_hides_none_that_does() -> None:
    from rl_bridge.services.actor import ServiceActor
    from rl_bridge.services.incarnation import Incarnation
    from rl_bridge.services.options import ServiceOptions
    from rl_bridge.services.service import Service

    def start(replica: int) -> Incarnation:
        raise AssertionError("nothing is started here")

    class Replica:
        incarnation = 1

        def __init__(self, replica: int, *, hangs: bool = False) -> None:
            self.replica = replica
            self._hangs = hangs

        async def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
            if self._hangs:
                await asyncio.Event().wait()
            return f"{name} of {self.replica}"

    service = Service(
        "policy",
        ServiceActor,
        (),
        ServiceOptions(),
        start=start,
        record=lambda replica, what, detail: None,
        on_failure=lambda failure: None,
    )
    for replica in (Replica(0), Replica(1, hangs=True), Replica(2)):
        service._balancer.add(replica)
    async with asyncio.timeout(HANG_S):
        assert await service.look("spans", timeout_s=0.05) == {0: "spans of 0", 2: "spans of 2"}
