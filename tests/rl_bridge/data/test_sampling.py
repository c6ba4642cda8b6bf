"""Which task each group has: each in every pass."""

import json
from collections import Counter

import pytest

from rl_bridge.config.sections import Sampling
from rl_bridge.data.sampling import Passes, TaskSampler

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


@pytest.mark.parametrize("sampling", ["uniform", "sequential"])
def test_groups_have_the_tasks_of_the_passes_across_a_checkpoint(sampling: Sampling) -> None:
    passes = Passes(TASKS, seed=3, shuffle=sampling == "uniform")
    sampler = TaskSampler(TASKS, sampling=sampling, seed=3)
    for group in range(4 * TASKS):
        task = sampler.draw(group)
        assert task == passes[group]
        if group % 7 == 0:  # in the middle of a step, with a group under way
            state = json.loads(json.dumps(sampler.state()))
            sampler = TaskSampler(TASKS, sampling=sampling, seed=3)
            sampler.restore(state)
            assert sampler.drawn_groups == {group}
            assert sampler.draw(group) == task  # also one that is played again
        sampler.end(group, task >= TASKS // 4)
        sampler.end(group, None)  # it has ended already
    drawn = dict.fromkeys(("tasks/draws_min", "tasks/draws_mean", "tasks/draws_max"), 4)
    assert sampler.metrics() == {**drawn, "tasks/dull_share": 0.25}
