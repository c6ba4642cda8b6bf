"""Which groups a step takes, waits for and cuts; the bound under all troubles is in rollout/test_dispatcher."""

import asyncio
from typing import Any

import pytest
from buffer_fixtures import aged_group

from benchmarks.simulated_time import simulated
from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import CANCEL_GRACE_PERIOD_S, STALE, STRAGGLER, Admission, ReplayBuffer
from rl_bridge.config import RolloutConfig
from rl_bridge.types import Group


def plain_buffer(*, max_staleness: int = 0, groups: int = 2, timeout_s: float = 1000.0) -> ReplayBuffer:
    return ReplayBuffer(
        Ledger(max_losses=1),
        Admission(groups_per_batch=groups, max_staleness=max_staleness, iterations=99),
        timeout_s=timeout_s,
        straggler_timeout_s=60.0,
    )


async def play_group(buffer: ReplayBuffer, *versions: int) -> Group:
    lease = await buffer.lease()
    group = aged_group(*versions, number=lease.group)
    assert await buffer.add(group, lease)
    return group


@simulated
async def test_the_oldest_go_first_and_none_that_could_not_wait_is_left_behind() -> None:
    buffer = plain_buffer(max_staleness=1)
    slow = await buffer.lease()
    for _ in range(3):
        await play_group(buffer, 0)
    # Three are there, and the slow one may still wait for the next step.
    assert [group.id for group in await buffer.sample(0, 2)] == [1, 2]
    buffer.record_served(1)
    young = [await play_group(buffer, 1) for _ in range(2)]
    taking = asyncio.create_task(buffer.sample(1, 2))
    await asyncio.sleep(50.0)
    assert not taking.done()  # three are there, but the slow one may not be left behind
    assert await buffer.add(aged_group(0, 1, number=slow.group), slow)
    assert [group.id for group in await taking] == [0, 3]
    assert [group.id for group in young] == [4, 5]


@simulated
async def test_a_step_leaves_no_more_old_groups_than_later_steps_can_take() -> None:
    buffer = plain_buffer(max_staleness=2)
    slow = [await buffer.lease() for _ in range(4)]
    for version, numbers in ((0, [4, 5]), (1, [0, 1])):
        buffer.record_served(version)
        for _ in range(2):
            await play_group(buffer, version)
        taking = asyncio.create_task(buffer.sample(version, 2))
        await asyncio.sleep(50.0)
        if version == 1:  # of the four old ones the next step is the last that may take any, and it takes two
            assert not taking.done()
            for lease in slow:
                assert await buffer.add(aged_group(0, number=lease.group), lease)
        assert [group.id for group in await taking] == numbers
    assert [group.id for group in await buffer.sample(2, 2)] == [2, 3]


@simulated
async def test_a_straggler_is_cut_and_dropped_where_that_does_not_help() -> None:
    buffer = plain_buffer()
    cut: list[tuple[float, int]] = []
    now = asyncio.get_running_loop().time
    buffer.cancel = lambda leases: cut.extend((now(), lease.group) for lease in leases)
    await asyncio.sleep(500.0)
    first, helped = await buffer.lease(), await buffer.lease()
    taking = asyncio.create_task(buffer.sample(0, 2))
    assert await buffer.add(aged_group(0, number=first.group), first)
    await asyncio.sleep(59.0)
    assert not cut
    await asyncio.sleep(2.0)
    assert cut == [(560.0, 1)]
    assert buffer.drop(helped, "1 of 4 siblings")
    stuck = await buffer.lease()
    await asyncio.sleep(60.0 + CANCEL_GRACE_PERIOD_S + 1.0)
    assert [group for _, group in cut] == [1, 2]
    assert (buffer.take_stragglers_cut(), buffer.take_stragglers_cut()) == (2, 0)
    assert not await buffer.add(aged_group(0, number=stuck.group), stuck)
    await play_group(buffer, 0)
    assert [group.id for group in await taking] == [0, 3]
    assert buffer.ledger.dropped == {"1 of 4 siblings": 1, STRAGGLER: 1}


@simulated
async def test_a_straggler_is_waited_for_unless_the_configuration_says_otherwise() -> None:
    buffer = ReplayBuffer(
        Ledger(max_losses=1),
        Admission(groups_per_batch=1, max_staleness=0, iterations=99),
        timeout_s=1000.0,
        straggler_timeout_s=RolloutConfig().straggler_timeout_s,
    )
    cut: list[int] = []
    buffer.cancel = lambda leases: cut.extend(lease.group for lease in leases)
    slow = await buffer.lease()
    taking = asyncio.create_task(buffer.sample(0, 1))
    await asyncio.sleep(900.0)
    assert cut == []
    buffer.record_progress(900.0)
    await asyncio.sleep(900.0)
    assert await buffer.add(aged_group(0, number=slow.group), slow)
    assert [group.id for group in await taking] == [0]
    assert buffer.take_stragglers_cut() == 0


