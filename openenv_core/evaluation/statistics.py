"""Statistics of rewards: means, shares and differences, with confidence intervals."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

TABLE: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t, two-sided at 95%, for 1 to 30 degrees of freedom."""
NORMAL: Final = 1.959964
Z95: Final = 1.96
"""NORMAL as textbooks round it; the reported intervals of shares use it."""
UNIT_RANGE: Final = (0.0, 1.0)
"""The range of shares, and of the rewards whose mean has an interval like a share."""


def student_95(degrees: int) -> float:
    """Return the half-width of a mean's 95% interval in standard errors, by Student's distribution (1908).

    Beyond the table it uses the expansion in 1 / degrees (Abramowitz and Stegun, 26.7.5), accurate to 1e-4 there.
    """
    if degrees <= len(TABLE):
        return TABLE[degrees - 1]
    z = NORMAL
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% interval of the mean of independently drawn values.

    None with fewer than two values, or if all are equal: the interval would have no width, as if the mean were certain.
    """
    if len(set(values)) < 2:
        return None
    mean = statistics.fmean(values)
    half = student_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """Return the 95% interval of a share, by Wilson's score (1927), which is valid near 0 and 1 too.

    Of values between 0 and 1 with the sum `successes` it is conservative: none vary more than 0 and 1 do.
    """
    share = successes / trials
    centre = (share + Z95**2 / (2 * trials)) / (1 + Z95**2 / trials)
    margin = Z95 / (1 + Z95**2 / trials) * math.sqrt(share * (1 - share) / trials + Z95**2 / (4 * trials**2))
    return max(0.0, centre - margin), min(1.0, centre + margin)


def interval_of_tasks(
    values: Sequence[float], value_range: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Return the 95% interval of the mean of one value per task.

    Wilson's if values are declared to be from 0 to 1, otherwise Student's. It is never chosen by the values: that none
    was above 1 does not show that none can be. Only values outside of the declared range refute it.

    Repetitions of a task are not independent of each other, so a task counts as one value, the mean of its repetitions:
    with equally many repetitions of each task Student's has the clustered standard error (Miller, "Adding Error Bars to
    Evals", 2024, section 2.2).
    """
    if values and value_range == UNIT_RANGE and all(0.0 <= value <= 1.0 for value in values):
        return wilson_interval(math.fsum(values), len(values))
    return mean_interval(values)


def pass_at_k(count: int, successes: int, k: int) -> float:
    """Return the unbiased estimate, from `count` attempts, that at least one of k attempts at a task succeeds.

    1 - C(n - c, k) / C(n, k), by Chen et al., "Evaluating Large Language Models Trained on Code" (2021), equation 1.

    Args:
        count: Scored attempts (n), at least k.
        successes: Successful ones among them (c).
        k: At most `count`.
    """
    return 1.0 - math.comb(count - successes, k) / math.comb(count, k)


def reward_statistics(
    rewards: Mapping[Any, Sequence[float]],
    *,
    success: float | None = None,
    repetitions: int = 1,
    reward_range: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Return the statistics of scored episodes; episodes without a reward are ignored.

    Args:
        rewards: The rewards of each task, one per scored repetition.
        success: The least reward of a success; None: any reward above 0.
        repetitions: Planned repetitions of each task.
        reward_range: The range of rewards that the environment declares, if any.

    Returns:
        `episodes`, `mean_reward` and its `ci95`; `win_rate`, the share of successes (pass@1), and its `win_ci95`; if
        tasks are repeated, `pass_at` by k above 1: [estimate, interval, number of tasks with k or more scores].
    """
    scored = {task: list(values) for task, values in rewards.items() if values}
    wins = {task: [is_success(value, success) for value in values] for task, values in scored.items()}
    return {
        "episodes": sum(map(len, scored.values())),
        **_estimate("mean_reward", "ci95", scored, reward_range),
        **_estimate("win_rate", "win_ci95", wins, UNIT_RANGE),
        **({"pass_at": _pass_at(wins, repetitions)} if repetitions > 1 else {}),
    }


def is_success(reward: float, success: float | None) -> bool:
    """Whether a reward is that of a success."""
    return reward > 0.0 if success is None else reward >= success


def _estimate(
    name: str,
    interval: str,
    values: Mapping[Any, Sequence[float]],
    value_range: tuple[float, float] | None,
) -> dict[str, Any]:
    groups = [[float(value) for value in task_rewards] for task_rewards in values.values()]
    # With a single task only its repetitions vary.
    means = groups[0] if len(groups) == 1 else [statistics.fmean(task_rewards) for task_rewards in groups]
    bounds = interval_of_tasks(means, value_range)
    return {
        name: statistics.fmean(means) if means else None,
        interval: None if bounds is None else list(bounds),
    }


def _pass_at(wins: Mapping[Any, Sequence[bool]], repetitions: int) -> dict[str, Any]:
    estimates: dict[str, Any] = {}
    for k in sorted({repetitions} | {2**power for power in range(1, repetitions.bit_length())}):
        values = [
            pass_at_k(len(task_wins), sum(task_wins), k) for task_wins in wins.values() if len(task_wins) >= k
        ]
        interval = interval_of_tasks(values, UNIT_RANGE) if len(values) > 1 else None
        estimate = statistics.fmean(values) if values else None
        estimates[str(k)] = [estimate, None if interval is None else list(interval), len(values)]
    return estimates


def paired_statistics(
    first: Mapping[Any, Sequence[float]], second: Mapping[Any, Sequence[float]]
) -> dict[str, Any]:
    """Return how much better a second policy did than a first on the tasks for which both have rewards.

    The interval is Student's, of the differences per task (Miller 2024, section 3.2), in which a task's difficulty
    cancels out.

    Returns:
        `tasks`, the number of common tasks; `unpaired`, of tasks that only one has; `first_mean` and `second_mean` over
        the common tasks; `difference`, second minus first, and its `ci95`; and the number of tasks on which the second
        was `better`, `equal` and `worse`.
    """
    common = [task for task in first if first[task] and second.get(task)]
    first_means, second_means = (
        [statistics.fmean(rewards[task]) for task in common] for rewards in (first, second)
    )
    differences = [after - before for before, after in zip(first_means, second_means, strict=True)]
    interval = mean_interval(differences)
    every = {task for rewards in (first, second) for task in rewards if rewards[task]}
    return {
        "tasks": len(common),
        "unpaired": len(every) - len(common),
        "first_mean": statistics.fmean(first_means) if first_means else None,
        "second_mean": statistics.fmean(second_means) if second_means else None,
        "difference": statistics.fmean(differences) if differences else None,
        "ci95": None if interval is None else list(interval),
        "better": sum(value > 0 for value in differences),
        "equal": sum(value == 0 for value in differences),
        "worse": sum(value < 0 for value in differences),
    }
