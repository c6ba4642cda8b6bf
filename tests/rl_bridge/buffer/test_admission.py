"""The bound on staleness, over 10,000 groups of heavy-tailed lengths that are lost, dropped, late, cut and rewound."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from buffer_fixtures import aged_group
from simulated_time import simulated

from rl_bridge.buffer.ledger import GroupLease, Ledger
from rl_bridge.buffer.replay import CANCEL_GRACE_PERIOD_S, STALE, STRAGGLER, Admission, ReplayBuffer
from rl_bridge.types import Group

GROUPS_PER_BATCH = 8
SLOTS = 24
"""Groups that the simulated workers play at once."""


class SimulatedRun:
    """The loop and its workers, with sleeps for work: the buffer, the ledger and the admission are the real ones."""

    def __init__(self, *, max_staleness: int, steps: int, troubles: bool) -> None:
        self.random = random.Random(max_staleness)
        self.troubles = troubles
        self.steps = steps
        self.served = 0
        self.stopped_playing: dict[int, asyncio.Event] = {}
        self.buffer = ReplayBuffer(
            Ledger(max_losses=2),
            Admission(groups_per_batch=GROUPS_PER_BATCH, max_staleness=max_staleness, iterations=steps),
            timeout_s=10_000.0,
            straggler_timeout_s=30.0,
        )
        self.buffer.cancel = self.on_stragglers
        self.staleness = Counter[int]()
        self.trained: list[int] = []
        self.attempts = Counter[int]()
        self.cut = 0
        self.most_in_flight = 0

    def on_stragglers(self, leases: object) -> None:
        for lease in leases:  # type: ignore[attr-defined]
            self.cut += 1
            if self.random.random() < 0.8:  # the others do not listen
                self.stopped_playing[lease.id].set()

    async def work(self) -> None:
        """One slot: lease, play, hand in, for ever."""
        while True:
            lease = await self.buffer.lease()
            self.attempts[lease.attempt] += 1
            self.most_in_flight = max(self.most_in_flight, len(self.buffer.ledger.leases))
            await self.play(lease)

    async def play(self, lease: GroupLease) -> None:
        versions = [self.served]
        stopped = self.stopped_playing[lease.id] = asyncio.Event()
        for _ in range(self.random.randint(1, 3)):
            try:
                async with asyncio.timeout(self.random.lognormvariate(1.0, 1.5)):
                    await stopped.wait()
                break
            except TimeoutError:
                versions.append(self.served)
        del self.stopped_playing[lease.id]
        group = aged_group(*versions, number=lease.group)
        luck = self.random.random() if self.troubles else 1.0
        if luck < 0.05:
            self.buffer.lose(lease)
        elif luck < 0.10:
            self.buffer.drop(lease, "no reward")
        elif luck < 0.15:
            self.buffer.return_unfinished(lease, floor=self.random.choice([None, lease.floor]))
        elif luck < 0.18:  # taken for lost, and yet it answers
            self.buffer.lose(lease)
            assert not await self.buffer.add(group, lease)
        else:
            await self.buffer.add(group, lease)

    async def loop(self) -> None:
        saved = self.buffer.state()
        saved_at, trained_then, rewinds = 0, 0, 0
        version = 0
        while version < self.steps:
            groups = await self.buffer.sample(version, GROUPS_PER_BATCH)
            assert len(groups) == GROUPS_PER_BATCH
            assert [group.id for group in groups] == sorted(group.id for group in groups)
            for group in groups:
                self.staleness[version - group.version] += 1
                self.trained.append(group.id)
            await asyncio.sleep(self.random.uniform(1.0, 10.0))
            if self.troubles and rewinds < 5 and self.random.random() < 0.02:
                rewinds += 1
                version = saved_at
                del self.trained[trained_then:]
                self.served = version
                self.buffer.restore(*saved, served=version)
                continue
            version += 1
            await asyncio.sleep(self.random.uniform(0.1, 1.0))  # the generators take the weights
            self.served = version
            self.buffer.record_served(version)
            if version % 50 == 0:
                saved = self.buffer.state()
                saved_at, trained_then = version, len(self.trained)

    async def run(self) -> None:
        workers = [asyncio.create_task(self.work()) for _ in range(SLOTS)]
        try:
            await self.loop()
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


@pytest.mark.parametrize(
    ("max_staleness", "troubles"),
    [(0, True), (4, False), pytest.param(4, True, marks=pytest.mark.slow)],
)
@simulated
async def test_staleness_bound_holds_and_every_step_gets_its_groups(
    max_staleness: int, troubles: bool
) -> None:
    steps = 10_000 // GROUPS_PER_BATCH if max_staleness == 4 and troubles else 80
    run = SimulatedRun(max_staleness=max_staleness, steps=steps, troubles=troubles)
    await run.run()  # raises where everybody waits
    ledger = run.buffer.ledger
    assert len(run.trained) == len(set(run.trained)) == steps * GROUPS_PER_BATCH
    assert min(run.staleness) >= 0
    assert max(run.staleness) == max_staleness  # the bound is used, and kept
    assert run.most_in_flight <= min(SLOTS, (max_staleness + 1) * GROUPS_PER_BATCH)
    assert not ledger.dropped[STALE]  # nothing was played for nothing
    assert ledger.live == ledger.trained == len(run.trained)
    assert (len(ledger.leases), ledger.waiting, len(run.buffer)) == (0, 0, 0)
    if troubles:
        assert ledger.dropped["no reward"]
        assert ledger.late
        assert run.attempts[2]
        assert run.cut
        assert ledger.dropped[STRAGGLER]


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
    assert not await buffer.add(aged_group(0, number=stuck.group), stuck)
    await play_group(buffer, 0)
    assert [group.id for group in await taking] == [0, 3]
    assert buffer.ledger.dropped == {"1 of 4 siblings": 1, STRAGGLER: 1}


@simulated
async def test_groups_that_do_not_come_are_an_error_that_says_what_to_do() -> None:
    buffer = plain_buffer(max_staleness=1, timeout_s=30.0)
    await play_group(buffer, 0)
    await buffer.lease()
    with pytest.raises(Exception, match=r"expected 2 groups .* within 30 s, got 1, with 1 under way; raise"):
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

    with pytest.raises(Exception, match=r"hold the finished groups \[0\], got \[\]; it is damaged"):
        buffer.restore(state[0], [], served=0)


@simulated
async def test_resumption_with_another_batch_size_plays_what_its_steps_take() -> None:
    max_staleness = 4

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
    ledger = (await steps(20, 50, 3, *before.state())).ledger
    assert ledger.trained == 20 * 8 + 30 * 3
    # Of what had been played for steps of another size some may become too old; nothing is played in vain after it.
    assert ledger.dropped.total() <= max_staleness * 8
    assert ledger.admitted <= ledger.trained + ledger.dropped.total() + (max_staleness + 1) * 8
