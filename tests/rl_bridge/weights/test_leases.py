"""Leases end when they are given back or when their time is over; a transfer renews its own as long as it takes."""

import asyncio

import pytest

from rl_bridge.errors import SnapshotOverwrittenError, WeightsError
from rl_bridge.weights import directory as leased
from rl_bridge.weights.directory import WeightDirectory, under_lease
from rl_bridge.weights.snapshot import Contribution, Key, Origin, Publication, Snapshot

FIRST, SECOND = Publication(group="trainer", number=1), Publication(group="trainer", number=2)
ORIGIN = Origin(machine="one", pid=1, started=1, rank=0)


async def test_a_snapshot_that_is_read_is_not_given_up_and_one_given_up_is_not_read() -> None:
    directory = WeightDirectory()
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
    with pytest.raises(WeightsError, match="there is: nothing"):
        await directory.find(1, 0)
    with pytest.raises(SnapshotOverwrittenError, match="version 1"):
        await directory.lease(1, FIRST, "late", 60)


PUBLICATION = Publication(group="trainer", number=1)
CONTRIBUTION = Contribution(origin=Origin(machine="one", pid=1, started=1, rank=0), location=None, parts={})
SNAPSHOT = Snapshot(key=1, publication=PUBLICATION, contributions=[CONTRIBUTION])
SHORT_S = 0.03
"""How long leases last by the directory's clock, which a test moves on; they are renewed by the real one."""
HANG_S = 30.0
"""A bound for what would hang otherwise; none is meant to come near it."""


class Directory(WeightDirectory):
    """Has one snapshot, counts leases, and may not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.leased = 0
        self.silent = False
        self.refused = 0
        self.clock = lambda: self.now

    async def publish(self) -> None:
        await self.announce(1, PUBLICATION, CONTRIBUTION.origin, 1, None)
        await self.complete(1, PUBLICATION, CONTRIBUTION)

    async def lease(self, key: Key, publication: Publication, holder: str, seconds: float) -> None:
        if self.silent:
            self.refused += 1
            raise WeightsError("expected an answer of the weight store's directory")
        await super().lease(key, publication, holder, seconds)
        self.leased += 1

    async def holders(self) -> list[str]:
        """Ask as a publisher does; where nobody holds it, the snapshot is given up."""
        return await self.retire(1, PUBLICATION)


class Transfer:
    """Takes as long as the test says, and fails with what it says."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()
        self.began = asyncio.Event()
        self.failure: Exception | None = None
        self.cancelled = False

    async def __call__(self) -> None:
        self.began.set()
        try:
            await self.ends.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.failure is not None:
            raise self.failure


@pytest.fixture(autouse=True)
def _short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leased, "LEASE_DURATION_S", SHORT_S)


@pytest.fixture
async def directory() -> Directory:
    directory = Directory()
    await directory.publish()
    return directory


async def until_leased_again(directory: Directory) -> None:
    before = directory.leased
    async with asyncio.timeout(HANG_S):
        while directory.leased == before:  # noqa: ASYNC110 - it is about a timer
            await asyncio.sleep(0.001)


async def test_a_lease_is_renewed_as_long_as_the_transfer_takes_and_then_ends(directory: Directory) -> None:
    transfer = Transfer()
    reading = asyncio.create_task(under_lease(directory, SNAPSHOT, "reader", transfer))
    await transfer.began.wait()
    for _ in range(4):
        directory.now += 0.9 * SHORT_S
        await until_leased_again(directory)
        assert await directory.holders() == ["reader"]
    transfer.ends.set()
    async with asyncio.timeout(HANG_S):
        await reading
    assert await directory.holders() == []


@pytest.mark.parametrize("failure", [None, ConnectionError("reset")])
@pytest.mark.parametrize("ends", [True, False])
async def test_what_was_given_up_under_a_transfer_is_never_taken_for_good(
    directory: Directory, ends: bool, failure: Exception | None
) -> None:
    transfer = Transfer()
    transfer.failure = failure
    reading = asyncio.create_task(under_lease(directory, SNAPSHOT, "reader", transfer))
    await transfer.began.wait()
    directory.now += 2 * SHORT_S  # the reader stood still
    assert await directory.holders() == []
    if ends:
        transfer.ends.set()
    async with asyncio.timeout(HANG_S):
        with pytest.raises(SnapshotOverwrittenError, match="version 1"):
            await reading
    assert transfer.cancelled is not ends
    assert not directory._leases


async def test_a_transfer_that_fails_says_of_what_and_leaves_no_lease(directory: Directory) -> None:
    transfer = Transfer()
    transfer.failure = ConnectionError("reset by peer")
    transfer.ends.set()
    with pytest.raises(ConnectionError, match="reset by peer"):
        await under_lease(directory, SNAPSHOT, "reader", transfer)
    assert await directory.holders() == []
    with pytest.raises(SnapshotOverwrittenError):
        await under_lease(directory, SNAPSHOT, "late reader", Transfer())


async def test_a_directory_that_does_not_answer_at_the_end_leaves_the_bytes_in_doubt(
    directory: Directory,
) -> None:
    transfer = Transfer()
    reading = asyncio.create_task(under_lease(directory, SNAPSHOT, "reader", transfer))
    await transfer.began.wait()
    directory.silent = True
    transfer.ends.set()
    with pytest.raises(WeightsError, match="expected an answer"):
        await reading


async def test_a_reader_that_is_cancelled_leaves_no_lease(directory: Directory) -> None:
    transfer = Transfer()
    reading = asyncio.create_task(under_lease(directory, SNAPSHOT, "reader", transfer))
    await transfer.began.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert transfer.cancelled
    assert await directory.holders() == []
