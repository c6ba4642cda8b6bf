"""One of Gymnasium's environments, by its id."""

from typing import Any

import gymnasium

from openenv_core import Environment

from ..models import PlaceHolderAction, PlaceHolderObservation
from .spaces import from_json, to_json

ENV_ID = "CartPole-v1"


class PlaceHolderEnvironment(Environment[PlaceHolderAction, PlaceHolderObservation]):
    """Gymnasium's CartPole-v1: a pole stands on a cart, which is pushed left or right so that it does not fall.

    An episode ends when Gymnasium reports it terminated or truncated. The seed is passed to Gymnasium's reset, so the
    same seed and actions give the same episode.
    """

    # In other environments than this one a step may take milliseconds, so a server runs it in a thread.
    BLOCKING = True
    # The seed and the actions determine the episode.
    DETERMINISTIC = True

    def __init__(self) -> None:
        self._inner: gymnasium.Env[Any, Any] = gymnasium.make(ENV_ID)

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        """The action space of Gymnasium's environment."""
        return self._inner.action_space

    def reset(self) -> PlaceHolderObservation:
        """Start an episode."""
        observation, _ = self._inner.reset(seed=self.state.seed)
        return PlaceHolderObservation(values=to_json(observation))

    def step(self, action: PlaceHolderAction) -> PlaceHolderObservation:
        """Take one action.

        Raises:
            EnvironmentFailureError: The action is not in the action space.
        """
        inner_action = from_json(self._inner.action_space, action.action)
        observation, reward, terminated, truncated, _ = self._inner.step(inner_action)
        return PlaceHolderObservation(
            reward=float(reward),
            values=to_json(observation),
            terminated=bool(terminated),
            truncated=bool(truncated),
        )

    def close(self) -> None:
        """Release the resources of Gymnasium's environment."""
        self._inner.close()
