"""Handles, sessions and replays over targets that are no processes; local services."""

import asyncio

import pytest
from fake_target import FakeTarget

from rl_bridge.errors import NoReplicaError, ReplicaLostError, WeightsError
from rl_bridge.services import balancer as replays_module
from rl_bridge.services.balancer import Replays
from rl_bridge.services.handle import LocalService, Roster, ServiceHandle

HANG_S = 30.0
"""A bound for what would hang otherwise; none is meant to come near it."""


def roster(
    epoch: int, *targets: FakeTarget, lost: tuple[tuple[int, int], ...] = (), wait_s: float = 5.0
) -> Roster:
    return Roster("policy", epoch, frozenset({"ask", "tell"}), frozenset({"ask"}), wait_s, targets, lost)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("reported", [False, True])
async def test_calls_to_a_lost_replica_are_repeated_elsewhere_or_lost(reported: bool) -> None:
    first, second = FakeTarget(0), FakeTarget(1)
    handle = ServiceHandle(roster(1, first))
    first.hold()
    repeated, lost, cancelled = (
        asyncio.ensure_future(endpoint.route()) for endpoint in (handle.ask, handle.tell, handle.ask)
    )
    await turns()
    cancelled.cancel()
    if reported:
        handle.update(roster(2, second, lost=((0, 1),)))
    else:
        handle.update(roster(2, first, second))
        first.die()
    assert await repeated == 1
    reason = "the controller says that it is gone" if reported else "killed"
    with pytest.raises(ReplicaLostError, match=f"replica 0 of policy was lost during tell: {reason}"):
        await lost
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert second.calls == [("ask", ())]
    # Until the controller says so too, it is left out here.
    assert handle.serving == 1
    assert [await handle.tell.route() for _ in range(2)] == [1, 1]


async def test_an_error_of_ours_from_the_actor_is_no_loss_even_where_it_says_so() -> None:
    # A rollout worker, say, whose own call to another service was lost.
    target = FakeTarget(0)
    target.error = ReplicaLostError("replica 3 of another service was lost")
    handle = ServiceHandle(roster(1, target))
    with pytest.raises(ReplicaLostError, match="another service"):
        await handle.ask.route()
    assert handle.serving == 1
    assert len(target.calls) == 1


async def test_a_call_waits_for_a_replica_until_its_deadline() -> None:
    handle = ServiceHandle(roster(1, wait_s=30.0))
    request = asyncio.ensure_future(handle.ask.route())
    await turns()
    handle.update(roster(3, FakeTarget(2)))
    assert await request == 2
    handle.update(roster(2, FakeTarget(1)))  # older news
    assert await handle.ask.route() == 2
    with pytest.raises(
        NoReplicaError, match=r"expected a replica of policy to serve within 0\.05 s, none did"
    ):
        await ServiceHandle(roster(1, wait_s=0.05)).ask.route()


async def test_a_replica_that_came_back_starts_with_nothing_in_flight() -> None:
    first, other = FakeTarget(0), FakeTarget(1)
    handle = ServiceHandle(roster(1, first, other))
    first.hold()
    other.hold()
    under_way = [asyncio.ensure_future(handle.ask.route()) for _ in range(6)]
    await turns()
    again = FakeTarget(0, incarnation=2)
    again.hold()
    handle.update(roster(2, again, other, lost=((0, 1),)))
    await turns()
    # Three were lost and went to who has less: the three to the new one.
    assert (len(other.calls), len(again.calls)) == (3, 3)
    # What ended of the one before took nothing from the load of the new one.
    under_way += [asyncio.ensure_future(handle.ask.route()) for _ in range(6)]
    await turns()
    assert (len(other.calls), len(again.calls)) == (6, 6)
    again.released.set()
    other.released.set()
    assert sorted(await asyncio.gather(*under_way)) == [0] * 6 + [1] * 6


async def test_a_session_says_how_often_it_had_to_move() -> None:
    first, second = FakeTarget(0), FakeTarget(1)
    handle = ServiceHandle(roster(1, first, second))
    session = handle.session()
    home = session.replica
    assert home is not None
    assert [await session.tell.route() for _ in range(3)] == [home] * 3
    (first, second)[home].die()
    with pytest.raises(ReplicaLostError):
        await session.tell.route()
    assert [await session.ask.route() for _ in range(3)] == [1 - home] * 3
    assert (session.replica, session.moves) == (1 - home, 1)
    with pytest.raises(TypeError, match=r"call tell\.fanout on the service"):
        await session.tell.fanout()


async def test_a_closed_session_whose_call_moves_is_counted_nowhere() -> None:
    targets = [FakeTarget(0), FakeTarget(1)]
    handle = ServiceHandle(roster(1, *targets))
    sessions = [handle.session() for _ in range(4)]
    homes = [session.replica for session in sessions]
    targets[0].hold()
    asked = [asyncio.ensure_future(session.ask.route()) for session in sessions]
    await turns()
    for session in sessions:
        session.close()
    handle.update(roster(2, targets[1], lost=((0, 1),)))
    assert await asyncio.gather(*asked) == [1] * 4
    assert sorted(home for home in homes if home is not None) == [0, 0, 1, 1]
    handle.update(roster(3, FakeTarget(0, incarnation=2), targets[1]))
    again = [handle.session() for _ in range(4)]
    assert sorted(session.replica for session in again) == [0, 0, 1, 1]  # type: ignore[type-var]


