"""A Gymnasium environment, with optional wrappers, as an OpenEnv environment."""

import io
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final
from uuid import uuid4

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.wrappers import OrderEnforcing
from pydantic import BaseModel, JsonValue

from openenv_core import Environment
from openenv_core.adapters.spaces import encodable_info, read_value
from openenv_core.errors import EnvironmentFailureError, EpisodeOverError

from ..models import GymnasiumAction, GymnasiumObservation, GymnasiumState, models_for

Wrapper = Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]

_model_slots: Final[Mapping[str, Any]] = vars(BaseModel)
_set_values: Final = _model_slots["__dict__"].__set__
_set_fields_set: Final = _model_slots["__pydantic_fields_set__"].__set__
_set_extra: Final = _model_slots["__pydantic_extra__"].__set__
_set_private: Final = _model_slots["__pydantic_private__"].__set__

_COPYABLE_MODULES: Final = (
    "gymnasium.envs.classic_control.",
    "gymnasium.envs.toy_text.",
    "gymnasium.wrappers.",
)
"""Modules of Gymnasium whose classes hold only plain Python and numpy objects, as long as they do not render."""

_QUICK_MODULES: Final = _COPYABLE_MODULES[:2]
"""Modules whose environments step in a few microseconds and reset in not many more."""

_MAX_CHOICES: Final = 256
"""How many actions of a discrete space are precomputed as Gymnasium's values, so that a lookup replaces validation."""


class GymnasiumEnvironment(Environment[GymnasiumAction, GymnasiumObservation, GymnasiumState]):
    """A Gymnasium environment.

    It can be forked if copying is safe: if the environment and all of its wrappers either belong to Gymnasium's classic
    control, toy text and wrappers and do not render, or have an attribute `FORKABLE = True`.

    `reset(seed=..., options={...})` is Gymnasium's own: the seed determines the episode; without one the environment
    continues its random sequence. An action outside the action space is rejected, and the episode continues.

    Args:
        env_id: The first argument of `gymnasium.make`.
        wrappers: Functions that wrap the environment; the first one is innermost.
        options: Keyword arguments of `gymnasium.make`.
        observation_type: The observation model that `models_for` returned; None creates one.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True
    _MAKE_OPTIONS: Mapping[str, Any] = {}

    def __init__(
        self,
        env_id: str,
        wrappers: Sequence[Wrapper] = (),
        options: Mapping[str, Any] | None = None,
        observation_type: type[GymnasiumObservation] | None = None,
    ) -> None:
        env: gymnasium.Env[Any, Any] = gymnasium.make(env_id, **{**self._MAKE_OPTIONS, **(options or {})})
        for wrap in wrappers:
            env = wrap(env)
        self.inner = env
        self.FORKABLE = _is_copyable(env)
        self._action_space = space = env.action_space  # kept: on a wrapper it is a chain of property calls
        choices = range(int(space.start), int(space.start + space.n)) if isinstance(space, Discrete) else ()
        self._choices = {choice: read_value(space, choice) for choice in choices[:_MAX_CHOICES]}
        self._model = observation_type or models_for(env.action_space, env.observation_space)[1]
        self._defaults = dict(vars(self._model(observation=None)))
        self._has_begun = False
        self._episode_id: str | None = None  # generated on first use
        self._steps = 0
        self._episode_running = False

    def reset(
        self,
        *,
        seed: int | None = None,
        episode_id: str | None = None,
        options: dict[str, Any] | None = None,
        **more: Any,
    ) -> GymnasiumObservation:
        """Start an episode.

        Args:
            seed: Passed to Gymnasium's `reset`.
            episode_id: The caller's name for the episode; None generates a uuid4.
            options: Passed to Gymnasium's `reset`.
            more: Further entries of `options`; they take precedence.
        """
        observation, info = self.inner.reset(seed=seed, options={**(options or {}), **more} or None)
        self._has_begun, self._episode_id = True, episode_id
        self._steps = 0
        self._episode_running = True
        return self._make_observation(observation, info, {})

    def step(self, action: GymnasiumAction, **_: Any) -> GymnasiumObservation:
        """Take one action.

        Raises:
            EpisodeOverError: No episode is in progress.
            EnvironmentFailureError: The action is not in the action space.
        """
        if not self._episode_running:
            raise EpisodeOverError("no episode is under way; call reset() first")
        value = action.action
        choice = self._choices.get(value) if type(value) is int else None
        if choice is None:
            choice = self._read_action(value)
        observation, reward, terminated, truncated, info = self.inner.step(choice)
        self._steps += 1
        done = bool(terminated or truncated)
        self._episode_running = not done
        end_fields = {"done": done, "terminated": bool(terminated), "truncated": bool(truncated)}
        return self._make_observation(observation, info, {"reward": float(reward), **end_fields})

    @property
    def state(self) -> GymnasiumState:
        """The episode's id and step count, with a PNG frame if the render mode is "rgb_array"."""
        self._ensure_episode_id()
        has_frame = self._has_begun and self.inner.render_mode == "rgb_array"
        frame = _encode_png(self.inner.render()) if has_frame else None
        return GymnasiumState(episode_id=self._episode_id, step_count=self._steps, frame=frame)

    def snapshot(self) -> tuple[Any, ...]:
        """Return a deep copy of the Gymnasium environment and the episode's counters."""
        self._ensure_episode_id()
        return deepcopy(self.inner), self._has_begun, self._episode_id, self._steps, self._episode_running

    def restore(self, state: tuple[Any, ...]) -> None:
        """Replace the Gymnasium environment by a copy of the one in a snapshot."""
        self.inner.close()
        self.inner = deepcopy(state[0])
        _, self._has_begun, self._episode_id, self._steps, self._episode_running = state

    def close(self) -> None:
        """Close the Gymnasium environment."""
        self.inner.close()

    def _ensure_episode_id(self) -> None:
        if self._has_begun and self._episode_id is None:
            self._episode_id = str(uuid4())

    def _read_action(self, action: JsonValue) -> Any:
        space = self._action_space
        try:
            value = read_value(space, action)
        except ValueError as error:
            raise EnvironmentFailureError(f"this is no action of {space}: {error}") from None
        if not space.contains(value):
            raise EnvironmentFailureError(f"this is no action of {space}: {str(action)[:200]}")
        return value

    def _make_observation(
        self, inner_observation: Any, info: Mapping[str, Any], fields: dict[str, Any]
    ) -> GymnasiumObservation:
        fields["observation"] = inner_observation
        fields["info"] = encodable_info(info) if info else {}
        # The fields need no validation, and even `model_construct` takes longer than a step.
        observation: GymnasiumObservation = object.__new__(self._model)
        _set_fields_set(observation, set(fields))
        fields["metadata"] = {}
        _set_values(observation, {**self._defaults, **fields})
        _set_extra(observation, None)
        _set_private(observation, None)
        return observation


