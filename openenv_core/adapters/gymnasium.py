"""Adapter for Gymnasium: any served environment as a `gymnasium.Env`.

    env = ServedEnv("http://localhost:8000")
    observation, info = env.reset(seed=1)
    observation, reward, terminated, truncated, info = env.step(env.action_space.sample())

Spaces that the environment declares (docs/trainers.md) are used as they are; `envs/gymnasium_env` declares those of any
Gymnasium environment. Otherwise they are derived from the JSON schemas of action and observation.
"""

import base64
import io
import math
from collections.abc import Mapping
from typing import Any, Self

import gymnasium
import numpy as np
from gymnasium import Space

from openenv_core.adapters.episode import dict_client
from openenv_core.adapters.spaces import Fields
from openenv_core.errors import ConfigurationError, EnvironmentFailureError
from openenv_core.outcomes import UNSCORED
from openenv_core.types import StepResult


class ServedEnv(gymnasium.Env[Any, Any]):
    """A served environment as a `gymnasium.Env`.

    Args:
        target: Target of `openenv_core.make`: a name, a folder, `module:attribute`, a URL or an image.
        render_mode: "rgb_array" if the server renders (`envs/gymnasium_env` with a render mode); None otherwise.
        options: Further arguments of the client, such as `token`.

    Raises:
        ConfigurationError: The target is not found, or its models cannot be expressed as spaces.
        ClientError: The server does not answer.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as the base class declares it

    def __init__(self, target: str, *, render_mode: str | None = None, **options: Any) -> None:
        if render_mode not in (None, "rgb_array"):
            raise ConfigurationError(
                f"the render mode of a served environment is 'rgb_array' or None, not {render_mode!r}"
            )
        self.render_mode = render_mode
        with dict_client(target, options) as (self._client, schema):
            self._action = Fields(schema["action"])
            self._observation = Fields(schema["observation"])
        self.action_space: Space[Any] = self._action.space
        self.observation_space: Space[Any] = self._observation.space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; see `gymnasium.Env.reset`.

        Args:
            seed: Seed of the episode; None leaves it to the server.
            options: Further options of the server's reset.

        Raises:
            ClientError: The server cannot be reached, or refuses the options.
            EnvironmentFailureError: The environment reports a failure that is not the policy's.
        """
        super().reset(seed=seed)
        reset_options = dict(options or {}) if seed is None else {"seed": seed, **(options or {})}
        result = _require_valid(self._client.reset(**reset_options))
        return self._observation.read(result.observation), _info_of(result)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take an action; see `gymnasium.Env.step`.

        Raises:
            ClientError: The server is lost, or refuses the action.
            EnvironmentFailureError: The environment reports a failure that is not the policy's.

        Returns:
            As Gymnasium. If the episode cannot be scored, the reward is NaN, and `info["unscored"]` says why.
        """
        result = _require_valid(self._client.step(self._action.write(action)))
        return (
            self._observation.read(result.observation),
            float(result.reward or 0.0) if result.unscored is None else math.nan,
            result.terminated,
            result.truncated,
            _info_of(result),
        )

    def render(self) -> Any:
        """Return an image of the episode's current state, uint8 [height, width, 3]; None without a render mode.

        Raises:
            ConfigurationError: The server does not render.
        """
        if self.render_mode is None:
            return None
        from PIL import Image

        frame = self._client.state().get("frame")
        if frame is None:
            raise ConfigurationError("the server does not render; serve it with a render mode of 'rgb_array'")
        return np.asarray(Image.open(io.BytesIO(base64.urlsafe_b64decode(frame))).convert("RGB"))

    def close(self) -> None:
        """End the session, and the server if this object started it. Idempotent."""
        self._client.close()

    def __enter__(self) -> Self:
        return self


def _require_valid(result: StepResult[Any]) -> StepResult[Any]:
    """Return a result; EnvironmentFailureError if something other than the policy failed."""
    if (failure := result.infrastructure_error) is not None:
        raise EnvironmentFailureError(f"the episode does not count: {failure}")
    return result


def _info_of(result: StepResult[Any]) -> dict[str, Any]:
    mark = {} if result.unscored is None else {UNSCORED: result.unscored}
    return {**make_info(result.metadata, result.observation.get("info")), **mark}


def make_info(metadata: Mapping[str, Any] | None, info: Any) -> dict[str, Any]:
    """Return the info of a step; a field named `info` need not be an object, and is left out then."""
    return {**(metadata or {}), **(info if isinstance(info, dict) else {})}
