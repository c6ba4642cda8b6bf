"""How the controller has groups played."""

from dataclasses import dataclass

from rl_bridge.rollout.episode import EpisodeSettings
from rl_bridge.rollout.filters import ACCEPT_ALL, GroupFilter


@dataclass(kw_only=True, slots=True, frozen=True)
class DispatchSettings:
    """How groups are played.

    Attributes:
        run_seed: The run's; with a group's number it decides the group's seed.
        group_size: Siblings of a group.
        min_group_size: Siblings that a group needs to be worth training, where others were dropped or cut.
        slots: Groups in flight at most.
        episode: How an episode is played.
        deterministic: Sample every completion with a seed of its own.
        timeout_s: How long a worker may take for an assignment, before it is taken for lost.
        max_lost_share: With more than this share of the latest episodes dropped for failures, the run ends.
        filter: Which finished groups are worth training.
    """

    run_seed: int
    group_size: int
    min_group_size: int
    slots: int
    episode: EpisodeSettings
    deterministic: bool
    timeout_s: float
    max_lost_share: float = 0.5
    filter: GroupFilter = ACCEPT_ALL