async def test_sessions_are_spread_and_those_that_begin_alike_are_together_while_there_is_room() -> None:
    targets = [FakeTarget(number) for number in range(3)]
    handle = ServiceHandle(roster(1, *targets))
    homes = [handle.session() for _ in range(6)]
    assert sorted(home.replica for home in homes) == [0, 0, 1, 1, 2, 2]  # type: ignore[type-var]
    siblings = [handle.session(near=homes[0], max_sessions=5) for _ in range(4)]
    # The home's replica has two sessions and takes three more; the fourth goes where there are fewest.
    assert [one.replica == homes[0].replica for one in siblings] == [True, True, True, False]
    for one in siblings:
        one.close()
    again = handle.session(near=homes[0], max_sessions=9)
    assert again.replica == homes[0].replica
    # Where it is lost they meet again, and the lost one's sessions are counted no more.
    others = [target for target in targets if target.replica != homes[0].replica]
    handle.update(roster(2, *others))
    assert again.replica == homes[0].replica
    assert {one.replica for one in (*homes, again)} == {target.replica for target in others}


async def test_sessions_leave_a_replica_that_fails_whatever_it_is_asked() -> None:
    targets = [FakeTarget(0), FakeTarget(1)]
    handle = ServiceHandle(roster(1, *targets))
    sessions = [handle.session() for _ in range(4)]
    homes = [session.replica for session in sessions]
    home = homes[0]
    assert home is not None
    assert homes.count(home) == 2
    targets[home].error = WeightsError("broken")
    for _ in range(3):
        with pytest.raises(WeightsError):
            await sessions[0].ask.route()
    assert [await session.ask.route() for session in sessions] == [1 - home] * 4
    handle.update(roster(2))
    request = asyncio.ensure_future(sessions[0].ask.route())
    await turns()
    assert not request.done()  # it waits until somebody serves
    handle.update(roster(3, *targets))
    # Nobody is counted where it has been before.
    assert [handle.session().replica for _ in range(4)] == [home] * 4
    assert await request == 1 - home


def catch_up(replays: Replays, target: FakeTarget) -> "asyncio.Task[None]":
    return asyncio.ensure_future(replays.catch_up(target))


async def test_a_starting_replica_takes_the_last_of_each_fan_out_in_order() -> None:
    replays = Replays(("load", "tune"))
    assert replays.record("ask", (1,), {}) is None
    replays.record("load", (1,), {})
    replays.record("tune", (0.5,), {})
    superseded = replays.record("load", (2,), {})
    target = FakeTarget(3)
    target.hold()
    catching_up = catch_up(replays, target)
    await turns()
    later = [replays.record("load", (3,), {}), replays.record("tune", (0.7,), {})]  # while it takes the first
    target.released.set()
    await catching_up
    assert target.calls == [("tune", (0.5,)), ("load", (3,)), ("tune", (0.7,))]
    assert [one and one.values for one in (superseded, *later)] == [{}, {3: 3}, {3: 3}]


async def test_a_withdrawn_fan_out_gives_way_to_the_previous_one() -> None:
    replays, target = Replays((("load", "sleep"), "tune")), FakeTarget(3)
    only = replays.record("sleep", (), {})
    assert only is not None
    replays.withdraw(only)
    await replays.catch_up(target)
    assert target.calls == []
    replays.record("load", (1,), {})
    replays.record("tune", (0.5,), {})
    target.error = WeightsError("its publisher has died")
    catching_up = catch_up(replays, target)
    await turns()
    target.error = None
    sleeping = replays.record("sleep", (), {})
    await catching_up
    assert target.calls == [("load", (1,)), ("tune", (0.5,)), ("sleep", ())]
    assert sleeping is not None
    replays.withdraw(sleeping)
    await replays.catch_up(earlier := FakeTarget(6))
    assert earlier.calls == [("load", (1,)), ("tune", (0.5,))]
    refused = replays.record("load", (2,), {})
    await replays.catch_up(other := FakeTarget(4))
    assert other.calls == [("tune", (0.5,)), ("load", (2,))]
    assert refused is not None
    replays.record("load", (3,), {})
    replays.withdraw(refused)  # late: a newer one counts
    await replays.catch_up(last := FakeTarget(5))
    assert last.calls == [("tune", (0.5,)), ("load", (3,))]


async def test_unavailable_state_is_waited_for_until_it_is_provided() -> None:
    replays = Replays(("load",))
    replays.record("load", (1,), {})
    target = FakeTarget(0)
    target.error = WeightsError("its publisher has died")
    catching_up = catch_up(replays, target)
    await turns()
    assert target.calls == [("load", (1,))]
    assert not catching_up.done()
    refused = replays.record("load", (2,), {})
    await turns()
    assert refused is not None
    replays.withdraw(refused)
    await turns()
    assert target.calls == [("load", (1,)), ("load", (2,)), ("load", (1,))]
    target.error = None
    replays.record("load", (0,), {})
    await catching_up
    assert target.calls[3:] == [("load", (0,))]


async def test_unavailable_state_is_retried_without_a_fan_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays_module, "RETRY_INTERVAL_S", 0.01)
    replays = Replays(("load",))
    replays.record("load", (1,), {})
    target = FakeTarget(0)
    target.error = WeightsError("its publisher did not answer")
    catching_up = catch_up(replays, target)
    await turns()
    assert not catching_up.done()
    target.error = None
    async with asyncio.timeout(HANG_S):
        await catching_up
    assert len(target.calls) > 1
    assert set(target.calls) == {("load", (1,))}


class Buffer:
    limit = 3

    def add(self, group: str, *, version: int) -> tuple[str, int]:
        return group, version

    async def sample(self) -> str:
        return "sampled"


async def test_an_object_of_this_process_is_called_the_same_way() -> None:
    buffer = LocalService(Buffer())
    assert await buffer.add.route("group", version=3) == ("group", 3)
    assert await buffer.sample.route() == "sampled"
    assert (await buffer.sample.fanout()).values == {0: "sampled"}
    with pytest.raises(AttributeError, match="one of the endpoints add, sample, got 'limit'"):
        _ = buffer.limit
