"""Which task each group has: each in every pass; by signal those that teach more often, and each now and then."""

import json
import random
from collections import Counter
from collections.abc import Callable

import pytest

from rl_bridge.config.sections import Sampling
from rl_bridge.data.sampling import FLOOR_SHARE, LATEST_WEIGHT, STEEPNESS, Passes, TaskSampler

TASKS = 40


def test_every_pass_has_every_task_once_in_an_order_of_its_own() -> None:
    passes = Passes(50, seed=3)
    several = [[passes[number] for number in range(first, first + 50)] for first in (0, 50, 100)]
    for one in several:
        assert Counter(one) == Counter(range(50))
    assert len({tuple(one) for one in [*several, list(range(50))]}) == 4
    # The seed decides, and nothing else.
    again = Passes(50, seed=3)
    assert [again[number] for number in reversed(range(150))] == [t for one in several for t in one][::-1]
    assert [Passes(50, seed=4)[number] for number in range(50)] != several[0]
    in_order = Passes(50, seed=3, shuffle=False)
    assert [in_order[number] for number in range(100)] == [*range(50), *range(50)]


def draws(
    sampler: TaskSampler,
    groups: range,
    teaches: Callable[[int], float | None],
    *,
    step: int = 8,
    order: random.Random | None = None,
) -> list[int]:
    """The tasks of groups that come back, in any order, before the first of the next step is given out."""
    tasks = []
    for first in groups[::step]:
        known = [(group, sampler.draw(group, known=first)) for group in range(first, first + step)]
        tasks += [task for _, task in known]
        if order is not None:
            order.shuffle(known)
        for group, task in known:
            assert sampler.draw(group, known=first) == task  # also one that is played again
            sampler.end(group, teaches(task))
    return tasks