class QuickGymnasiumEnvironment(GymnasiumEnvironment):
    """An environment for which `is_quick` is true; the server steps it on its event loop."""

    BLOCKING = False
    _MAKE_OPTIONS = {"disable_env_checker": True}  # noqa: RUF012 - Gymnasium's own need no checking

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.inner = _remove_order_check(self.inner)
        base_env, space = self.inner.unwrapped, self.inner.unwrapped.action_space
        if type(space) is Discrete:
            base_env.action_space = _FastDiscrete(space.n, start=space.start, dtype=space.dtype.type)


def _remove_order_check(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Remove the wrapper that checks at each step that `reset` was called: our `step` checks that already."""
    if isinstance(env, OrderEnforcing):
        return env.env
    if isinstance(env, gymnasium.Wrapper):
        env.env = _remove_order_check(env.env)
    return env


class _FastDiscrete(Discrete):
    """A `Discrete` that looks up its first `_MAX_CHOICES` numbers: Gymnasium's check takes a fifth of each step."""

    def __init__(self, n: Any, **options: Any) -> None:
        super().__init__(n, **options)
        start, count = int(self.start), min(int(self.n), _MAX_CHOICES)
        self._members = frozenset(map(self.dtype.type, range(start, start + count)))

    def contains(self, x: Any) -> bool:
        """Return whether the space contains `x`."""
        return (type(x) is self.dtype.type and x in self._members) or super().contains(x)


def is_quick(env: gymnasium.Env[Any, Any]) -> bool:
    """Return whether an environment never blocks: Gymnasium's classic control or toy text, without rendering."""
    while isinstance(env, gymnasium.Wrapper) and type(env).__module__.startswith(_COPYABLE_MODULES[2]):
        env = env.env
    return type(env).__module__.startswith(_QUICK_MODULES) and env.render_mode is None


def _is_copyable(env: gymnasium.Env[Any, Any]) -> bool:
    while True:
        declared = vars(env).get(
            "FORKABLE", getattr(type(env), "FORKABLE", None)
        )  # not getattr(env, ...): a wrapper would forward it to the environment that it wraps
        is_known = type(env).__module__.startswith(_COPYABLE_MODULES) and env.render_mode is None
        if not (is_known if declared is None else declared is True):
            return False
        if not isinstance(env, gymnasium.Wrapper):
            return True
        env = env.env


def _encode_png(frame: Any) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.asarray(frame, dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()
