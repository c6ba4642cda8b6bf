"""Transforms: what an environment does to every observation before it goes out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic

from openenv_core.types import ObsT


class Transform(ABC, Generic[ObsT]):
    """Turns an observation into the one that is sent: adds a reward, a figure, a shorter text."""

    @abstractmethod
    def __call__(self, observation: ObsT) -> ObsT:
        """Return the observation to send; it may be the same object, changed."""


class CompositeTransform(Transform[ObsT]):
    """Transforms one after another.

    Args:
        transforms: In the order in which they are applied.
    """

    def __init__(self, transforms: Sequence[Transform[ObsT]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, observation: ObsT) -> ObsT:
        """Apply all of them."""
        for transform in self.transforms:
            observation = transform(observation)
        return observation


class NullTransform(Transform[ObsT]):
    """Changes nothing."""

    def __call__(self, observation: ObsT) -> ObsT:
        """Return the observation as it is."""
        return observation
