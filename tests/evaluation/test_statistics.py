"""Intervals against tables and by hand, and summaries of scored episodes."""

import pytest

from openenv_core.evaluation.statistics import (
    mean_interval,
    paired_statistics,
    pass_at_k,
    reward_statistics,
    student_95,
    wilson_interval,
)


def test_quantiles() -> None:
    published = {1: 12.706, 30: 2.042, 40: 2.0211, 10**6: 1.96}
    assert {degrees: student_95(degrees) for degrees in published} == pytest.approx(published, abs=1e-4)


def test_interval_by_hand() -> None:
    # Mean 2, standard deviation 1, t of 2 degrees 4.303: 4.303 / sqrt(3) = 2.4843.
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.4843, 2 + 2.4843), abs=1e-4)
    assert mean_interval([1.0]) is mean_interval([2.0, 2.0, 2.0]) is None  # without spread there is none


def test_pass_at_k_counts_the_draws_with_a_success() -> None:
    # Of 4 attempts 2 succeed: of the 6 pairs one has no success. Of 3 attempts 1 succeeds: 2 of 3 pairs have it.
    assert [pass_at_k(4, 2, 2), pass_at_k(3, 1, 2), pass_at_k(5, 0, 5)] == pytest.approx([5 / 6, 2 / 3, 0])


def test_repetitions_of_a_task_are_one_value_of_the_interval() -> None:
    found = reward_statistics({0: [1.0, 1.0], 1: [0.0, 0.0], 2: [1.0, 0.0]}, repetitions=2)
    assert (found["episodes"], found["mean_reward"], found["win_rate"]) == (6, 0.5, 0.5)
    # The means of the tasks are 1, 0, 0.5: their standard deviation 0.5, so 4.303 x 0.5 / sqrt(3) to each side.
    assert found["ci95"] == pytest.approx([0.5 - 1.2422, 0.5 + 1.2422], abs=1e-4)
    assert found["pass_at"]["2"] == [pytest.approx(2 / 3), list(wilson_interval(2, 3)), 3]
    one_short = reward_statistics({0: [1.0, 1.0], 1: [0.0], 2: []}, repetitions=2)
    assert (one_short["episodes"], one_short["pass_at"]["2"]) == (3, [1.0, None, 1])


def test_interval_follows_the_declared_range_and_not_the_values() -> None:
    lucky = {0: [1.0], 1: [0.0], 2: [1.0]}
    student, wilson = mean_interval([1.0, 0.0, 1.0]), wilson_interval(2, 3)
    assert student is not None
    for declared, expected in ((None, student), ((-1.0, 1.0), student), ((0.0, 1.0), wilson)):
        found = reward_statistics(lucky, **({} if declared is None else {"reward_range": declared}))
        assert found["ci95"] == pytest.approx(list(expected)), declared
        assert found["win_ci95"] == list(wilson)
    partial = reward_statistics({0: [0.5], 1: [0.0], 2: [1.0]}, reward_range=(0.0, 1.0))
    assert partial["ci95"] == list(wilson_interval(1.5, 3))
    of_sums = reward_statistics(
        {0: [5.0], 1: [0.0]}, reward_range=(0.0, 1.0)
    )  # the range is that of one step
    assert of_sums["ci95"] == pytest.approx(mean_interval([5.0, 0.0]))


def test_success_is_above_zero_or_what_one_says() -> None:
    rewards = {0: [0.5], 1: [0.0], 2: [1.0]}
    assert reward_statistics(rewards)["win_rate"] == pytest.approx(2 / 3)
    assert reward_statistics(rewards, success=1.0)["win_rate"] == pytest.approx(1 / 3)
    nothing = reward_statistics({})
    assert nothing.pop("episodes") == 0
    assert set(nothing.values()) == {None}


def test_pairs_of_tasks_by_hand() -> None:
    first = {1: [0.0], 2: [0.0, 1.0], 3: [1.0], 4: [1.0]}
    second = {1: [1.0], 2: [1.0], 3: [1.0], 5: [1.0]}
    found = paired_statistics(first, second)
    # The differences are 1, 0.5 and 0.
    assert found.pop("ci95") == pytest.approx([0.5 - 1.2422, 0.5 + 1.2422], abs=1e-4)
    assert found == {
        **{"tasks": 3, "unpaired": 2, "first_mean": 0.5, "second_mean": 1.0, "difference": 0.5},
        **{"better": 2, "equal": 1, "worse": 0},
    }
