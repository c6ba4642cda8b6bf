"""The episodes that the base class keeps: seed, generator, id, count of steps, end, rubric and transform.

A class that does not write its own `state` leaves its episodes to the base, which wraps its `reset` and `step`. A class
with a `state` of its own, as released environments have, keeps them by hand, and nothing here applies to it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from random import Random
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, create_model

from openenv_core.errors import ConfigurationError, EpisodeOverError
from openenv_core.pending import Pending, require_value
from openenv_core.tasks import InvalidResetOptionError, check_reset, draw_seed, read_reset
from openenv_core.types import Observation, State

_COMMON: Final = ("seed", "episode_id")
_MAX_CACHED: Final = 1024
_KEYWORDS: Final = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


DEFAULT_SESSIONS: Final = 1024
"""Sessions of a server whose author set no cap, and whose class allows several."""


@dataclass(slots=True, eq=False)
class Episode:
    """One episode of an instance.

    Attributes:
        state: Its state, which the author may change.
        over: Whether no step may follow.
        busy: Whether a call is in progress; calls of `super().reset()` and the like are part of it.
    """

    state: Any
    over: bool = True
    busy: bool = False


def episode_of(environment: Any) -> Episode:
    """Return the current episode of an instance, which need not have called the constructor of its base."""
    try:
        return vars(environment)["_episode"]  # type: ignore[no-any-return]
    except KeyError:
        episode = environment._episode = Episode(models_of(type(environment)).state())
        return episode


class _Reset:
    """A call of `reset`: a new episode begins with it.

    A call of `super().reset()` is part of the call in progress, and begins nothing.
    """

    def __init__(
        self,
        environment: Any,
        method: Callable[..., Any],
        seed: Any,
        episode_id: Any,
        options: dict[str, Any],
    ) -> None:
        """Validate the options, and make generator and state from the seed."""
        self.options = options
        self._environment = environment
        self._before = episode_of(environment), vars(environment).get("rng")
        self._nested = self._before[0].busy
        if self._nested:
            return
        cls = type(environment)
        self.options = _read_options(cls, method, seed, episode_id, options)
        seed = draw_seed() if seed is None else seed
        accepted = [each.name for each in _parameters_of(method)]
        common = zip(_COMMON, (seed, episode_id), strict=True)
        self.options |= {name: value for name, value in common if name in accepted}
        environment.rng = Random(seed)
        episode_id = str(uuid4()) if episode_id is None else episode_id
        self._episode = environment._episode = Episode(models_of(cls).state(episode_id=episode_id, seed=seed))
        self._episode.busy = True

    def fail(self, error: BaseException) -> None:
        """Go on with the episode before, if the author refused an option; not with a rubric, which has been reset."""
        if self._nested:
            return
        environment = self._environment
        self._episode.busy = False
        if isinstance(error, InvalidResetOptionError) and environment.rubric is None:
            environment._episode, environment.rng = self._before

    def finish(self, observation: Any) -> Any:
        """Return what the author's method returned, as it is sent."""
        return observation if self._nested else _finish(self._environment, self._episode, observation)


def _begin_step(episode: Episode) -> None:
    """Refuse a step where no episode runs, and count it."""
    if episode.over:
        raise EpisodeOverError(
            None if episode.state.episode_id else "no episode has begun; call reset() first"
        )
    episode.state.step_count += 1
    episode.busy = True


def _undo_step(episode: Episode) -> None:
    """Count a step no longer, since the author's method raised."""
    episode.state.step_count -= 1
    episode.busy = False


def _finish(environment: Any, episode: Episode, result: Any) -> Any:
    """Return what the author's method returned, as it is sent; the end of the episode is kept."""
    episode.busy = False
    is_dict = type(result) is dict  # asked first: `isinstance` of an abstract class is slow
    if not is_dict and isinstance(result, Observation):
        result = environment._apply_transform(result)
    elif is_dict or isinstance(result, Mapping):  # of a `MultiAgentEnvironment`
        episode.over = False not in [each.done for each in result.values()]
        return result
    episode.over = getattr(result, "done", False)
    return result


def keep_episodes(cls: type, base: type) -> None:
    """Wrap `reset` and `step` of a class that leaves its episodes to the base, and unwrap those of any other.

    Args:
        cls: A subclass of the base.
        base: The class `Environment`.

    Raises:
        ConfigurationError: The state's class has a field without a default.
    """
    keep_models(cls, base)
    kept = inspect.getattr_static(cls, "state") is vars(base)["state"]
    cls.KEEPS_EPISODES = kept  # type: ignore[attr-defined]
    for name, wrap in _WRAPPERS.items():
        method = inspect.getattr_static(cls, name, None)
        if not inspect.isfunction(method) or method is vars(base).get(name):
            continue
        if name.startswith("step") and method.__qualname__ == "ToolEnvironment.step":
            continue  # it calls `call_tool`, or lists the tools
        original = getattr(method, "_author_method", None)
        if kept and original is None:
            setattr(cls, name, wrap(method))
        elif not kept and original is not None:
            setattr(cls, name, original)
    if kept:
        state = models_of(cls).state
        if missing := [name for name, field in state.model_fields.items() if field.is_required()]:
            raise ConfigurationError(
                f"a new episode of {cls.__qualname__} cannot make its {state.__name__}: {', '.join(missing)} has no "
                "default; give it one, and set it in reset: self.state.{0} = ...".format(missing[0])
            )


