"""Every seed of a run as a function of what it is for, so that work done again is done alike."""

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

import numpy as np

TRAINING_SEEDS = 2**31
"""Training takes seeds below this, evaluation takes seeds from this on: no episode is in both."""


def group_seed(run_seed: int, group: int) -> int:
    """The seed that the siblings of a group begin from."""
    return int(np.random.default_rng([run_seed, group]).integers(0, TRAINING_SEEDS))


ENVIRONMENT_DRAWS = 2**31
"""Beside a run's seed and a group: no sibling is numbered so, whose samples this draw could go with."""


def draw_environment(run_seed: int, group: int, weights: Mapping[str, float]) -> str:
    """The environment that a group is played in.

    Args:
        run_seed: The run's.
        group: The group's number.
        weights: By environment, above 0: in the long run its share of the groups, of the sum of all.
    """
    names, bounds = list(weights), list(accumulate(weights.values()))
    point = np.random.default_rng([run_seed, group, ENVIRONMENT_DRAWS]).random() * bounds[-1]
    return names[min(bisect_right(bounds, point), len(names) - 1)]


def sampling_seed(run_seed: int, group: int, sibling: int, turn: int) -> int:
    """The seed that a completion is sampled with, where a run is to repeat bit for bit; below 2^32."""
    return int(np.random.SeedSequence([run_seed, group, sibling, turn]).generate_state(1)[0])


def held_out_seeds(first: int, count: int) -> range:
    """Seeds that training never uses, in order, from the `first` of them on."""
    return range(TRAINING_SEEDS + first, TRAINING_SEEDS + first + count)
