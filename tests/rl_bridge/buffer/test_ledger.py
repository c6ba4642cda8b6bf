"""The ledger: a group is trained at most once, through losses, rewinds and late results, and none is forgotten."""

import json
from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rl_bridge.buffer.ledger import Fate, GroupLease, Ledger, UnfinishedGroup


def take_lease(ledger: Ledger, *, served: int = 0, now: float = 0.0) -> GroupLease:
    lease = ledger.lease(served=served, now=now, admit=True)
    assert lease is not None
    return lease


def test_lost_work_goes_out_again_ahead_of_new_work_and_its_first_result_is_late() -> None:
    ledger = Ledger(max_losses=2)
    lost, _ = take_lease(ledger), take_lease(ledger)
    assert ledger.lose(lost.id)
    again = ledger.lease(served=5, now=1.0, admit=False)  # it was admitted once, and need not be again
    assert again is not None
    assert (again.group, again.attempt, again.floor) == (0, 2, 5)
    assert not ledger.complete(lost.id)
    assert ledger.complete(again.id)
    assert not ledger.complete(again.id)
    assert not ledger.lose(again.id)
    assert ledger.finished == {0}
    assert (ledger.late, ledger.lost, ledger.admitted) == (3, 1, 2)


def test_group_lost_too_often_is_dropped_with_the_reason() -> None:
    ledger, fates = Ledger(max_losses=2), list[Fate]()
    ledger.on_fate = fates.append
    assert [ledger.lose(take_lease(ledger).id) for _ in range(3)] == [True, True, False]
    assert ledger.dropped == {"lost 3 times": 1}
    assert fates == [Fate(group=0, reason="lost 3 times")]
    assert (ledger.live, ledger.waiting) == (0, 0)
    assert take_lease(ledger).group == 1


def test_handed_on_group_is_no_loss_and_keeps_its_age() -> None:
    ledger = Ledger(max_losses=0)
    assert ledger.return_unfinished(take_lease(ledger, served=2).id, floor=2)
    assert ledger.unfinished_groups(served=5) == [UnfinishedGroup(floor=2)]
    again = take_lease(ledger, served=4)
    assert (again.group, again.attempt, again.floor) == (0, 2, 2)
    assert ledger.unfinished_groups(served=5) == [UnfinishedGroup(floor=2, lease=again)]
    assert ledger.return_unfinished(again.id, floor=None)  # nothing was kept: it is as good as new
    assert ledger.unfinished_groups(served=5) == [UnfinishedGroup(floor=5)]
    assert take_lease(ledger, served=4).floor == 4
    assert ledger.lost == 0
    twice = Ledger(max_losses=1)
    assert twice.return_unfinished(take_lease(twice, served=0).id, floor=None)
    assert twice.lose(take_lease(twice, served=0).id)  # the first loss of the one that it may have
    assert twice.return_unfinished(take_lease(twice, served=0).id, floor=None)
    assert not twice.lose(take_lease(twice, served=0).id)  # which being handed on does not make good
    kept = Ledger(max_losses=1)
    assert kept.lose(take_lease(kept, served=3).id, floor=3)  # also where the worker after it is lost
    assert take_lease(kept, served=4).floor == 3


def test_a_lease_knows_the_first_group_of_its_weights() -> None:
    ledger = Ledger(max_losses=3)
    assert [take_lease(ledger, served=0).first for _ in range(2)] == [0, 0]
    lost = take_lease(ledger, served=1)
    assert ledger.lose(lost.id)
    assert [take_lease(ledger, served=1).first for _ in range(2)] == [2, 2]
    state = json.loads(json.dumps(ledger.state()))
    assert take_lease(ledger, served=2).first == 4

    # It is the same after a rewind, though those under way are given out again.
    ledger.restore(state)
    assert [take_lease(ledger, served=1).first for _ in range(3)] == [2, 2, 2]