def _wrap_reset(method: Callable[..., Any]) -> Callable[..., Any]:
    def reset(self: Any, *, seed: Any = None, episode_id: Any = None, **options: Any) -> Any:
        if not self.KEEPS_EPISODES:  # called by `super()` of a class that keeps its own
            return method(self, **_given(seed, episode_id), **options)
        call = _Reset(self, method, seed, episode_id, options)
        try:
            self._reset_rubric()
            observation = require_value(method(self, **call.options), method.__qualname__)
        except BaseException as error:
            call.fail(error)
            raise
        return call.finish(observation)

    async def reset_async(self: Any, *, seed: Any = None, episode_id: Any = None, **options: Any) -> Any:
        if not self.KEEPS_EPISODES:
            return await method(self, **_given(seed, episode_id), **options)
        call = _Reset(self, method, seed, episode_id, options)
        try:
            await self._reset_rubric_async()
            observation = await method(self, **call.options)
        except BaseException as error:
            call.fail(error)
            raise
        return call.finish(observation)

    return _author(method, reset_async if inspect.iscoroutinefunction(method) else reset)


def _given(seed: Any, episode_id: Any) -> dict[str, Any]:
    pairs = zip(_COMMON, (seed, episode_id), strict=True)
    return {name: value for name, value in pairs if value is not None}


