"""Leases end when they are given back, or when their time is over."""

import pytest

from rl_bridge.errors import SnapshotOverwritten
from rl_bridge.weights.directory import LocalDirectory
from rl_bridge.weights.leases import Leases
from rl_bridge.weights.snapshot import Contribution, Origin, Publication, Snapshot

FIRST, SECOND = Publication(group="trainer", number=1), Publication(group="trainer", number=2)
ORIGIN = Origin(machine="one", pid=1, started=1, rank=0)


def test_a_lease_ends_with_its_reader_or_with_its_time() -> None:
    now = 100.0
    leases = Leases(clock=lambda: now)
    leases.grant(1, FIRST, "quick", 10)
    leases.grant(1, FIRST, "dead", 10)
    leases.grant(1, SECOND, "other", 1)
    assert leases.holders(1, FIRST) == ["quick", "dead"]
    leases.end(1, FIRST, "quick")
    now = 105.0
    assert leases.holders(1, FIRST) == ["dead"]
    leases.grant(1, FIRST, "dead", 10)
    now = 114.0
    assert leases.holders(1, FIRST) == ["dead"]
    now = 115.0
    assert leases.holders(1, FIRST) == leases.holders(1, SECOND) == []
    leases.end(1, FIRST, "dead")  # late, and no harm
    assert not leases._until, "what is over is forgotten"


async def test_a_snapshot_that_is_read_is_not_given_up_and_one_given_up_is_not_read() -> None:
    directory = LocalDirectory()
    await directory.announce(1, FIRST, ORIGIN, 1, None)
    await directory.complete(1, FIRST, Contribution(origin=ORIGIN, location=None, parts={}))
    await directory.lease(1, FIRST, "reader", 60)
    assert await directory.retire(1, FIRST) == ["reader"]
    assert isinstance(await directory.find(1, 0), Snapshot)
    # An older publishing of the same key is nobody's.
    assert await directory.retire(1, SECOND) == []
    assert isinstance(await directory.find(1, 0), Snapshot)
    await directory.end_lease(1, FIRST, "reader")
    assert await directory.retire(1, FIRST) == []
    assert await directory.latest() is None
    with pytest.raises(SnapshotOverwritten, match="version 1"):
        await directory.lease(1, FIRST, "late", 60)
