"""The base class of environments, and transforms of their observations."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Generic, cast

from typing_extensions import TypeVar

from openenv_core.errors import ConfigurationError, LLMError, NoScoreError
from openenv_core.lifecycle import episode_of, keep_episodes
from openenv_core.outcomes import INFRASTRUCTURE_ERROR, UNSCORED
from openenv_core.pending import require_value
from openenv_core.types import ActT, EnvironmentMetadata, ObsT, State

F = TypeVar("F", bound=Callable[..., Any])
StateT = TypeVar("StateT", default=State)


class Transform(ABC, Generic[ObsT]):
    """Changes an observation before it is sent, for example adds a reward or shortens a text."""

    @abstractmethod
    def __call__(self, observation: ObsT) -> ObsT:
        """Return the observation to send; may be the same object, modified."""


class CompositeTransform(Transform[ObsT]):
    """Applies several transforms in order.

    Args:
        transforms: The transforms, in the order of application.
    """

    def __init__(self, transforms: Sequence[Transform[ObsT]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, observation: ObsT) -> ObsT:
        """Apply all transforms."""
        for transform in self.transforms:
            observation = transform(observation)
        return observation


class NullTransform(Transform[ObsT]):
    """Returns observations unchanged."""

    def __call__(self, observation: ObsT) -> ObsT:
        """Return the observation unchanged."""
        return observation


# These methods are abstract at run time only. `__init_subclass__` adds them to a class that defines `reset_async` or
# `step_async`, which type checkers cannot see.
if TYPE_CHECKING:

    def _required(method: F) -> F:
        return method
else:
    _required = abstractmethod


class _KeepsEpisodes:
    """The value of SUPPORTS_CONCURRENT_SESSIONS in a class for which no author has set it."""

    def __get__(self, _: object, owner: "type[Environment[Any, Any, Any]]") -> bool:
        return owner.KEEPS_EPISODES


class Environment(ABC, Generic[ActT, ObsT, StateT]):
    """An environment that an agent acts in, one episode at a time.

    Authors implement `reset` and `step`, each as `def` or `async def`. Options of an episode are keyword parameters of
    `reset`:

        class Dice(Environment[Guess, Face]):
            def reset(self, *, sides: int = 6) -> Face:
                self.secret = self.rng.randint(1, sides)
                return Face(hint=f"1 to {sides}")

            def step(self, action: Guess) -> Face:
                won = action.number == self.secret
                return Face(hint=f"it was {self.secret}", reward=float(won), terminated=True)

    The class keeps the episodes: `reset` takes a `seed` and an `episode_id` too, and draws those not given; `rng` is
    made from the seed; `state` has seed, id and number of steps, in the class of the third type argument, with what the
    author sets in it; unknown or invalid options are refused, as are steps after the end; the rubric, which computes
    the reward, and the transform are applied. A class that defines `state` itself, as released environments do, does
    all this by hand: nothing is added to its methods.

    A server creates one instance per session and never calls two methods of an instance concurrently. Rewards are
    per step, not cumulative. The same seed gives the same episode.

    Servers prefer `reset_async`, `step_async` and `close_async` if defined. A class that defines only the async method
    gets a synchronous one that runs it and waits, for callers without an event loop.

    By hand, rubric and transform are applied where `step` calls `self._apply_rubric(action, observation)` and
    `self._apply_transform(observation)`, and `_reset_rubric` calls the rubric's `reset`. Subclasses that use neither
    need not call this constructor. Environments with tasks implement `openenv_core.tasks.TaskProvider`.

    Args:
        transform: Changes observations before they are sent; None leaves them unchanged.
        rubric: Computes the reward; None leaves it to the author.

    Attributes:
        rng: The generator of the episode, made from its seed.
        KEEPS_EPISODES: Whether the base keeps the episodes of the class.
        BLOCKING: False promises that the constructor and the synchronous methods never block and take well under a
            millisecond, so that a server may run them on its event loop.
        DETERMINISTIC: True promises that seed and actions fully determine an episode.
        FORKABLE: True promises that an instance given `restore(snapshot)` continues as the original would, and that
            neither affects the other. May be set per instance. The default `snapshot` and `restore` deep-copy all
            attributes; override them if that is too little or too much.
        SUPPORTS_CONCURRENT_SESSIONS: True promises that several instances can coexist in one process. It is the
            default of a class whose episodes the base keeps.
        REQUIRES_SINGLE_THREAD_EXECUTOR: True requires that all calls to an instance come from the same thread.
    """

    rng: Random
    KEEPS_EPISODES: ClassVar[bool] = True
    BLOCKING: ClassVar[bool] = True
    DETERMINISTIC: ClassVar[bool] = False
    FORKABLE: bool = False
    SUPPORTS_CONCURRENT_SESSIONS: ClassVar[bool] = cast(bool, _KeepsEpisodes())
    REQUIRES_SINGLE_THREAD_EXECUTOR: ClassVar[bool] = False

    transform: Transform[ObsT] | None = None
    rubric: Callable[[Any, Any], Any] | None = None

    def __init__(
        self,
        transform: Transform[ObsT] | None = None,
        rubric: Callable[[ActT, ObsT], float | Awaitable[float]] | None = None,
    ) -> None:
        self.transform = transform
        self.rubric = rubric

    @_required
    def reset(self, *values: Any, **options: Any) -> ObsT | Awaitable[ObsT]:
        """Start a new episode and return its first observation.

        A subclass takes its options as keyword parameters, each with a default; one that defines `state` takes `seed`
        and `episode_id` too.
        """
        raise NotImplementedError

    @_required
    def step(self, action: ActT, /) -> ObsT | Awaitable[ObsT]:
        """Apply one action and return the resulting observation.

        A subclass may take `timeout_s` and further keyword options, each with a default.

        Raises:
            EpisodeOverError: The episode has ended; call `reset` first.
        """
        raise NotImplementedError

    @property
    def state(self) -> StateT:
        """The current state of the episode; reading it has no side effects."""
        state: StateT = episode_of(self).state
        return state

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("reset", "step", "close"):
            async_name = f"{name}_async"
            if not inspect.iscoroutinefunction(getattr(cls, async_name, None)):
                continue
            if getattr(cls, name) is vars(Environment)[name]:
                setattr(cls, name, _make_sync_method(async_name))
            elif inspect.iscoroutinefunction(vars(cls).get(name)) and async_name not in vars(cls):
                raise ConfigurationError(
                    f"{cls.__qualname__}.{name} would never be called: its base has {async_name}, which servers "
                    f"prefer; call the method {async_name}"
                )
        keep_episodes(cls, Environment)

    def close(self) -> Awaitable[None] | None:
        """Release the instance's resources. Called once, after all other calls."""
        return None

    def snapshot(self) -> Any:
        """Return a snapshot of the instance for `restore`; may be async. The episode is not affected.

        A snapshot may be restored many times. If it holds resources, it has a method `close`, sync or async, which is
        called once it is no longer needed. Its attribute `nbytes`, if any, is the memory it takes.
        """
        # References to the instance itself must refer to the restored one.
        placeholder = object()
        return placeholder, deepcopy(vars(self), {id(self): placeholder})

    def restore(self, state: Any) -> Awaitable[None] | None:
        """Continue from a snapshot of another instance; may be async.

        Called at most once, on a fresh instance of the same class, constructed with the same arguments.

        Args:
            state: The value that `snapshot` returned; must not be modified.
        """
        placeholder, attributes = state
        vars(self).update(deepcopy(attributes, {id(placeholder): self}))
        return None

    def get_metadata(self) -> EnvironmentMetadata | Awaitable[EnvironmentMetadata]:
        """Return a description of the environment: by default its class's name and docstring."""
        cls = type(self)
        return EnvironmentMetadata(
            name=cls.__name__, description=inspect.cleandoc(cls.__doc__ or cls.__name__)
        )

    def _apply_transform(self, observation: ObsT) -> ObsT:
        """Return the transformed observation, or the observation itself without a transform."""
        return observation if self.transform is None else self.transform(observation)

    def _apply_rubric(self, action: ActT, observation: ObsT) -> float | None:
        """Return the rubric's reward; 0.0 without a rubric.

        If the rubric's language model fails to answer, the reward is None and the observation is marked with an
        infrastructure failure, or as unscored if the answer has no valid score (`openenv_core.outcomes`).

        Raises:
            TypeError: The rubric is asynchronous; use `await self._apply_rubric_async(...)`.
        """
        try:
            score = 0.0 if self.rubric is None else self.rubric(action, observation)
        except LLMError as error:
            _mark_failure(observation, error)
            return None
        advice = "make step() async and await self._apply_rubric_async(action, observation)"
        return score if isinstance(score, float) else require_value(score, "the rubric", advice)

    async def _apply_rubric_async(self, action: ActT, observation: ObsT) -> float | None:
        """Return the reward of a synchronous or asynchronous rubric; see `_apply_rubric`."""
        try:
            score = 0.0 if self.rubric is None else self.rubric(action, observation)
            return await score if inspect.isawaitable(score) else score
        except LLMError as error:
            _mark_failure(observation, error)
            return None

    def _reset_rubric(self) -> None:
        """Reset the rubric for a new episode, if it has a `reset`."""
        if (reset := getattr(self.rubric, "reset", None)) is not None:
            reset()

    async def _reset_rubric_async(self) -> None:
        """Reset the rubric for a new episode with its `reset_async`, or else its `reset`."""
        if (reset_async := getattr(self.rubric, "reset_async", None)) is None:
            self._reset_rubric()
        elif inspect.isawaitable(pending := reset_async()):
            await pending


def _mark_failure(observation: Any, error: LLMError) -> None:
    observation.metadata[UNSCORED if isinstance(error, NoScoreError) else INFRASTRUCTURE_ERROR] = str(error)


def _make_sync_method(name: str) -> Callable[..., Any]:
    """Return a method that runs the coroutine method `name` and waits for it."""

    def run_sync(self: Any, *args: Any, **options: Any) -> Any:
        from openenv_core.loop_thread import shared_loop  # asyncio, which most environments do without

        return shared_loop().run(getattr(self, name), *args, **options)

    run_sync.__name__, run_sync.__doc__ = name.removesuffix("_async"), f"Run `{name}`, and wait for it."
    return run_sync
