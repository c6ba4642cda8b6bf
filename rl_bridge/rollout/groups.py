"""Groups of siblings: into training samples, and into figures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rl_bridge.algorithms.advantages import group_advantages, has_variance
from rl_bridge.rollout.filters import NO_VARIANCE, TRAIN_ALL, Overlong
from rl_bridge.rollout.tally import Tally
from rl_bridge.tokens.accumulator import training_rows
from rl_bridge.types import Ending, Group, TrainSample


def training_samples(
    groups: Sequence[Group], *, normalize_std: bool, overlong: Overlong = TRAIN_ALL
) -> list[TrainSample]:
    """Advantages within each group, and every trajectory as rows.

    Args:
        groups: Of one step.
        normalize_std: As for `group_advantages`.
        overlong: What is done about trajectories that are too long.
    """
    samples: list[TrainSample] = []
    index = 0
    for number, group in enumerate(groups):
        rewards = [overlong.reward(trajectory) for trajectory in group.trajectories]
        advantages = group_advantages(rewards, normalize_std=normalize_std)
        for trajectory, advantage, reward in zip(group.trajectories, advantages, rewards, strict=True):
            if not overlong.masks(trajectory):
                rows = training_rows(trajectory, advantage=advantage, index=index)
                samples.extend(replace(row, group=number, reward=reward) for row in rows)
            index += 1
    return samples


def rollout_figures(
    groups: Sequence[Group],
    *,
    version: int,
    tally: Tally | None = None,
    overlong: Overlong = TRAIN_ALL,
    max_staleness: int = 0,
) -> Mapping[str, float]:
    """What one iteration's rollouts looked like, by the names that the log uses.

    `reward/mean` is of the trajectories trained, `rollout/reward_mean` of all that were played, those included whose
    group was refused: dynamic sampling leaves the groups in the middle, whose mean says little of how good a policy is.
    `rollout/zero_variance_share` is of all groups that were played, those included that dynamic sampling refused, by
    the rewards that they are trained with; `rollout/ending/*` of all episodes, those included that failed or whose
    group was refused; `rollout/truncated_share` of those among them that have not failed.

    Args:
        groups: Those trained.
        version: Which weights the step began from.
        tally: What else became of groups and episodes meanwhile.
        overlong: What is done about trajectories that are too long.
        max_staleness: How many updates old a group may be; each age up to that has its share, 0 where there is none.
    """
    tally = tally or Tally()
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    count = len(trajectories)
    endings: Counter[Ending] = Counter(trajectory.ending for trajectory in trajectories) + tally.endings
    judged = sum(number for ending, number in endings.items() if not ending.is_failure())
    truncated = sum(number for ending, number in endings.items() if ending.is_truncated())
    staleness = dict.fromkeys(range(max_staleness + 1), 0)
    for group in groups:
        staleness[version - group.version] = staleness.get(version - group.version, 0) + 1
    without_variance = sum(
        not has_variance([overlong.reward(trajectory) for trajectory in group.trajectories])
        for group in groups
    )
    refused = tally.refused[NO_VARIANCE]
    earned = sum(t.reward for t in trajectories)
    return {
        "reward/mean": earned / count,
        "rollout/reward_mean": (earned + sum(tally.rewards)) / (count + len(tally.rewards)),
        "rollout/trajectories": float(count),
        "rollout/turns_mean": sum(len(t.turns) for t in trajectories) / count,
        "rollout/tool_calls_mean": sum(t.tool_calls for t in trajectories) / count,
        "rollout/tokens_mean": sum(len(turn.completion.tokens) for t in trajectories for turn in t.turns)
        / count,
        "rollout/groups": float(len(groups)),
        "rollout/refused_groups": float(refused),
        "rollout/zero_variance_share": (without_variance + refused) / (len(groups) + refused),
        "rollout/truncated_share": truncated / judged,
        **{f"rollout/ending/{ending.value}": endings[ending] / endings.total() for ending in Ending},
        **{f"rollout/staleness/{age}": number / len(groups) for age, number in sorted(staleness.items())},
    }
