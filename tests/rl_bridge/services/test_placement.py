"""Which hosts, GPUs, restarts and seeds replicas get."""

import itertools
from dataclasses import replace

import pytest

from rl_bridge.errors import RoleError
from rl_bridge.services.own_process import START_VARIABLE, derive_seed, start_of
from rl_bridge.services.placement import (
    HOST_AVOIDANCE_S,
    NoRoomError,
    Placement,
    ReplicaSlot,
    ServiceOptions,
    order_for_placement,
)
from rl_bridge.services.restarts import RestartBudget, RestartPolicy

ONE = ServiceOptions()
NEEDY = ServiceOptions(with_gpus=True)
PAIR = ServiceOptions(hosts=2, procs=2, with_gpus=True)


def test_replicas_spread_over_hosts_and_room_comes_back() -> None:
    placement = Placement(hosts=3, gpus=0)
    slots = [placement.reserve(ONE, 0.0) for _ in range(4)]
    assert [slot.first for slot in slots] == [0, 1, 2, 0]
    placement.release(slots[2])
    assert [placement.reserve(ONE, 0.0).first for _ in range(2)] == [2, 1]


def test_gpus_are_shared_out_once() -> None:
    placement = Placement(hosts=2, gpus=4)
    pair = placement.reserve(PAIR, 0.0)
    assert [pair.gpus_of(rank) for rank in range(4)] == [(0,), (1,), (0,), (1,)]
    single = placement.reserve(ServiceOptions(procs=2, with_gpus=True), 0.0)
    assert (single.first, [single.gpus_of(rank) for rank in range(2)]) == (0, [(2,), (3,)])
    assert placement.reserve(ONE, 0.0).gpus_of(0) == ()
    with pytest.raises(RoleError, match=r"2 host\(s\) in a row with 2 free GPU\(s\) each .* \[0, 2\] free"):
        placement.reserve(PAIR, 0.0)
    placement.release(single)
    again = placement.reserve(PAIR, 0.0)
    assert [again.gpus_of(rank) for rank in range(4)] == [(2,), (3,), (2,), (3,)]


def test_process_may_have_several_gpus() -> None:
    placement = Placement(hosts=2, gpus=4)
    slot = placement.reserve(replace(PAIR, gpus_per_proc=2), 0.0)
    assert [slot.gpus_of(rank) for rank in range(4)] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    with pytest.raises(RoleError, match=r"1 host\(s\) in a row with 2 free GPU\(s\)"):
        placement.reserve(replace(NEEDY, gpus_per_proc=2), 0.0)


def test_services_of_different_pools_share_gpus() -> None:
    placement = Placement(hosts=1, gpus=2)
    trainer = placement.reserve(ServiceOptions(procs=2, with_gpus=True, gpu_pool="trainer"), 0.0)
    one = ServiceOptions(with_gpus=True, gpu_pool="policy")
    first, second = placement.reserve(one, 0.0), placement.reserve(one, 0.0)
    assert [trainer.gpus, first.gpus, second.gpus] == [((0, 1),), ((0,),), ((1,),)]
    with pytest.raises(RoleError, match=r"\[0\] free; .*monarch\.colocate=true"):
        placement.reserve(one, 0.0)
    placement.release(second)
    assert placement.reserve(one, 0.0).gpus == ((1,),)


def test_replicas_of_several_gpus_are_placed_before_those_of_one() -> None:
    wanted = {
        "workers": ServiceOptions(procs=16),
        "singles": ServiceOptions(with_gpus=True, num_replicas=5),
        "other singles": ServiceOptions(with_gpus=True),
        "many": ServiceOptions(procs=4, with_gpus=True),
        "pair": PAIR,
        "pair on one host": ServiceOptions(procs=2, with_gpus=True),
    }
    turns = ["many", "pair", "pair on one host", "singles", "other singles", "workers"]
    assert order_for_placement(wanted) == turns
    placement = Placement(hosts=4, gpus=4)
    for name in turns:
        for _ in range(wanted[name].num_replicas):
            placement.reserve(wanted[name], 0.0)


def test_a_host_that_fell_silent_is_the_last_choice_for_a_while() -> None:
    placement = Placement(hosts=2, gpus=1)
    slot = placement.reserve(ONE, 0.0)
    placement.release(slot)
    placement.avoid(slot, 0.0)
    assert [placement.reserve(ONE, 1.0).first for _ in range(3)] == [1, 1, 1]
    # Where nothing else has room it is still good enough.
    assert [placement.reserve(NEEDY, 1.0).first for _ in range(2)] == [1, 0]
    assert placement.reserve(ONE, HOST_AVOIDANCE_S).first == 0


