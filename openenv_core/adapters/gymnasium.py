"""Adapter for Gymnasium: any served environment as a `gymnasium.Env`.

    env = ServedEnv("http://localhost:8000")
    observation, info = env.reset(seed=1)
    observation, reward, terminated, truncated, info = env.step(env.action_space.sample())

Spaces that the environment declares (docs/trainers.md) are used as they are; `envs/gymnasium_env` declares those of any
Gymnasium environment. Otherwise they are derived from the JSON schemas of action and observation.
"""

import base64
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

import gymnasium
import numpy as np
from gymnasium import Space, spaces

from openenv_core.adapters.episode import fetch_schema, resolve
from openenv_core.adapters.spaces import has_bytes, read_space, read_value, write_value
from openenv_core.client import GenericEnvClient
from openenv_core.errors import ConfigurationError, EnvironmentFailureError
from openenv_core.loop_thread import shared_loop
from openenv_core.making import make
from openenv_core.outcomes import UNSCORED
from openenv_core.pictures import PNG, Picture
from openenv_core.protocol.batch import SPACE, layout_of
from openenv_core.types import StepResult

MAX_TEXT_CHARS: Final = 1 << 20

_INTEGERS: Final = np.iinfo(np.int64)


class ServedEnv(gymnasium.Env[Any, Any]):
    """A served environment as a `gymnasium.Env`.

    Args:
        target: Target of `openenv_core.make`: a name, a folder, `module:attribute`, a URL or an image.
        render_mode: "rgb_array" if the server renders (`envs/gymnasium_env` with a render mode); None otherwise.
        token: Bearer token of the server.
        options: Further arguments of the client.

    Raises:
        ConfigurationError: The target is not found, or its models cannot be expressed as spaces.
        ClientError: The server does not answer.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as the base class declares it

    def __init__(
        self, target: str, *, render_mode: str | None = None, token: str | None = None, **options: Any
    ) -> None:
        if render_mode not in (None, "rgb_array"):
            raise ConfigurationError(
                f"the render mode of a served environment is 'rgb_array' or None, not {render_mode!r}"
            )
        self.render_mode = render_mode
        if token is not None:
            options["token"] = token
        self._client = make(target, client=GenericEnvClient, **options)
        try:
            headers = (
                self._client.async_client._session.settings.carrier_options.headers
            )  # which may come from env_vars
            schema = shared_loop().run(fetch_schema, self._client.base_url, headers=headers)
            self._action = Fields(schema["action"])
            self._observation = Fields(schema["observation"])
        except BaseException:
            self._client.close()
            raise
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
        """Return an image of the episode's current state, uint8 [height, width, 3]; None without a render mode."""
        return None if self.render_mode is None else find_picture(self._client.state())

    def close(self) -> None:
        """End the session, and the server if this object started it. Idempotent."""
        self._client.close()

    def __enter__(self) -> Self:
        return self


def find_picture(state: Mapping[str, Any]) -> Any:
    """Return the rendered image in a state, uint8 [height, width, 3].

    Raises:
        ConfigurationError: The server does not render.
    """
    from PIL import Image

    frame = state.get("frame")
    if frame is None:
        raise ConfigurationError("the server does not render; serve it with a render mode of 'rgb_array'")
    return np.asarray(Image.open(io.BytesIO(base64.urlsafe_b64decode(frame))).convert("RGB"))


class Fields:
    """The fields of a model that form its space: those that declare a space, else all.

    Args:
        schema: The model's JSON schema.

    Attributes:
        space: The space: that of a single field, or a Dict of all fields' spaces by name.
        single: Name of the single field; None if there are several.
        parts: The fields by name.
        layouts: Layouts in batches of the actions' fields that may be sent as arrays, by name.

    Raises:
        ConfigurationError: The model has no fields of its own.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        definitions = schema.get("$defs", {})
        properties = {
            name: _resolve_parts(field, definitions)
            for name, field in schema.get("properties", {}).items()
            if name not in ("metadata", "done", "reward", "terminated", "truncated")
        }
        declared = {name: read_space(field[SPACE]) for name, field in properties.items() if SPACE in field}
        self.parts: dict[str, FieldSpace] = (
            {name: FieldSpace.declared(space, properties[name]) for name, space in declared.items()}
            if declared
            else {name: FieldSpace.derived(field) for name, field in properties.items()}
        )
        if not self.parts:
            raise ConfigurationError("the environment's model has no field of its own to make a space of")
        field_spaces = {name: field.space for name, field in self.parts.items()}
        # The JSON of a uint8 Box is no list of numbers, so that the server cannot make it from an array.
        layouts = {
            name: None if has_bytes(space) else layout_of(properties[name].get(SPACE, {}))
            for name, space in field_spaces.items()
        }
        self.layouts = {name: layout for name, layout in layouts.items() if layout is not None}
        self.single = next(iter(field_spaces)) if len(field_spaces) == 1 else None
        self.space = field_spaces[self.single] if self.single else spaces.Dict(field_spaces)

    def read(self, fields: Mapping[str, Any]) -> Any:
        """Decode a value of the space from the model's fields as JSON."""
        if self.single:
            return self.parts[self.single].read(fields[self.single])
        return {name: field.read(fields.get(name)) for name, field in self.parts.items()}

    def write(self, value: Any) -> dict[str, Any]:
        """Encode a value of the space as the model's fields in JSON."""
        if self.single:
            return {self.single: self.parts[self.single].write(value)}
        return {name: field.write(value[name]) for name, field in self.parts.items()}