@simulated
async def test_groups_that_do_not_come_are_an_error_that_says_what_to_do() -> None:
    buffer = plain_buffer(max_staleness=1, timeout_s=30.0)
    await play_group(buffer, 0)
    await buffer.lease()
    with pytest.raises(Exception, match=r"2 groups .*, got 1, with 1 under way, and none .* for 30 s"):
        await buffer.sample(0, 2)
    assert asyncio.get_running_loop().time() == 30.0


@simulated
async def test_a_group_without_a_lease_is_admitted_when_one_may_start() -> None:
    buffer = plain_buffer()
    adding = [asyncio.create_task(buffer.add(aged_group(0))) for _ in range(3)]
    assert [group.id for group in await buffer.sample(0, 2)] == [0, 1]
    await asyncio.sleep(1.0)
    assert not adding[2].done()
    buffer.record_served(1)
    assert await adding[2]
    # It was played with the weights before: it is thrown away, counted, and makes room.
    taking = asyncio.create_task(buffer.sample(1, 2))
    await asyncio.sleep(0)
    assert await buffer.add(aged_group(1))
    assert await buffer.add(aged_group(1))
    assert [group.version for group in await taking] == [1, 1]
    assert buffer.ledger.dropped == {STALE: 1}


@simulated
async def test_a_step_takes_the_oldest_weights_and_not_the_lowest_numbers() -> None:
    buffer = plain_buffer(max_staleness=1)
    leases = [await buffer.lease() for _ in range(4)]
    for lost in leases[:2]:
        buffer.lose(lost)
    buffer.record_served(1)
    leases[:2] = [await buffer.lease() for _ in range(2)]  # begun anew, under newer weights
    for lease in leases:
        assert await buffer.add(aged_group(lease.floor, number=lease.group), lease)
    batches = [await buffer.sample(version, 2) for version in (1, 2)]
    assert [[group.id for group in step] for step in batches] == [[2, 3], [0, 1]]


@simulated
async def test_a_failure_reaches_whoever_waits_now_or_later() -> None:
    buffer = plain_buffer()
    waiting = asyncio.create_task(buffer.sample(0, 2))
    await asyncio.sleep(1.0)
    buffer.fail(ZeroDivisionError("the dispatcher is gone"))
    buffer.fail(KeyError("a consequence"))
    for call in (waiting, buffer.sample(0, 2), buffer.lease()):
        with pytest.raises(ZeroDivisionError, match="the dispatcher is gone"):
            await call


@simulated
async def test_finished_groups_survive_a_rewind_and_leased_ones_are_played_again() -> None:
    buffer = plain_buffer(max_staleness=1)
    kept = await play_group(buffer, 0)
    lease = await buffer.lease()
    state = buffer.state()
    assert await buffer.add(aged_group(0, number=lease.group), lease)
    await buffer.sample(0, 2)

    buffer.restore(*state, served=0)
    assert not await buffer.add(aged_group(0, number=lease.group), lease)
    again = await buffer.lease()
    assert (again.group, again.attempt) == (lease.group, 2)
    assert await buffer.add(aged_group(0, number=again.group), again)
    assert await buffer.sample(0, 2) == [kept, aged_group(0, number=1)]

    buffer.restore(*state, served=2)  # where the bound is another: the finished one is too old
    taking = asyncio.create_task(buffer.sample(2, 2))
    await asyncio.sleep(1.0)
    for _ in range(2):
        await play_group(buffer, 2)
    assert [group.version for group in await taking] == [2, 2]
    assert buffer.ledger.dropped == {STALE: 1}

    with pytest.raises(Exception, match=r"hold the finished groups \[0\], got \[\]; it is damaged"):
        buffer.restore(state[0], [], served=0)


@pytest.mark.parametrize(("groups_per_batch", "max_staleness"), [(3, 4), (20, 0)])
@simulated
async def test_resumption_with_another_batch_size_plays_what_its_steps_take(
    groups_per_batch: int, max_staleness: int
) -> None:
    async def steps(first: int, last: int, batch_size: int, *saved: Any) -> ReplayBuffer:
        admission = Admission(groups_per_batch=batch_size, max_staleness=max_staleness, iterations=50)
        buffer = ReplayBuffer(Ledger(max_losses=2), admission, timeout_s=1000.0, straggler_timeout_s=30.0)
        if saved:
            buffer.restore(*saved, served=first)

        async def work() -> None:
            while True:
                lease = await buffer.lease()
                await buffer.add(aged_group(admission.served, number=lease.group), lease)
                await asyncio.sleep(1.0)

        workers = [asyncio.create_task(work()) for _ in range(4)]
        for version in range(first, last):
            await buffer.sample(version, batch_size)
            await asyncio.sleep(3.0)
            buffer.record_served(version + 1)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        return buffer

    before = await steps(0, 20, 8)
    ledger = (await steps(20, 50, groups_per_batch, *before.state())).ledger
    assert ledger.trained == 20 * 8 + 30 * groups_per_batch
    # Of what had been played for steps of another size some may become too old; nothing is played in vain after it.
    assert ledger.dropped.total() <= max_staleness * 8
    assert ledger.admitted <= ledger.trained + ledger.dropped.total() + (max_staleness + 1) * 8
