"""The base class of environments with several players, each of which sees only what its seat is shown."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any, ClassVar, Final, Generic, TypeAlias

from openenv_core.environment import Environment, StateT
from openenv_core.errors import ConfigurationError
from openenv_core.lifecycle import keep_models
from openenv_core.types import ActT, ObsT

SeatPolicy: TypeAlias = Callable[[Any, Random], Any]
"""Plays a seat on the server: an observation of that seat and a generator in, an action out."""

END: Final = "end"
FORFEIT: Final = "forfeit"


class MultiAgentEnvironment(
    Environment[Mapping[str, ActT], Mapping[str, ObsT], StateT], Generic[ActT, ObsT, StateT]
):
    """An environment that several players act in, one episode at a time.

    Authors name the seats, and implement `reset` and `step` by seat:

        class Throws(MultiAgentEnvironment[Throw, Seen]):
            seats = ("left", "right")

            def reset(self) -> dict[str, Seen]:
                return {seat: Seen(hint="throw") for seat in self.seats}

            def step(self, actions: Mapping[str, Throw]) -> dict[str, Seen]:
                rewards = score(actions["left"].hand, actions["right"].hand)
                return {seat: Seen(reward=rewards[seat], terminated=True) for seat in self.seats}

    `reset` returns what each seat sees first, and `step` what each seat that has not ended sees next, with the reward
    of that seat for this step, and its end. The base keeps the episodes as for any `Environment`. `reset` and `step`
    are plain methods. Where not all seats act at once, override `turn`. Rubrics and transforms are for single players.

    A server gives each session the seat that it asks for. The players of the other seats are other sessions, or
    policies of the class. See docs/players.md.

    Attributes:
        seats: The names of the seats, in order.
        POLICIES: Policies that can play a seat on the server, by name. The first one plays the seats that no client
            takes.
        ABSENT: What happens if the player of a seat leaves, or does not act in time: "end" cuts the episode off for
            all; "forfeit" ends it as `forfeit` says; the name of a policy has that play on.
        TURN_TIMEOUT_S: Seconds that a player has to act, and that a table waits for its players.
    """

    seats: ClassVar[Sequence[str]] = ()
    POLICIES: ClassVar[Mapping[str, SeatPolicy]] = MappingProxyType({})
    ABSENT: ClassVar[str] = END
    TURN_TIMEOUT_S: ClassVar[float] = 30.0

    @abstractmethod
    def reset(self, *values: Any, **options: Any) -> Mapping[str, ObsT]:
        """Start a new episode and return the first observation of each seat."""
        raise NotImplementedError

    @abstractmethod
    def step(self, actions: Mapping[str, ActT], /) -> Mapping[str, ObsT]:
        """Apply the actions of the seats whose turn it is.

        Returns:
            The observation of each seat that had not ended, with its reward for this step and its end. The episode is
            over once all have ended.
        """
        raise NotImplementedError

    @property
    def turn(self) -> Sequence[str]:
        """The seats that act next, by default all; those that have ended are passed over."""
        return self.seats

    def check(self, seat: str, action: ActT, /) -> None:
        """Raise a ValueError if a seat may not act so; nothing changes then, and its player may try again.

        The player of the seat is shown the message; to a client it is a ValidationFailedError, and in training an
        answer that the environment refuses. An error in `step` ends the episode for all instead.
        """

    def forfeit(self, seat: str, /) -> Mapping[str, ObsT]:
        """Return the last observation of each seat that had not ended, since the player of `seat` is gone."""
        raise NotImplementedError

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        keep_models(cls, MultiAgentEnvironment)
        name = cls.__qualname__
        if inspect.isabstract(cls) or not cls.seats:
            return
        if isinstance(cls.seats, str) or len(set(cls.seats)) < len(cls.seats):
            raise ConfigurationError(f"{name}.seats is a sequence of names, each once, not {cls.seats!r}")
        if any(inspect.iscoroutinefunction(getattr(cls, method)) for method in ("reset", "step")):
            raise ConfigurationError(f"{name} has an `async def`; reset and step by seat are plain methods")
        if cls.ABSENT not in (END, FORFEIT, *cls.POLICIES):
            known = ", ".join((END, FORFEIT, *cls.POLICIES))
            raise ConfigurationError(f"expected {name}.ABSENT to be one of {known}, got {cls.ABSENT!r}")
        if cls.ABSENT == FORFEIT and cls.forfeit is MultiAgentEnvironment.forfeit:
            raise ConfigurationError(f'{name}.ABSENT is "forfeit"; define how, in a method `forfeit`')