def _wrap_step(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the episode in each call, but those by `super().step()`, which are part of the call in progress."""

    def step(self: Any, action: Any, /, *values: Any, **options: Any) -> Any:
        kept = self.KEEPS_EPISODES and not _is_list(action)
        if not kept or (episode := episode_of(self)).busy:
            return method(self, action, *values, **options)
        _begin_step(episode)
        try:
            observation = method(self, action, *values, **options)
            if not isinstance(observation, _PLAIN_RESULTS):
                require_value(observation, method.__qualname__)
            if self.rubric is not None:
                observation.reward = self._apply_rubric(action, observation)
        except BaseException:
            _undo_step(episode)
            raise
        return _finish(self, episode, observation)

    async def step_async(self: Any, action: Any, /, *values: Any, **options: Any) -> Any:
        kept = self.KEEPS_EPISODES and not _is_list(action)
        if not kept or (episode := episode_of(self)).busy:
            return await method(self, action, *values, **options)
        _begin_step(episode)
        try:
            observation = await method(self, action, *values, **options)
            if self.rubric is not None:
                observation.reward = await self._apply_rubric_async(action, observation)
        except BaseException:
            _undo_step(episode)
            raise
        return _finish(self, episode, observation)

    return _author(method, step_async if inspect.iscoroutinefunction(method) else step)


def _wrap_tool_call(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the episode in each call, but those by `step`, which are part of the call in progress."""

    def call_tool(self: Any, *values: Any) -> Any:
        if not self.KEEPS_EPISODES or (episode := episode_of(self)).busy:
            return method(self, *values)
        _begin_step(episode)
        try:
            result = method(self, *values)
        except BaseException:
            _undo_step(episode)
            raise
        if inspect.isawaitable(result):
            return Pending(result, partial(_finish, self, episode), lambda _: _undo_step(episode))
        return _finish(self, episode, result)

    return _author(method, call_tool)


_PLAIN_RESULTS: Final = (dict, Observation)

_WRAPPERS: Final[Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "reset": _wrap_reset,
    "reset_async": _wrap_reset,
    "step": _wrap_step,
    "step_async": _wrap_step,
    "call_tool": _wrap_tool_call,
}


def _is_list(action: Any) -> bool:
    """Whether an action lists the tools, which is no step."""
    model: type = type(action)
    return _may_list(model) and getattr(action, "type", None) == "list_tools"


@lru_cache(maxsize=_MAX_CACHED)
def _may_list(model: type) -> bool:
    """Whether actions of a class have a `type`; a model without one takes microseconds to say so."""
    fields, config = getattr(model, "model_fields", {}), getattr(model, "model_config", {})
    return "type" in fields or config.get("extra") == "allow" or hasattr(model, "type")


def _author(method: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper with the name, docstring and signature of its method, and for `reset` the common options."""
    wraps(method)(wrapper)
    wrapper._author_method = method  # type: ignore[attr-defined]
    if method.__name__.startswith("reset"):
        signature = inspect.signature(method)
        kinds = inspect.Parameter
        added = [
            kinds(name, kinds.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in zip(_COMMON, (int | None, str | None), strict=True)
            if name not in signature.parameters
        ]
        wrapper.__annotations__ = {**wrapper.__annotations__, "seed": int | None, "episode_id": str | None}
        given = [each for each in signature.parameters.values() if each.kind is not kinds.VAR_KEYWORD]
        # Unknown options reach the wrapper, which refuses them.
        rest = kinds("unknown", kinds.VAR_KEYWORD)
        wrapper.__signature__ = signature.replace(parameters=[*given, *added, rest])  # type: ignore[attr-defined]
    return wrapper


def _read_options(
    cls: type, method: Callable[..., Any], seed: Any, episode_id: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Validate the options of a reset by the types of the author's parameters; None means the default."""
    parameters = _parameters_of(method)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        check_reset((), {}, seed, episode_id)
        return dict(options)
    names = [each.name for each in parameters if each.kind in _KEYWORDS and each.name not in _COMMON]
    unknown = {name: None for name in options if name not in names}
    check_reset((*_COMMON, *names), unknown, seed, episode_id)
    if not options:
        return {}
    model = _options_model(cls, method, frozenset(options))
    given = read_reset(model, options)
    return {name: getattr(given, name) for name in given.model_fields_set}


@lru_cache(maxsize=_MAX_CACHED)
def _parameters_of(method: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of an author's method, without `self`."""
    return tuple(inspect.signature(method).parameters.values())[1:]


@lru_cache(maxsize=_MAX_CACHED)
def _options_model(cls: type, method: Callable[..., Any], names: frozenset[str]) -> type[BaseModel]:
    """Return a model of the options with these names; making one takes much longer than to validate by it."""
    hints = hints_of(method)
    fields: dict[str, Any] = {
        each.name: (hints.get(each.name, Any), each.default)
        for each in _parameters_of(method)
        if each.name in names
    }
    return create_model(
        f"{cls.__name__}Options",
        __config__=ConfigDict(arbitrary_types_allowed=True, extra="forbid"),
        **fields,
    )


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a function's parameters and result; none of an author whose annotations fail."""
    try:
        return get_type_hints(function, include_extras=True)
    except Exception:  # a quoted annotation may fail in any way
        return {}


@dataclass(slots=True)
class Models:
    """The models of an environment's class.

    Attributes:
        action: The action model, or a union of models.
        observation: The observation model, or a union of models.
        state: The class of its states.
        reset_observation: The observation model of a reset, if it is another one.
    """

    action: Any = None
    observation: Any = None
    state: Any = None
    reset_observation: Any = None

    def __post_init__(self) -> None:
        if not (isinstance(self.state, type) and issubclass(self.state, State)):
            self.state = State


def keep_models(cls: type, base: type) -> None:
    """Have `models_of` return the models that a class gives this generic base."""
    cls._models = Models(*_type_arguments(cls, base))  # type: ignore[attr-defined]


def models_of(cls: type) -> Models:
    """Return the models in the type arguments of a class's base: `class Dice(Environment[Guess, Face])`.

    Those of a `MultiAgentEnvironment` are of one seat.
    """
    return cls._models  # type: ignore[attr-defined,no-any-return]


def read_models(factory: Any) -> Models:
    """Return the models of what makes environments; a function, and a class that is no `Environment`, name none."""
    if not isinstance(factory, type) or not hasattr(factory, "_models"):
        return Models()
    cls: Any = factory
    models = models_of(cls)
    if models.observation is not Any or not hasattr(factory, "TOOLSET"):
        return models
    # An environment of tools: its steps return their results, and `reset` what it is annotated to return.
    from openenv_core.tools.wire import ToolObservation

    returned = hints_of(cls.reset).get("return")
    is_model = isinstance(returned, type) and issubclass(returned, Observation)
    return Models(models.action, ToolObservation, models.state, returned if is_model else None)


def default_cap(factory: Any) -> int:
    """Return how many sessions a server of these environments has by default."""
    kept = isinstance(factory, type) and getattr(factory, "KEEPS_EPISODES", False)
    return DEFAULT_SESSIONS if kept and factory.SUPPORTS_CONCURRENT_SESSIONS else 1


def _type_arguments(cls: type, environment: Any) -> tuple[Any, Any, Any]:
    """Return the arguments that a class gives a generic base: `Environment[...]`; None for each that it leaves open."""

    def search(owner: Any, values: Mapping[Any, Any]) -> Iterator[list[Any]]:
        if owner is environment:
            found = [values.get(each) for each in environment.__parameters__]
            yield [None if isinstance(each, TypeVar) else each for each in found]
            return
        for base in vars(owner).get("__orig_bases__", owner.__bases__):
            origin: Any = get_origin(base) or base
            if isinstance(origin, type) and issubclass(origin, environment):
                arguments = [values.get(each, each) for each in get_args(base)]
                yield from search(
                    origin, dict(zip(getattr(origin, "__parameters__", ()), arguments, strict=False))
                )

    found = list(search(cls, {}))
    action, observation, state = next(filter(any, found), found[0])  # a mixin may leave all of them open
    return action, observation, state