def test_host_that_joins_takes_what_belongs_there_and_otherwise_comes_last() -> None:
    placement = Placement(hosts=1, gpus=1)
    joined = placement.add_host(2)
    with pytest.raises(NoRoomError):  # it cannot be reached yet
        placement.reserve(ONE, 0.0, joined)
    placement.set_closed(joined, False)
    assert (joined, placement.room(joined, NEEDY), placement.room(joined, ONE)) == (1, 2, 1)
    assert placement.room(joined, PAIR) == 0
    assert [placement.reserve(ONE, 0.0).first for _ in range(3)] == [0, 0, 0]
    assert placement.reserve(ONE, 0.0, joined).first == joined
    assert placement.reserve(NEEDY, 0.0, joined).gpus == ((0,),)
    assert placement.room(joined, NEEDY) == 1
    with pytest.raises(NoRoomError):  # no replica spans a host that may leave
        placement.reserve(ServiceOptions(hosts=2), 0.0)
    assert [placement.reserve(NEEDY, 0.0).first for _ in range(2)] == [0, joined]
    placement.set_closed(joined, True)
    with pytest.raises(NoRoomError, match=r"got 1 host\(s\) with \[0\] free"):
        placement.reserve(NEEDY, 0.0)
    with pytest.raises(NoRoomError):
        placement.reserve(ONE, 0.0, joined)


def test_replicas_without_gpus_avoid_hosts_with_gpus() -> None:
    placement = Placement(hosts=2, gpus=1, cpu_hosts=2)
    assert [placement.reserve(ONE, 0.0).first for _ in range(4)] == [2, 3, 2, 3]
    slots = [placement.reserve(NEEDY, 0.0) for _ in range(2)]
    assert [slot.first for slot in slots] == [0, 1]
    with pytest.raises(RoleError, match=r"got 4 host\(s\) with \[0, 0, 0, 0\] free"):
        placement.reserve(NEEDY, 0.0)
    # They stay the second choice, not none: one that serves is better than one that fell silent.
    for first in (2, 3):
        placement.avoid(ReplicaSlot(first, 1, 1, ()), 0.0)
    assert placement.reserve(ONE, 1.0).first == 0


def test_hosts_of_the_second_mesh_are_preferred_though_the_first_has_no_gpus_either() -> None:
    placement = Placement(hosts=2, gpus=0, cpu_hosts=1)
    assert [placement.reserve(ONE, 0.0).first for _ in range(2)] == [2, 2]


def test_no_replica_spans_hosts_of_both_kinds() -> None:
    placement = Placement(hosts=1, gpus=1, cpu_hosts=1)
    with pytest.raises(RoleError, match=r"2 host\(s\) in a row"):
        placement.reserve(ServiceOptions(hosts=2), 0.0)
    assert Placement(hosts=1, gpus=1, cpu_hosts=2).reserve(ServiceOptions(hosts=2), 0.0).first == 1


def test_pauses_double_up_to_a_bound_until_the_budget_is_gone() -> None:
    budget = RestartBudget(RestartPolicy(budget=5, window_s=100.0, backoff_s=0.5, max_backoff_s=3.0))
    assert [budget.take_restart(float(now)) for now in range(6)] == [0.5, 1.0, 2.0, 3.0, 3.0, None]


def test_restarts_older_than_the_window_do_not_count() -> None:
    budget = RestartBudget(RestartPolicy(budget=2, window_s=10.0, backoff_s=1.0))
    assert budget.take_restart(0.0) == 1.0
    assert budget.take_restart(6.0) == 2.0
    assert budget.take_restart(9.9) is None
    assert budget.take_restart(10.0) == 2.0  # the first is forgotten, the second is not
    assert budget.take_restart(30.0) == 1.0


def test_no_two_starts_draw_the_same_and_the_first_of_all_keeps_the_runs_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(START_VARIABLE, raising=False)
    assert derive_seed(7) == 7
    seeds = set()
    for start in itertools.product(range(20), range(4), range(3)):
        monkeypatch.setenv(START_VARIABLE, start_of(*start))
        seed = derive_seed(7)
        assert derive_seed(7) == seed != derive_seed(8)
        assert (seed == 7) == (start == (0, 0, 0))
        assert 0 <= seed < 1 << 31
        seeds.add(seed)
    assert len(seeds) == 20 * 4 * 3
