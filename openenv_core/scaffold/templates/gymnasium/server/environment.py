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

# Drawn seeds must be exact in JSON readers that parse integers as doubles.
_DRAWN_SEED_BITS = 53


class PlaceHolderEnvironment(Environment[PlaceHolderAction, PlaceHolderObservation, PlaceHolderState]):
    """Gymnasium's CartPole-v1: a pole stands on a cart, which is pushed left or right so that it does not fall.

    An episode ends when Gymnasium reports it terminated or truncated. The seed is passed to Gymnasium's reset, so the
    same seed and actions give the same episode.
    """

    # In other environments than this one a step may take milliseconds, so a server runs it in a thread.
    BLOCKING = True
    # The seed and the actions determine the episode.
    DETERMINISTIC = True
    # Instances share nothing, so one process can hold many sessions.
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._inner: gymnasium.Env[Any, Any] = gymnasium.make(ENV_ID)
        self._state = PlaceHolderState()

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        """The action space of Gymnasium's environment."""
        return self._inner.action_space

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> PlaceHolderObservation:
        """Start an episode.

        Args:
            seed: Determines the episode; None draws a seed, which `state` then has.
            episode_id: The caller's name for the episode; None draws a UUID.
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
            EpisodeOverError: No episode is in progress.
            EnvironmentFailureError: The action is not in the action space.
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
        """The state of the episode: a copy, so that callers cannot change the episode."""
        return self._state.model_copy()

    def close(self) -> None:
        """Release the resources of Gymnasium's environment."""
        self._inner.close()