@pytest.mark.parametrize("sampling", ["uniform", "sequential"])
def test_without_signal_outcomes_do_not_change_the_order(sampling: Sampling) -> None:
    sampler = TaskSampler(TASKS, sampling=sampling, seed=3)
    passes = Passes(TASKS, seed=3, shuffle=sampling == "uniform")
    tasks = draws(sampler, range(4 * TASKS), lambda task: task >= TASKS // 4)
    assert tasks == [passes[n] for n in range(4 * TASKS)]
    drawn = dict.fromkeys(("tasks/draws_min", "tasks/draws_mean", "tasks/draws_max"), 4)
    assert sampler.metrics() == {**drawn, "tasks/dull_share": 0.25}


def test_tasks_without_signal_are_drawn_less_often_and_none_is_starved() -> None:
    sampler = TaskSampler(TASKS, sampling="signal", seed=3)
    first = draws(sampler, range(8), lambda task: task >= TASKS // 2)
    assert len(set(first)) == 8  # nothing is known yet, and the seed decides the order
    assert first not in (sorted(first), draws(TaskSampler(TASKS, sampling="signal", seed=4), range(8), bool))
    draws(sampler, range(8, 800), lambda task: task >= TASKS // 2)
    often = Counter(draws(sampler, range(800, 8800), lambda task: task >= TASKS // 2))
    dull, others = [often[task] for task in range(20)], [often[task] for task in range(20, TASKS)]
    assert max(others) - min(others) <= 2
    assert max(dull) - min(dull) <= 2
    # Half of the tasks have q = 1, and all have the floor.
    assert sum(dull) / sum(others) == pytest.approx(FLOOR_SHARE / 2 / (1 + FLOOR_SHARE / 2), rel=0.1)
    assert sampler.metrics()["tasks/dull_share"] == 0.5
    # One that begins to teach is drawn as often as the others; a group of which nobody can say changes nothing.
    draws(sampler, range(8800, 12000), lambda task: True)
    assert sampler.metrics()["tasks/dull_share"] == 0
    draws(sampler, range(12000, 12800), lambda task: None)
    assert sampler.metrics()["tasks/dull_share"] == 0
    # Where nothing has taught for ever so long, all are equal.
    sampler.restore({"signal": [0.0] * TASKS})
    alike = Counter(draws(sampler, range(20000, 20000 + 4 * TASKS), lambda task: False))
    assert set(alike.values()) <= {3, 4, 5}


@pytest.mark.parametrize(
    ("signals", "estimate"),
    [([0.0], 0.25), ([0.0, 0.0, 1.0], 0.5625), ([0.75, 0.0], 0.3125), ([0.125], 0.3125)],
)
def test_a_task_weighs_the_cube_of_what_its_groups_had_of_late(signals: list[float], estimate: float) -> None:
    sampler = TaskSampler(1, sampling="signal", seed=0)
    results = iter(signals)
    draws(sampler, range(len(signals)), lambda task: next(results), step=1)
    sampler.draw(len(signals), known=len(signals))
    assert sampler.state()["signal"] == [estimate]
    assert LATEST_WEIGHT == 0.5
    # The later group counts as the later one, whichever comes back first.
    overtaken = TaskSampler(1, sampling="signal", seed=0)
    overtaken.restore({"results": [*reversed([(group, 0, one) for group, one in enumerate(signals)])]})
    overtaken.draw(len(signals), known=len(signals))
    assert overtaken.state()["signal"] == [estimate]
    pair = TaskSampler(2, sampling="signal", seed=0)
    pair.restore({"signal": [1.0, estimate]})
    often = Counter(draws(pair, range(3400), lambda task: None, step=1))
    mean = (1 + estimate**STEEPNESS) / 2
    expected = (estimate**STEEPNESS + FLOOR_SHARE * mean) / (1 + FLOOR_SHARE * mean)
    assert often[1] / often[0] == pytest.approx(expected, rel=0.02)


def test_a_task_that_was_never_played_counts_as_the_others_do_in_the_mean() -> None:
    sampler = TaskSampler(4, sampling="signal", seed=0)
    sampler.restore({"signal": [0.75, 0.25, None, None]})
    often = Counter(draws(sampler, range(8000), lambda task: None))
    assert often[2] / often[0] == pytest.approx((2 / 3) ** STEEPNESS, rel=0.1)
    assert abs(often[2] - often[3]) <= 1
    # Its first group counts beside that; one of which nobody can say leaves it as it was.
    sampler.restore({"signal": [0.75, 0.25, None, None], "results": [(9000, 2, 0.0)]})
    sampler.draw(9001, known=9001)
    assert sampler.state()["signal"] == [0.75, 0.25, 0.25, None]


def test_draws_are_the_same_however_groups_overtake_each_other_and_across_a_checkpoint() -> None:
    chance = random.Random(5)
    teaching = {task: chance.random() < 0.4 for task in range(TASKS)}
    expected = draws(TaskSampler(TASKS, sampling="signal", seed=3), range(800), teaching.__getitem__)
    sampler = TaskSampler(TASKS, sampling="signal", seed=3)
    before = draws(sampler, range(400), teaching.__getitem__, order=chance)
    # In the middle of a step: some are under way, and some have come back.
    under_way = [sampler.draw(group, known=400) for group in range(400, 406)]
    for place in (1, 3, 4):
        sampler.end(400 + place, teaching[under_way[place]])
    state = json.loads(json.dumps(sampler.state()))
    sampler.draw(406, known=400)
    resumed = TaskSampler(TASKS, sampling="signal", seed=3)
    resumed.restore(state)
    assert [group for group, _, _ in state["results"]] == [401, 403, 404]
    for place in (0, 2, 5):
        assert resumed.draw(400 + place, known=400) == under_way[place]
    rest = [resumed.draw(group, known=400) for group in (406, 407)]
    for group, task in enumerate([*under_way, *rest], 400):
        resumed.end(group, teaching[task])
    after = draws(resumed, range(408, 800), teaching.__getitem__, order=chance)
    assert before + under_way + rest + after == expected
    assert resumed.state()["drawn"] == []


def test_late_outcome_counts_from_its_arrival() -> None:
    sampler = TaskSampler(2, sampling="signal", seed=0)
    task = sampler.draw(0, known=0)
    sampler.end(0, 0.0)
    sampler.draw(1, known=0)
    assert sampler.metrics()["tasks/dull_share"] == 0  # it was given out under the same weights
    sampler.draw(2, known=2)
    assert sampler.metrics()["tasks/dull_share"] == 0.5
    assert sampler.state()["signal"][task] == 0.25
    sampler.end(7, 0.0)  # another's
    assert sampler.state()["results"] == []
