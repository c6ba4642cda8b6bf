"""Variants of a counter environment: on the event loop, in threads, async, slow, broken."""

import asyncio
import math
import threading
import time
from typing import Any
from uuid import uuid4

import numpy as np
from pydantic import field_validator

from openenv_core import Action, Environment, EpisodeOverError, Observation, State
from openenv_core.outcomes import INFRASTRUCTURE_ERROR, UNSCORED
from servers import create_app

LIMIT = 10


class Add(Action):
    amount: int

    @field_validator("amount")
    @classmethod
    def not_thirteen(cls, value: int) -> int:
        if value == 13:
            raise ValueError("thirteen is refused")
        return value


class Count(Observation):
    total: int = 0
    extra: Any = None


class CountState(State):
    total: int = 0
    thread: str = ""


class Counter(Environment[Add, Count, CountState]):
    """Counts up to a limit."""

    BLOCKING = False
    DETERMINISTIC = True
    FORKABLE = True
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state = CountState()

    def reset(self, *, seed: int | None = None, episode_id: str | None = None, start: int = 0) -> Count:
        self._state = CountState(episode_id=episode_id or str(uuid4()), total=(seed or 0) + start)
        return Count(total=self._state.total)

    def step(self, action: Add) -> Count:
        state = self._state
        if state.total >= LIMIT:
            raise EpisodeOverError
        state.total += action.amount
        state.step_count += 1
        state.thread = threading.current_thread().name
        return Count(total=state.total, reward=1, done=state.total >= LIMIT)

    @property
    def state(self) -> CountState:
        return self._state


class BlockingCounter(Counter):
    BLOCKING = True


class AsyncCounter(Counter):
    async def reset(self, *, seed: int | None = None, episode_id: str | None = None, start: int = 0) -> Count:
        return super().reset(seed=seed, episode_id=episode_id, start=start)

    async def step(self, action: Add) -> Count:
        await asyncio.sleep(0)
        return super().step(action)


class ReleasedCounter(BlockingCounter):
    """Has sync and async methods, like some environments for the released package."""

    def reset(self, *args: Any, **options: Any) -> Count:
        raise AssertionError("reset_async goes first")

    step = reset

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> Count:
        return Count(total=seed or 0, metadata={"options": sorted(kwargs)})

    async def step_async(self, action: Add, timeout_s: float | None = None, **kwargs: Any) -> Count:
        return Count(total=action.amount, metadata={"timeout_s": timeout_s, "options": sorted(kwargs)})


class Slow(Counter):
    """Steps hang until they are released; class attributes record what happened."""

    entered: threading.Event
    release: threading.Event
    closed: int
    stepping: int

    @classmethod
    def fresh(cls) -> "type[Slow]":
        """Return a subclass with its own record."""
        story = {"entered": threading.Event(), "release": threading.Event(), "closed": 0, "stepping": 0}
        return type(cls.__name__, (cls,), story)

    def close(self) -> None:
        type(self).closed += 1


class SlowAsync(Slow):
    async def step(self, action: Add) -> Count:
        type(self).stepping += 1
        self.entered.set()
        try:
            await asyncio.sleep(3600)
        finally:
            type(self).stepping -= 1
        raise AssertionError


class SlowBlocking(Slow):
    BLOCKING = True

    def step(self, action: Add) -> Count:
        type(self).stepping += 1
        self.entered.set()
        self.release.wait(60)
        type(self).stepping -= 1
        return Count()


class SlowSolitary(SlowBlocking):
    SUPPORTS_CONCURRENT_SESSIONS = False


class SlowConstructor(Slow):
    BLOCKING = True

    def __init__(self) -> None:
        super().__init__()
        self.entered.set()
        self.release.wait(60)


class Awkward(Counter):
    """Returns or raises awkward values, chosen by the amount."""

    def step(self, action: Add) -> Count:
        match action.amount:
            case 0:
                return Count(reward=math.nan, extra={"nan": math.nan, "inf": [math.inf, -math.inf]})
            case 1:
                return Count(
                    extra={"array": np.arange(4).reshape(2, 2), "scalar": np.float32(1.5), "bytes": b"\xff"}
                )
            case 2:
                return Count(
                    reward=np.float64(0.5), metadata={"flag": np.bool_(True), "nan": np.array([np.nan])}
                )
            case 3:
                raise SystemExit("out of here")
            case 4:
                return None  # type: ignore[return-value]
            case 5:
                return Count(extra=object())
            case 6:
                raise RuntimeError("lone surrogate \ud800")
            case 7:
                return Count(extra="lone surrogate \ud800")
            case 8:
                return Count(reward=True, metadata={"why": "because"})
            case 9:
                raise ValueError
            case _:
                return Count(reward=0.25, extra=time.monotonic)


class CutOff(Counter):
    """The first step truncates the episode, with every marker set."""

    def step(self, action: Add) -> Count:
        why = {"infrastructure_error": "no disk", "unscored": "no judge"}
        return Count(total=action.amount, done=True, truncated=True, **why)


class Fragile(Counter):
    """An amount of 7 is an infrastructure failure; any other is the reward, and ends the episode."""

    DETERMINISTIC = False  # otherwise clients would draw seeds, which are the start values

    def step(self, action: Add) -> Count:
        if action.amount == 7:
            return Count(infrastructure_error="no disk", reward=7)
        return Count(total=action.amount, reward=action.amount, done=True)


class Failing(Counter):
    """Each step ends the episode, which does not count: MARK says in the metadata why."""

    MARK = INFRASTRUCTURE_ERROR

    def step(self, action: Add) -> Count:
        return Count(metadata={self.MARK: "the disk is full"}, done=True)


class Unscored(Failing):
    MARK = UNSCORED


class Diverging(Counter):
    """A step of 0 has a reward of NaN, any other one of 1."""

    DETERMINISTIC = False  # otherwise clients would draw seeds, which are the start values

    def step(self, action: Add) -> Count:
        observation = super().step(action)
        if not action.amount:
            observation.reward = math.nan
        return observation


class Unbuildable(Counter):
    def __init__(self) -> None:
        raise RuntimeError("no such counter")


app = create_app(Counter, Add, Count, env_name="counter", max_concurrent_envs=64, state_cls=CountState)
fragile_app = create_app(Fragile, Add, Count, env_name="counter", max_concurrent_envs=64)
cut_off_app = create_app(CutOff, Add, Count, env_name="counter")
solo_app = create_app(Counter, Add, Count, env_name="counter")
