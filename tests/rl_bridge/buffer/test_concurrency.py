"""The limit of groups in flight: what lets it grow and shrink, and that it finds the engine's best by itself."""

import pytest

from benchmarks.concurrency import CHANGES, RATE, Plan, play
from benchmarks.simulated_time import simulate
from rl_bridge.buffer.concurrency import SHRINKAGE, Concurrency
from rl_bridge.generator.vllm_api import EngineTotals


def adjusted(*engines: EngineTotals, in_flight: int = 100) -> int:
    concurrency = Concurrency(100, max_groups=110)
    before = {replica: EngineTotals() for replica in range(len(engines))}
    concurrency.adjust(before, in_flight=0)
    assert concurrency.limit == 100
    concurrency.adjust(dict(enumerate(engines)), in_flight=in_flight)
    return concurrency.limit


def test_it_grows_while_it_holds_groups_back_and_the_engines_could_do_more() -> None:
    idle = EngineTotals(running=3, kv_cache_usage=0.5)
    assert adjusted(idle, idle) == 110  # and no further
    assert adjusted(idle, in_flight=99) == 100
    assert adjusted(EngineTotals(running=3, kv_cache_usage=0.95)) == 100
    assert adjusted(EngineTotals(running=100, waiting=5)) == 100
    few = Concurrency(1, max_groups=110)
    for expected in (2, 3):  # by one, where the factor would not move it
        few.adjust({0: idle}, in_flight=few.limit)
        assert few.limit == expected
    few.adjust({}, in_flight=3)  # nobody answers
    assert few.limit == 3


def test_it_shrinks_below_what_is_in_flight_while_requests_queue_or_are_preempted() -> None:
    assert adjusted(EngineTotals(running=100, waiting=11)) == int(SHRINKAGE * 100)
    assert adjusted(EngineTotals(running=100, waiting=11), in_flight=50) == int(SHRINKAGE * 50)
    assert adjusted(EngineTotals(preemptions=1)) == int(SHRINKAGE * 100)
    least = Concurrency(1, max_groups=110)
    least.adjust({0: EngineTotals(waiting=50)}, in_flight=1)
    assert least.limit == 1
    # An engine that was restarted counts from 0 again.
    restarted = Concurrency(100, max_groups=110)
    for preemptions in (5, 0, 0):
        restarted.adjust({0: EngineTotals(preemptions=preemptions)}, in_flight=0)
    assert restarted.limit == 100


@pytest.mark.slow
def test_environments_twenty_times_as_slow_end_within_a_tenth_of_the_best_fixed_number() -> None:
    """The best is that of `python -m benchmarks.concurrency`, which tries many, and has the way back too."""
    plan, change = Plan(phase_s=800.0), CHANGES["1x to 20x"]
    fixed, adaptive = (simulate(play(plan, change, groups)) for groups in (64, None))
    assert adaptive[RATE] >= 0.9 * fixed[RATE]