class FieldSpace:
    """A field with its space and the conversion of its values from and to JSON.

    Args:
        space: Space of the field's values.
        read: Decodes a value from JSON.
        write: Encodes a value as JSON.
    """

    def __init__(self, space: Space[Any], read: Callable[[Any], Any], write: Callable[[Any], Any]) -> None:
        self.space = space
        self.read = read
        self.write = write

    @classmethod
    def declared(cls, space: Space[Any], schema: Mapping[str, Any] | None = None) -> Self:
        """Return the field of a declared space; its JSON schema tells a picture from plain bytes."""
        if schema is not None and schema.get("contentMediaType") == PNG and space.shape is not None:
            picture = Picture(*space.shape)
            return cls(space, picture.read, picture.write)
        return cls(space, lambda value: read_value(space, value), lambda value: write_value(space, value))

    @classmethod
    def derived(cls, schema: Mapping[str, Any]) -> Self:
        """Return the field with a space derived from its JSON schema."""
        kinds = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
        if len(kinds) == 1 and kinds[0] is not schema:
            if choices := _choices_of(kinds[0]):
                return cls._discrete([None, *choices])
            # Any other nullable field becomes a text space, in which "" stands for null.
            return cls._text(empty_is_null=True)
        if choices := _choices_of(schema):
            return cls._discrete(choices)
        if schema.get("type") == "array" and (choices := _choices_of(schema.get("items", {}))):
            item = cls._discrete(choices)
            return cls(
                spaces.Sequence(item.space),
                lambda value: tuple(map(item.read, value)),
                lambda value: list(map(item.write, value)),
            )
        low, high = schema.get("minimum"), schema.get("maximum")
        match schema.get("type"):
            case "boolean":
                return cls(spaces.Discrete(2), lambda value: np.int64(bool(value)), bool)
            case "integer":
                if low is not None and high is not None and max(-low, high, high - low) < _INTEGERS.max:
                    return cls.declared(spaces.Discrete(high - low + 1, start=low))
                return cls.declared(_box(low, high, np.int64))
            case "number":
                return cls.declared(_box(low, high, np.float64))
        return cls._text()

    @classmethod
    def _discrete(cls, choices: Sequence[Any]) -> Self:
        return cls(
            spaces.Discrete(len(choices)),
            lambda value: np.int64(choices.index(value)),
            lambda value: choices[int(value)],
        )

    @classmethod
    def _text(cls, *, empty_is_null: bool = False) -> Self:
        def read(value: Any) -> str:
            if value is None:
                return ""
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        return cls(
            AnyText(MAX_TEXT_CHARS, min_length=0),
            read,
            lambda value: value or None if empty_is_null else value,
        )


class AnyText(spaces.Text):
    """A text space with any characters; samples consist of letters and digits."""

    def contains(self, x: Any) -> bool:
        """Whether `x` is text of at most `max_length` characters."""
        return isinstance(x, str) and len(x) <= self.max_length


def _resolve_parts(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve the `$ref` of a field's schema, and those of its options and items."""
    resolved = dict(resolve(schema, definitions))
    if "anyOf" in resolved:
        resolved["anyOf"] = [resolve(option, definitions) for option in resolved["anyOf"]]
    if "items" in resolved:
        resolved["items"] = resolve(resolved["items"], definitions)
    return resolved


def _choices_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a JSON schema lists; none if it lists none."""
    return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))


def _box(low: float | None, high: float | None, dtype: type[np.int64 | np.float64]) -> Space[Any]:
    # Without the highest integer: Gymnasium draws samples below the bound plus one, which would overflow.
    lowest, highest = (_INTEGERS.min, _INTEGERS.max - 1) if dtype is np.int64 else (-np.inf, np.inf)
    low, high = lowest if low is None else max(low, lowest), highest if high is None else min(high, highest)
    return spaces.Box(low, high, (), dtype)


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
