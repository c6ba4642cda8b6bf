"""One of Gymnasium's environments, by its id."""

import secrets
from typing import Any
from uuid import uuid4

import gymnasium

from openenv_core import Environment
from openenv_core.errors import EpisodeOverError

from ..models import PlaceHolderAction, PlaceHolderObservation, PlaceHolderState
from .spaces import from_json, to_json

ENV_ID = "CartPole-v1"

# Seeds that are drawn here must survive a JSON reader whose integers are doubles.
_DRAWN_SEED_BITS = 53


class PlaceHolderEnvironment(Environment[PlaceHolderAction, PlaceHolderObservation, PlaceHolderState]):
    """Gymnasium's CartPole-v1: a pole stands on a cart, which is pushed left or right so that it does not fall.

    An episode is over when Gymnasium says that it has terminated or was truncated. The seed goes to Gymnasium's own
    reset, so the same seed and actions give the same episode.
    """

    # A step may take milliseconds in other environments than this one, so a server runs it in a thread.
    BLOCKING = True
    # The seed and the actions decide everything.
    DETERMINISTIC = True
    # Instances share nothing, so that one process can hold many sessions.
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._inner: gymnasium.Env[Any, Any] = gymnasium.make(ENV_ID)
        self._state = PlaceHolderState()

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        """What Gymnasium's environment takes."""
        return self._inner.action_space

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> PlaceHolderObservation:
        """Start an episode.

        Args:
            seed: Decides the episode; None draws a fresh seed, which `state` then tells.
            episode_id: The caller's name for the episode; None makes a uuid4.
        """
        if seed is None:
            seed = secrets.randbits(_DRAWN_SEED_BITS)
        observation, _ = self._inner.reset(seed=seed)
        self._state = PlaceHolderState(
            episode_id=str(uuid4()) if episode_id is None else episode_id, seed=seed
        )
        return PlaceHolderObservation(values=to_json(observation))

    def step(self, action: PlaceHolderAction) -> PlaceHolderObservation:
        """Take one action.

        Raises:
            EpisodeOverError: There is no episode under way.
            EnvironmentFailureError: The action space does not take this action.
        """
        state = self._state
        if state.seed is None:
            raise EpisodeOverError("expected reset() before the first step(), got step(); call reset() first")
        if state.done:
            raise EpisodeOverError
        inner_action = from_json(self._inner.action_space, action.action)
        observation, reward, terminated, truncated, _ = self._inner.step(inner_action)
        state.step_count += 1
        state.done = bool(terminated or truncated)
        return PlaceHolderObservation(
            done=state.done,
            reward=float(reward),
            values=to_json(observation),
            terminated=bool(terminated),
            truncated=bool(truncated),
        )

    @property
    def state(self) -> PlaceHolderState:
        """Where the episode stands: a copy, so that the holder of it cannot change the episode."""
        return self._state.model_copy()

    def close(self) -> None:
        """Give back what Gymnasium's environment holds."""
        self._inner.close()
