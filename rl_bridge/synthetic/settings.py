"""How large a synthetic job is."""

import math
import random
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class SyntheticSettings:
    """How large a synthetic job is.

    Attributes:
        max_staleness: As `rollout.max_staleness`; 0 is synchronous.
        iterations: Training steps.
        groups_per_batch: Groups a step.
        group_size: Episodes a group.
        workers: Rollout workers, each a process.
        episode_s: How long an episode's environment sleeps on average.
        sigma: Standard deviation of the sleep's logarithm; 0 for equal episodes.
        train_s: How long the trainer computes for a step.
        seed: Decides every sleep.
    """

    max_staleness: int = 1
    iterations: int = 20
    groups_per_batch: int = 8
    group_size: int = 8
    workers: int = 2
    episode_s: float = 0.15
    sigma: float = 1.0
    train_s: float = 1.0
    seed: int = 0

    @property
    def sessions(self) -> int:
        """Episodes in flight at most, in each worker: together as many as a step has, whatever the staleness."""
        return math.ceil(self.groups_per_batch * self.group_size / self.workers)

    @property
    def slots(self) -> int:
        """Groups in flight at most, over all workers: what one ends early leaves sessions to the next."""
        return 2 * self.groups_per_batch

    def sleep_s(self, seed: int) -> float:
        """How long the environment of an episode sleeps: log-normal, its mean `episode_s`."""
        drawn = random.Random(seed).gauss(0.0, self.sigma)
        return self.episode_s * math.exp(drawn - self.sigma**2 / 2)