def test_a_state_goes_through_json_and_makes_older_leases_void() -> None:
    ledger = Ledger(max_losses=3)
    trained, finished, given_back, under_way, lost = (take_lease(ledger) for _ in range(5))
    for lease in (trained, finished):
        assert ledger.complete(lease.id)
    ledger.train(trained.group, 0)
    assert ledger.return_unfinished(given_back.id, floor=0)
    assert ledger.lose(lost.id)
    state = json.loads(json.dumps(ledger.state()))
    assert ledger.complete(under_way.id)  # after the checkpoint, so it has not happened
    later = take_lease(ledger)

    ledger.restore(state)
    assert (ledger.admitted, ledger.trained, set(ledger.finished)) == (5, 1, {finished.group})
    assert not ledger.complete(later.id)
    redone = [take_lease(ledger, served=1) for _ in range(4)]
    assert [lease.group for lease in redone] == [given_back.group, lost.group, under_way.group, 5]
    assert [lease.attempt for lease in redone] == [2, 2, 2, 1]
    assert {lease.floor for lease in redone} == {1}
    assert min(lease.id for lease in redone) > later.id

    other = Ledger(max_losses=3)
    other.restore(state)
    assert json.loads(json.dumps(other.state())) == state


ENDS: dict[str, dict[str, Any]] = {
    "complete": {},
    "lose": {},
    "return_unfinished": {"floor": 0},
    "drop": {"reason": "because"},
}


class LedgerMachine(RuleBasedStateMachine):
    """Random lives of groups, a rewind now and then, held against a list of what was handed out and trained."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(max_losses=2)
        self.fates: list[Fate] = []
        self.ledger.on_fate = lambda fate: self.fates.append(fate)  # the list changes in a rewind
        self.current: dict[int, GroupLease] = {}
        self.void: list[GroupLease] = []
        self.seen: set[int] = set()
        self.trained: list[int] = []
        self.dropped = 0
        self.saved: tuple[dict[str, object], list[int], int, list[Fate]] | None = None

    @rule(admit=st.booleans(), served=st.integers(0, 5))
    def lease(self, admit: bool, served: int) -> None:
        waiting = self.ledger.waiting
        lease = self.ledger.lease(served=served, now=0.0, admit=admit)
        assert (lease is None) == (not admit and not waiting)
        if lease is not None:
            assert lease.id not in self.seen
            assert lease.group not in {one.group for one in self.current.values()}
            assert lease.group not in self.trained
            self.seen.add(lease.id)
            self.current[lease.id] = lease

    @precondition(lambda self: self.current)
    @rule(data=st.data(), end=st.sampled_from([*ENDS]))
    def end(self, data: st.DataObject, end: str) -> None:
        lease = self.current.pop(data.draw(st.sampled_from(sorted(self.current))))
        dropped = self.ledger.dropped.total()
        went_on = getattr(self.ledger, end)(lease.id, **ENDS[end])
        dropped = self.ledger.dropped.total() - dropped
        assert went_on == (end == "drop" or not dropped)
        self.dropped += dropped
        self.void.append(lease)

    @precondition(lambda self: self.void)
    @rule(data=st.data(), end=st.sampled_from([*ENDS]))
    def come_late(self, data: st.DataObject, end: str) -> None:
        lease = data.draw(st.sampled_from(self.void))
        before = self.ledger.state()
        assert not getattr(self.ledger, end)(lease.id, **ENDS[end])
        assert self.ledger.state() == {**before, "late": before["late"] + 1}

    @precondition(lambda self: self.ledger.finished)
    @rule(data=st.data(), version=st.integers(0, 5), good=st.booleans())
    def use(self, data: st.DataObject, version: int, good: bool) -> None:
        group = data.draw(st.sampled_from(sorted(self.ledger.finished)))
        if good:
            self.ledger.train(group, version)
            self.trained.append(group)
        else:
            self.ledger.discard(group, "stale")
            self.dropped += 1

    @rule()
    def save(self) -> None:
        state = json.loads(json.dumps(self.ledger.state()))
        self.saved = state, list(self.trained), self.dropped, list(self.fates)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def rewind(self) -> None:
        assert self.saved is not None
        state, trained, self.dropped, fates = self.saved
        self.ledger.restore(state)
        self.trained, self.fates = list(trained), list(fates)
        self.void.extend(self.current.values())
        self.current.clear()

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        ledger = self.ledger
        assert ledger.admitted == (
            ledger.trained + len(ledger.finished) + len(ledger.leases) + ledger.waiting + self.dropped
        )
        assert ledger.live == ledger.admitted - self.dropped
        assert {lease.id for lease in ledger.leases} == set(self.current)

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        assert max(Counter(self.trained).values(), default=0) <= 1
        fates = Counter(fate.group for fate in self.fates)
        assert max(fates.values(), default=0) <= 1
        assert sorted(self.trained) == sorted(f.group for f in self.fates if f.version is not None)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=30, stateful_step_count=40)
