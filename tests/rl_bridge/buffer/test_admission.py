"""The bound on staleness, over 10,000 groups of heavy-tailed lengths that are lost, dropped, late, cut and rewound."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from buffer_fixtures import aged_group
from simulated_time import simulate

from rl_bridge.buffer.ledger import GroupLease, Ledger
from rl_bridge.buffer.replay import CANCEL_GRACE_PERIOD_S, STALE, STRAGGLER, Admission, ReplayBuffer
from rl_bridge.types import Group

GROUPS_PER_BATCH = 8
SLOTS = 24
"""Groups that the simulated workers play at once."""


@dataclass
class Seen:
    """What a run looked like from outside."""

    staleness: Counter[int] = field(default_factory=Counter)
    trained: list[int] = field(default_factory=list)
    attempts: Counter[int] = field(default_factory=Counter)
    cut: int = 0
    most_in_flight: int = 0
    slots_taken: int = 0
    slots_freed: int = 0


class Run:
    """The loop and its workers, with sleeps for work: the buffer, the ledger and the admission are the real ones."""

    def __init__(self, *, max_staleness: int, steps: int, seed: int, troubles: bool) -> None:
        self.random = random.Random(seed)
        self.troubles = troubles
        self.steps = steps
        self.max_staleness = max_staleness
        self.seen = Seen()
        self.served = 0
        self.stopped_playing: dict[int, asyncio.Event] = {}
        self.admission = Admission(
            groups_per_batch=GROUPS_PER_BATCH, max_staleness=max_staleness, iterations=steps
        )
        self.buffer = ReplayBuffer(
            Ledger(max_losses=2), self.admission, timeout_s=10_000.0, straggler_timeout_s=30.0
        )
        self.buffer.cancel = self.on_stragglers

    def on_stragglers(self, leases: object) -> None:
        for lease in leases:  # type: ignore[attr-defined]
            self.seen.cut += 1
            if self.random.random() < 0.8:  # the others do not listen
                self.stopped_playing[lease.id].set()

    async def work(self) -> None:
        """One slot: lease, play, hand in, for ever."""
        while True:
            lease = await self.buffer.lease()
            self.seen.slots_taken += 1
            self.seen.attempts[lease.attempt] += 1
            self.seen.most_in_flight = max(self.seen.most_in_flight, len(self.buffer.ledger.leases))
            try:
                await self.play(lease)
            finally:
                self.seen.slots_freed += 1

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
                self.seen.staleness[version - group.version] += 1
                self.seen.trained.append(group.id)
            await asyncio.sleep(self.random.uniform(1.0, 10.0))
            if self.troubles and rewinds < 5 and self.random.random() < 0.02:
                rewinds += 1
                version = saved_at
                del self.seen.trained[trained_then:]
                self.served = version
                self.buffer.restore(*saved, served=version)
                continue
            version += 1
            await asyncio.sleep(self.random.uniform(0.1, 1.0))  # the generators take the weights
            self.served = version
            self.buffer.record_served(version)
            if version % 50 == 0:
                saved = self.buffer.state()
                saved_at, trained_then = version, len(self.seen.trained)

    async def __call__(self) -> Seen:
        workers = [asyncio.create_task(self.work()) for _ in range(SLOTS)]
        try:
            await self.loop()
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return self.seen


@pytest.mark.parametrize(
    ("max_staleness", "troubles"),
    [(0, True), (4, False), pytest.param(4, True, marks=pytest.mark.slow)],
)
def test_the_bound_is_never_broken_and_nobody_waits_for_ever(max_staleness: int, troubles: bool) -> None:
    steps = 10_000 // GROUPS_PER_BATCH if max_staleness == 4 and troubles else 80
    run = Run(max_staleness=max_staleness, steps=steps, seed=max_staleness, troubles=troubles)
    seen = simulate(run())  # raises where everybody waits
    ledger = run.buffer.ledger
    assert len(seen.trained) == len(set(seen.trained)) == steps * GROUPS_PER_BATCH
    assert min(seen.staleness) >= 0
    assert max(seen.staleness) == max_staleness  # the bound is used, and kept
    assert seen.slots_taken == seen.slots_freed
    assert seen.most_in_flight <= min(SLOTS, (max_staleness + 1) * GROUPS_PER_BATCH)
    assert not ledger.dropped[STALE]  # nothing was played for nothing
    assert ledger.live == ledger.trained == len(seen.trained)
    assert (len(ledger.leases), ledger.waiting, len(run.buffer)) == (0, 0, 0)
    if troubles:
        assert ledger.dropped["no reward"]
        assert ledger.late
        assert seen.attempts[2]
        assert seen.cut
        assert ledger.dropped[STRAGGLER]
    elif not max_staleness:
        assert seen.trained == list(range(len(seen.trained)))


def plain_buffer(*, max_staleness: int = 0, groups: int = 2, timeout_s: float = 1000.0) -> ReplayBuffer:
    return ReplayBuffer(
        Ledger(max_losses=1),
        Admission(groups_per_batch=groups, max_staleness=max_staleness, iterations=99),
        timeout_s=timeout_s,
        straggler_timeout_s=60.0,
    )


async def played(buffer: ReplayBuffer, *versions: int) -> Group:
    lease = await buffer.lease()
    group = aged_group(*versions, number=lease.group)
    assert await buffer.add(group, lease)
    return group


def test_the_oldest_go_first_and_none_that_could_not_wait_is_left_behind() -> None:
    async def scenario() -> None:
        buffer = plain_buffer(max_staleness=1)
        slow = await buffer.lease()
        for _ in range(3):
            await played(buffer, 0)
        # Three are there, and the slow one may still wait for the next step.
        assert [group.id for group in await buffer.sample(0, 2)] == [1, 2]
        buffer.record_served(1)
        young = [await played(buffer, 1) for _ in range(2)]
        taking = asyncio.create_task(buffer.sample(1, 2))
        await asyncio.sleep(50.0)
        assert not taking.done()  # three are there, but the slow one may not be left behind
        assert await buffer.add(aged_group(0, 1, number=slow.group), slow)
        assert [group.id for group in await taking] == [0, 3]
        assert [group.id for group in young] == [4, 5]

    simulate(scenario())


def test_a_straggler_is_cut_and_dropped_where_that_does_not_help() -> None:
    async def scenario() -> None:
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
        await played(buffer, 0)
        assert [group.id for group in await taking] == [0, 3]
        assert buffer.ledger.dropped == {"1 of 4 siblings": 1, STRAGGLER: 1}

    simulate(scenario())


def test_groups_that_do_not_come_are_an_error_that_says_what_to_do() -> None:
    async def scenario() -> None:
        buffer = plain_buffer(max_staleness=1, timeout_s=30.0)
        await played(buffer, 0)
        await buffer.lease()
        with pytest.raises(
            Exception, match=r"expected 2 groups .* within 30 s, got 1, with 1 under way; raise"
        ):
            await buffer.sample(0, 2)
        assert asyncio.get_running_loop().time() == 30.0

    simulate(scenario())


def test_a_group_without_a_lease_is_admitted_when_one_may_start() -> None:
    async def scenario() -> None:
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

    simulate(scenario())


def test_a_step_takes_the_oldest_weights_and_not_the_lowest_numbers() -> None:
    async def scenario() -> None:
        buffer = plain_buffer(max_staleness=1)
        leases = [await buffer.lease() for _ in range(4)]
        for lost in leases[:2]:
            buffer.lose(lost)
        buffer.record_served(1)
        leases[:2] = [await buffer.lease() for _ in range(2)]  # begun anew, under newer weights
        for lease in leases:
            assert await buffer.add(aged_group(lease.floor, number=lease.group), lease)
        taken = [await buffer.sample(version, 2) for version in (1, 2)]
        assert [[group.id for group in step] for step in taken] == [[2, 3], [0, 1]]

    simulate(scenario())


def test_a_failure_reaches_whoever_waits_now_or_later() -> None:
    async def scenario() -> None:
        buffer = plain_buffer()
        waiting = asyncio.create_task(buffer.sample(0, 2))
        await asyncio.sleep(1.0)
        buffer.fail(ZeroDivisionError("the dispatcher is gone"))
        buffer.fail(KeyError("a consequence"))
        for call in (waiting, buffer.sample(0, 2), buffer.lease()):
            with pytest.raises(ZeroDivisionError, match="the dispatcher is gone"):
                await call

    simulate(scenario())


def test_what_was_finished_survives_a_rewind_and_what_was_leased_is_played_again() -> None:
    async def scenario() -> None:
        buffer = plain_buffer(max_staleness=1)
        kept = await played(buffer, 0)
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

    simulate(scenario())


@pytest.mark.parametrize(("groups_per_batch", "max_staleness"), [(3, 4), (20, 0)])
def test_resumption_with_another_batch_size_plays_what_its_steps_take(
    groups_per_batch: int, max_staleness: int
) -> None:
    async def steps(buffer: ReplayBuffer, first: int, last: int, batch_size: int) -> None:
        async def work() -> None:
            while True:
                lease = await buffer.lease()
                await buffer.add(aged_group(buffer.admission.served, number=lease.group), lease)
                await asyncio.sleep(1.0)

        workers = [asyncio.create_task(work()) for _ in range(4)]
        for version in range(first, last):
            await buffer.sample(version, batch_size)
            await asyncio.sleep(3.0)
            buffer.record_served(version + 1)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    def fresh(batch_size: int) -> ReplayBuffer:
        admission = Admission(groups_per_batch=batch_size, max_staleness=max_staleness, iterations=50)
        return ReplayBuffer(Ledger(max_losses=2), admission, timeout_s=1000.0, straggler_timeout_s=30.0)

    async def both() -> Ledger:
        before = fresh(8)
        await steps(before, 0, 20, 8)
        ledger, groups = before.state()
        after = fresh(groups_per_batch)
        after.restore(ledger, groups, served=20)
        await steps(after, 20, 50, groups_per_batch)
        return after.ledger

    ledger = simulate(both())
    assert ledger.trained == 20 * 8 + 30 * groups_per_batch
    # Of what had been played for steps of another size some may become too old; nothing is played in vain after it.
    assert ledger.dropped.total() <= max_staleness * 8
    assert ledger.admitted <= ledger.trained + ledger.dropped.total() + (max_staleness + 1) * 8
