"""Which replica is picked: least loaded, oldest first, and never the one that fails them all."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from fake_target import FakeTarget

from rl_bridge.services import balancer as balancer_module
from rl_bridge.services.balancer import MAX_SUSPENSION_S, MIN_SUSPENSION_S, SUSPECT_AFTER, Balancer


class Stage:
    """A balancer under a clock of its own."""

    def __init__(self, replicas: int, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.suspects: list[int] = []
        self.targets = [FakeTarget(replica) for replica in range(replicas)]
        patch.setattr(balancer_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.balancer = Balancer(
            "policy", frozenset(), 5.0, on_suspect=lambda target: self.suspects.append(target.replica)
        )
        for target in self.targets:
            self.balancer.add(target)

    async def call(self, replica: int | None = None) -> None:
        target = await self.balancer.wait_for_target() if replica is None else self.targets[replica]
        await asyncio.gather(self.balancer.call(target, "ask", (), {}), return_exceptions=True)

    async def begin(self, count: int) -> "list[asyncio.Task[int]]":
        calls = []
        for _ in range(count):
            calls.append(asyncio.ensure_future(self.balancer.route("ask", (), {})))
            for _ in range(2):
                await asyncio.sleep(0)
        return calls


StageOf = Callable[[int], Stage]


@pytest.fixture
def stage_of(monkeypatch: pytest.MonkeyPatch) -> StageOf:
    return lambda replicas: Stage(replicas, monkeypatch)


async def test_the_least_loaded_is_picked_and_ties_go_round(stage_of: StageOf) -> None:
    stage = stage_of(3)
    for target in stage.targets:
        target.hold()
    calls = await stage.begin(6)
    assert [stage.balancer.in_flight(replica) for replica in range(3)] == [2, 2, 2]
    stage.targets[1].released.set()
    assert await asyncio.gather(calls[1], calls[4]) == [1, 1]
    stage.targets[1].hold()
    calls[2].cancel()
    await asyncio.gather(calls[2], return_exceptions=True)
    more = await stage.begin(3)
    assert [len(target.calls) for target in stage.targets] == [2, 4, 3]
    for call in (*calls, *more):
        call.cancel()


async def test_one_that_was_out_for_a_while_does_not_attract_the_calls(stage_of: StageOf) -> None:
    """Its calls from before are none of its load."""
    stage = stage_of(2)
    for target in stage.targets:
        target.hold()
    before = await stage.begin(8)
    stage.balancer.replace([stage.targets[1]])
    stage.balancer.replace(stage.targets)
    for target in stage.targets:
        target.released.set()
        target.released = asyncio.Event()
    await asyncio.gather(*before)
    counts = [len(target.calls) for target in stage.targets]
    calls = await stage.begin(8)
    assert [len(target.calls) - count for target, count in zip(stage.targets, counts, strict=True)] == [4, 4]
    for call in calls:
        call.cancel()


async def test_one_that_fails_fast_does_not_attract_the_calls(stage_of: StageOf) -> None:
    stage = stage_of(2)
    stage.targets[0].error = ValueError()
    stage.targets[1].hold()
    busy = asyncio.ensure_future(stage.call(1))  # the good one is always busier
    await asyncio.sleep(0)
    stage.targets[1].released = asyncio.Event()
    stage.targets[1].released.set()
    for _ in range(1000):
        stage.now += 0.001
        await stage.call()
    # Three at once, one when the half second is over.
    assert len(stage.targets[0].calls) == SUSPECT_AFTER + 1
    assert stage.suspects == [0, 0]
    busy.cancel()


async def test_suspensions_double_up_to_a_bound_and_a_success_clears_them(stage_of: StageOf) -> None:
    stage = stage_of(2)
    stage.targets[0].error = ValueError()
    for _ in range(SUSPECT_AFTER):
        await stage.call(0)
    lengths = []
    for _ in range(9):
        begin = stage.now
        while stage.balancer.is_suspended(0):
            stage.now += 0.25
        lengths.append(stage.now - begin)
        await stage.call(0)
    assert lengths[:4] == [MIN_SUSPENSION_S, 1.0, 2.0, 4.0]
    assert lengths[-1] == MAX_SUSPENSION_S
    stage.targets[0].error = None
    await stage.call(0)
    assert not stage.balancer.is_suspended(0)
    stage.suspects.clear()
    stage.targets[0].error = ValueError()
    await stage.call(0)
    assert stage.suspects == []  # it has its tries again


async def test_failures_in_flight_at_a_suspension_do_not_lengthen_it(stage_of: StageOf) -> None:
    stage = stage_of(1)
    stage.targets[0].error = ValueError()
    await asyncio.gather(*(stage.call(0) for _ in range(10)))
    assert stage.suspects == [0]
    stage.now = MIN_SUSPENSION_S - 0.01
    assert stage.balancer.is_suspended(0)
    stage.now = MIN_SUSPENSION_S
    assert not stage.balancer.is_suspended(0)


async def test_failures_between_successes_and_calls_given_up_are_no_suspicion(stage_of: StageOf) -> None:
    stage = stage_of(1)
    (target,) = stage.targets
    for fails in (True, True, False, True, None, True, False, True, True):
        target.error = ValueError() if fails else None
        if fails is None:
            target.hold()
            (given_up,) = await stage.begin(1)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            target.released.set()
        else:
            await stage.call(0)
    assert stage.suspects == []
    assert not stage.balancer.is_suspended(0)


async def test_calls_are_routed_even_if_all_replicas_are_suspended(stage_of: StageOf) -> None:
    stage = stage_of(2)
    for target in stage.targets:
        target.error = ValueError()
        for _ in range(SUSPECT_AFTER):
            await stage.call(target.replica)
        stage.now += 0.1
    assert (await stage.balancer.wait_for_target()).replica == 0
