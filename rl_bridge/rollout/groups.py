"""Seeds in, groups of siblings out; and groups into training samples."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from rl_bridge.algorithms.advantages import group_advantages, has_variance
from rl_bridge.rollout.seeds import TRAINING_SEEDS
from rl_bridge.tokens.accumulator import training_rows
from rl_bridge.types import Ending, Group, TrainSample, Trajectory


def training_seeds(run_seed: int, iteration: int, count: int) -> list[int]:
    """The deals of one iteration; the same for the same run and iteration, so a resumed run goes on alike."""
    generator = np.random.default_rng([run_seed, iteration])
    return [int(seed) for seed in generator.integers(0, TRAINING_SEEDS, size=count)]


def siblings(seeds: Sequence[int], group_size: int) -> list[int]:
    """Every seed `group_size` times, in one list."""
    return [seed for seed in seeds for _ in range(group_size)]


def into_groups(trajectories: Sequence[Trajectory | None], group_size: int) -> list[Group]:
    """Siblings back together. Dropped ones are left out, and so are groups with fewer than two left."""
    groups = []
    for first in range(0, len(trajectories), group_size):
        members = [trajectory for trajectory in trajectories[first : first + group_size] if trajectory]
        if len(members) > 1:
            groups.append(Group(seed=members[0].seed, trajectories=members))
    return groups


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
