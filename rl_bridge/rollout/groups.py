"""Groups of siblings: into training samples, and into figures."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from rl_bridge.algorithms.advantages import group_advantages, has_variance
from rl_bridge.tokens.accumulator import training_rows
from rl_bridge.types import Ending, Group, TrainSample


def training_samples(groups: Sequence[Group], *, normalize_std: bool) -> list[TrainSample]:
    """Advantages within each group, and every trajectory as rows."""
    samples: list[TrainSample] = []
    index = 0
    for group in groups:
        rewards = [trajectory.reward for trajectory in group.trajectories]
        for trajectory, advantage in zip(
            group.trajectories, group_advantages(rewards, normalize_std=normalize_std), strict=True
        ):
            samples.extend(training_rows(trajectory, advantage=advantage, index=index))
            index += 1
    return samples


def rollout_figures(groups: Sequence[Group], *, version: int) -> Mapping[str, float]:
    """What one iteration's rollouts looked like, by the names that the log uses."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    count = len(trajectories)
    endings: Counter[Ending] = Counter(trajectory.ending for trajectory in trajectories)
    staleness: defaultdict[int, int] = defaultdict(int)
    for group in groups:
        staleness[version - group.version] += 1
    with_variance = sum(has_variance([t.reward for t in group.trajectories]) for group in groups)
    return {
        "reward/mean": sum(t.reward for t in trajectories) / count,
        "rollout/trajectories": float(count),
        "rollout/turns_mean": sum(len(t.turns) for t in trajectories) / count,
        "rollout/groups": float(len(groups)),
        "rollout/zero_variance_share": 1.0 - with_variance / len(groups),
        "rollout/truncated_share": sum(n for e, n in endings.items() if e.is_truncated()) / count,
        **{f"rollout/ending/{ending.value}": endings[ending] / count for ending in Ending},
        **{f"rollout/staleness/{age}": number / len(groups) for age, number in sorted(staleness.items())},
    }
