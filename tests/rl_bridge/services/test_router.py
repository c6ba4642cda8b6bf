"""Which replica is picked: least loaded, oldest first, and never the one that fails them all."""

from rl_bridge.services.balancer import MAX_SUSPENSION_S, MIN_SUSPENSION_S, SUSPECT_AFTER, Router


def router(*replicas: int) -> Router:
    made = Router()
    for replica in replicas:
        made.add(replica)
    return made


def picked(made: Router, now: float = 0.0) -> int:
    replica = made.pick(now)
    assert replica is not None
    made.begin(replica)
    return replica


def test_the_least_loaded_is_picked_and_ties_go_round() -> None:
    made = router(0, 1, 2)
    assert [picked(made) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    made.end(1, failed=False, now=0.0)
    made.end(1, failed=False, now=0.0)
    made.end(2, failed=None, now=0.0)
    assert [picked(made) for _ in range(3)] == [1, 2, 1]


def test_one_that_fails_fast_does_not_attract_the_calls() -> None:
    made = router(0, 1)
    made.begin(1)  # the good one is always busier
    got = {0: 0, 1: 0}
    asked = 0
    for step in range(1000):
        now = step * 0.001
        replica = picked(made, now)
        got[replica] += 1
        asked += made.end(replica, failed=replica == 0, now=now)
    # Three at once, one when the half second is over.
    assert got[0] == SUSPECT_AFTER + 1
    assert asked == 2


def test_suspensions_double_up_to_a_bound_and_a_success_clears_them() -> None:
    made = router(0, 1)
    now = 0.0
    for _ in range(SUSPECT_AFTER):
        made.begin(0)
        made.end(0, failed=True, now=now)
    lengths = []
    for _ in range(9):
        begin = now
        while made.is_suspended(0, now):
            now += 0.25
        lengths.append(now - begin)
        made.begin(0)
        made.end(0, failed=True, now=now)
    assert lengths[:4] == [MIN_SUSPENSION_S, 1.0, 2.0, 4.0]
    assert lengths[-1] == MAX_SUSPENSION_S
    made.begin(0)
    made.end(0, failed=False, now=now)
    assert not made.is_suspended(0, now)
    made.begin(0)
    assert made.end(0, failed=True, now=now) is False  # it has its tries again


def test_what_was_in_flight_at_a_suspension_does_not_lengthen_it() -> None:
    made = router(0)
    for _ in range(10):
        made.begin(0)
    asked = [made.end(0, failed=True, now=0.0) for _ in range(10)]
    assert sum(asked) == 1
    assert made.is_suspended(0, MIN_SUSPENSION_S - 0.01)
    assert not made.is_suspended(0, MIN_SUSPENSION_S)


def test_failures_in_between_successes_and_calls_given_up_are_no_suspicion() -> None:
    made = router(0)
    for failed in (True, True, False, True, None, True, False, True, True):
        made.begin(0)
        assert made.end(0, failed=failed, now=0.0) is False
    assert not made.is_suspended(0, 0.0)


def test_where_all_are_suspended_calls_still_go_somewhere() -> None:
    made = router(0, 1)
    for replica, now in ((0, 0.0), (1, 0.1)):
        for _ in range(SUSPECT_AFTER):
            made.begin(replica)
            made.end(replica, failed=True, now=now)
    assert made.pick(0.2) == 0
