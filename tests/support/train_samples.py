"""Rows for the trainer from tokens and a mask alone."""

from collections.abc import Sequence
from typing import Any

from rl_bridge.types import NO_VERSION, TrainSample


def train_sample(
    tokens: Sequence[int], mask: Sequence[int], *, logprob: float = -1.0, **keys: Any
) -> TrainSample:
    """A row whose loss tokens, those of the mask, were sampled with one log-probability from version 0."""
    return TrainSample(
        tokens=list(tokens),
        loss_mask=[bool(one) for one in mask],
        logprobs=[logprob if one else 0.0 for one in mask],
        versions=[0 if one else NO_VERSION for one in mask],
        **{"advantage": 1.0, "trajectory": 0, **keys},
    )
