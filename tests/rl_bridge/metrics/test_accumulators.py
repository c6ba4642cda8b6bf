"""What several processes have gathered is, merged, what one would have gathered."""

import math
import pickle
import random

import pytest

from rl_bridge.metrics import Accumulator, Distribution
from rl_bridge.metrics.accumulators import ACCURACY


def drawn(count: int) -> list[float]:
    chance = random.Random(5)
    return [chance.choice((1, 1, 1, -1, 0)) * chance.lognormvariate(0, 2) for _ in range(count)]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_are_within_the_accuracy(share: float) -> None:
    values = drawn(4001)
    distribution = Distribution()
    for value in values:
        distribution.add(value)
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    assert distribution.quantile(share) == pytest.approx(exact, rel=ACCURACY * 1.0001)


def test_merged_parts_are_the_whole() -> None:
    values = drawn(1000)
    whole, parts = Distribution(), [Distribution() for _ in range(7)]
    for index, value in enumerate(values):
        whole.add(value)
        parts[index % 7].add(value)
    merged = Distribution()
    for part in parts:
        merged.merge(part)
    assert (merged.count, merged.least, merged.most) == (1000, min(values), max(values))
    assert merged.buckets == whole.buckets
    assert merged.mean == pytest.approx(sum(values) / 1000)


def test_buckets_are_few() -> None:
    distribution = Distribution()
    for power in range(-300, 301):
        distribution.add(10.0**power)
    assert distribution.count == 601
    assert distribution.buckets[0, 0] == 292  # everything up to 1e-9


def test_nothing_has_no_mean() -> None:
    assert math.isnan(Distribution().mean)
    assert math.isnan(Distribution().quantile(0.5))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="expected a finite value"):
        Distribution().add(value)


def test_accumulators_travel_merge_and_are_taken_once() -> None:
    workers = [Accumulator(), Accumulator()]
    for number, worker in enumerate(workers, start=1):
        worker.count("episodes", number)
        worker.observe("seconds", 10.0 * number)
    workers[1].count("dropped")
    merged = Accumulator.merged(pickle.loads(pickle.dumps(worker.take())) for worker in workers)
    assert merged.figures() == {
        "episodes": 3,
        "dropped": 1,
        "seconds/mean": 15,
        "seconds/p50": pytest.approx(10, rel=ACCURACY),
        "seconds/p99": pytest.approx(20, rel=ACCURACY),
        "seconds/max": 20,
    }
    assert Accumulator.merged(worker.take() for worker in workers).figures() == {}
