"""The benchmark's environments on our server."""

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from benchmarks.vector.pole import Pole
from openenv_core import Action, Environment, Observation, State
from servers import create_app

SESSIONS = 1024
PICTURE = (84, 84, 4)


def _space(**described: Any) -> Any:
    return Field(json_schema_extra={"gymnasium_space": described})


class Push(Action):
    """Left, or right."""

    action: Annotated[int, _space(type="Discrete", n=2, start=0, dtype="int64")]


class Cart(Observation):
    """The state of cart and pole."""

    observation: Annotated[Any, _space(type="Box", low=None, high=None, shape=[4], dtype="float32")]


class CartEnvironment(Environment[Push, Cart, State]):
    """An environment with plain methods that never wait."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    BLOCKING = False

    def __init__(self) -> None:
        self._pole = Pole()

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Cart:
        """Start an episode."""
        return Cart(observation=np.array(self._pole.reset(seed), np.float32))

    def step(self, action: Push) -> Cart:
        """Push the cart."""
        done = self._pole.step(action.action)
        return Cart(observation=np.array(self._pole.at, np.float32), reward=1.0, done=done)

    @property
    def state(self) -> State:
        """The number of steps taken."""
        return State(step_count=self._pole.steps)


class Picture(Observation):
    """An 84 x 84 picture with 4 channels."""

    observation: Annotated[Any, _space(type="Box", low=0, high=255, shape=list(PICTURE), dtype="uint8")]


PICTURES = [np.random.default_rng(number).integers(0, 256, PICTURE, np.uint8) for number in range(8)]


class PictureEnvironment(CartEnvironment):
    """An environment that shows pictures created in advance."""

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Any:
        """Start an episode."""
        self._pole.steps = 0
        return Picture(observation=PICTURES[0])

    def step(self, action: Push) -> Any:
        """Show the next picture."""
        self._pole.steps += 1
        return Picture(observation=PICTURES[self._pole.steps % 8], reward=0.0)


cart = create_app(CartEnvironment, Push, Cart, max_concurrent_envs=SESSIONS)
pictures = create_app(PictureEnvironment, Push, Picture, max_concurrent_envs=SESSIONS)
