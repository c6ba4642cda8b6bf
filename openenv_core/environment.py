"""The contract that an author of an environment fulfils, and transforms of its observations."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from openenv_core.errors import ConfigurationError, LLMError
from openenv_core.outcomes import INFRASTRUCTURE_ERROR
from openenv_core.types import ActT, EnvironmentMetadata, ObsT, StateT

F = TypeVar("F", bound=Callable[..., Any])


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


# A class has to have these methods. It gets them by itself where it writes `reset_async` or `step_async`, which type
# checkers cannot see: for them they are methods like any other.
if TYPE_CHECKING:

    def _required(method: F) -> F:
        return method
else:
    _required = abstractmethod


class Environment(ABC, Generic[ActT, ObsT, StateT]):
    """One episode at a time of something an agent can act in.

    Authors write `reset`, `step` and `state`, each as `def` or as `async def`, and take whatever
    keyword options the environment has:

        class Dice(Environment[Roll, Face, State]):
            BLOCKING = False

            def reset(self, *, seed=None, episode_id=None, sides: int = 6) -> Face: ...
            def step(self, action: Roll) -> Face: ...
            @property
            def state(self) -> State: ...

    A server makes one instance a session and never calls two methods of one instance at once. Rewards
    are deltas: each observation carries the reward of its own step. The same seed gives the same episode.

    Type checkers hold `reset` and `step` of a subclass against the signatures here.

    Servers prefer `reset_async`, `step_async` and `close_async`, where there are such. A class that writes one of them
    and not the plain method gets that by itself: it waits for the other, for callers without an event loop.

    A rubric, where there is one, is called with the action and the observation and gives the reward; one with
    `reset` is told of a new episode. Neither it nor the transform is applied by itself: `step` says where, with
    `self._apply_rubric(action, observation)` and `self._apply_transform(observation)`. Subclasses without use
    for either need not call this constructor. Those that know tasks follow `openenv_core.tasks.TaskProvider`.

    Args:
        transform: What `_apply_transform` applies; None changes nothing.
        rubric: What `_apply_rubric` calls; None gives 0.0.

    Attributes:
        BLOCKING: False promises that the plain (not async) methods and the constructor never wait and
            take well under a millisecond, so that a server may run them on its event loop.
        DETERMINISTIC: True promises that the seed and the actions decide everything.
        FORKABLE: True promises that an instance on which `restore` was called with what `snapshot` has returned goes
            on as the original would, and neither changes the other. An instance may say it for itself. The methods
            that there are copy all attributes (`copy.deepcopy`): write others where that is not enough, or too much.
        SUPPORTS_CONCURRENT_SESSIONS: True promises that several instances can live in one process.
        REQUIRES_SINGLE_THREAD_EXECUTOR: True asks that every call to one instance comes from one thread.
    """

    BLOCKING: ClassVar[bool] = True
    DETERMINISTIC: ClassVar[bool] = False
    FORKABLE: bool = False
    SUPPORTS_CONCURRENT_SESSIONS: ClassVar[bool] = False
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
    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> ObsT | Awaitable[ObsT]:
        """Start a new episode and return its first observation.

        A subclass may take further options by name, each with a default.

        Args:
            seed: Decides the episode where the environment is deterministic; None asks for a fresh one.
            episode_id: The caller's name for the episode; by custom a new uuid4 where it is None.
        """
        raise NotImplementedError

    @_required
    def step(self, action: ActT, /) -> ObsT | Awaitable[ObsT]:
        """Apply one action and return what follows.

        A subclass may take `timeout_s` and further options by name, each with a default.

        Raises:
            EpisodeOverError: The episode has ended and was not reset.
        """
        raise NotImplementedError

    @property
    @abstractmethod
    def state(self) -> StateT:
        """Where the episode stands, without changing it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("reset", "step", "close"):
            awaited = f"{name}_async"
            if not inspect.iscoroutinefunction(getattr(cls, awaited, None)):
                continue
            if getattr(cls, name) is vars(Environment)[name]:
                setattr(cls, name, _make_sync_method(awaited))
            elif inspect.iscoroutinefunction(vars(cls).get(name)) and awaited not in vars(cls):
                raise ConfigurationError(
                    f"{cls.__qualname__}.{name} would never be called: its base has {awaited}, which servers prefer; "
                    f"call the method {awaited}"
                )

    def close(self) -> Awaitable[None] | None:
        """Give back what the instance holds. Called once, after the last other call."""
        return None

    def snapshot(self) -> Any:
        """Return where the instance stands, for `restore`; may be async. The episode goes on unchanged.

        A state may be restored many times. One that holds something has a method `close`, plain or async, which is
        called once nobody needs it any more; one with `nbytes` tells how much memory it takes.
        """
        # What refers to the instance itself is to refer to the one that is restored.
        stand_in = object()
        return stand_in, deepcopy(vars(self), {id(self): stand_in})

    def restore(self, state: Any) -> Awaitable[None] | None:
        """Go on from where the instance stood that `snapshot` was called on; may be async.

        Called at most once, on a fresh instance of the same class, made with the same arguments.

        Args:
            state: What `snapshot` has returned; it is not to be changed.
        """
        stand_in, attributes = state
        vars(self).update(deepcopy(attributes, {id(stand_in): self}))
        return None

    def get_metadata(self) -> EnvironmentMetadata | Awaitable[EnvironmentMetadata]:
        """What the environment says of itself: by default its name and the docstring of its class."""
        cls = type(self)
        return EnvironmentMetadata(
            name=cls.__name__, description=inspect.cleandoc(cls.__doc__ or cls.__name__)
        )

    def _apply_transform(self, observation: ObsT) -> ObsT:
        """Return what the transform makes of an observation; without one, the observation."""
        return observation if self.transform is None else self.transform(observation)

    def _apply_rubric(self, action: ActT, observation: ObsT) -> float | None:
        """Return the reward that the rubric gives; 0.0 without one.

        A language model that it asks and that gives no answer is the infrastructure's failure: the observation says so
        (`openenv_core.outcomes`), and there is no reward.

        Raises:
            TypeError: The rubric is asynchronous: `await self._apply_rubric_async(...)` runs it.
        """
        try:
            score = 0.0 if self.rubric is None else self.rubric(action, observation)
        except LLMError as error:
            _mark_failure(observation, error)
            return None
        if inspect.isawaitable(score) and not isinstance(score, float):
            if inspect.iscoroutine(score):
                score.close()
            raise TypeError(
                "expected a reward from the rubric, got an awaitable; "
                "make step() async and await self._apply_rubric_async(action, observation)"
            )
        return score

    async def _apply_rubric_async(self, action: ActT, observation: ObsT) -> float | None:
        """Return the reward that the rubric, asynchronous or not, gives; see `_apply_rubric`."""
        try:
            score = 0.0 if self.rubric is None else self.rubric(action, observation)
            return await score if inspect.isawaitable(score) else score
        except LLMError as error:
            _mark_failure(observation, error)
            return None

    def _reset_rubric(self) -> None:
        """Reset the rubric for a new episode, where it has a `reset`."""
        if (reset := getattr(self.rubric, "reset", None)) is not None:
            reset()

    async def _reset_rubric_async(self) -> None:
        """Reset the rubric for a new episode by its `reset_async`, else its `reset`."""
        if (reset_async := getattr(self.rubric, "reset_async", None)) is None:
            self._reset_rubric()
        elif inspect.isawaitable(pending := reset_async()):
            await pending


def _mark_failure(observation: Any, error: LLMError) -> None:
    observation.metadata[INFRASTRUCTURE_ERROR] = str(error)


def _make_sync_method(name: str) -> Callable[..., Any]:
    """Return a method that runs a method of coroutines and waits for it."""

    def wait(self: Any, *args: Any, **options: Any) -> Any:
        from openenv_core.loop_thread import shared_loop  # asyncio, which most environments do without

        return shared_loop().run(getattr(self, name), *args, **options)

    wait.__name__, wait.__doc__ = name.removesuffix("_async"), f"Run `{name}`, and wait for it."
    return wait
