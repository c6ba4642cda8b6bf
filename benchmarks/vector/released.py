"""The same cart on the released server. Runs in the released package's venv, which lacks ours."""

from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pole import Pole

SESSIONS = 1024


class Push(Action):
    """Left, or right."""

    action: int


class Cart(Observation):
    """The state of cart and pole."""

    observation: list[float]


class CartEnvironment(Environment):
    """An environment with plain methods, the way released environments are written."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._pole = Pole()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Cart:
        """Start an episode."""
        return Cart(observation=self._pole.reset(seed))

    def step(self, action: Push, timeout_s: float | None = None, **options: Any) -> Cart:
        """Push the cart."""
        done = self._pole.step(action.action)
        return Cart(observation=self._pole.at, reward=1.0, done=done)

    @property
    def state(self) -> State:
        """The number of steps taken."""
        return State(step_count=self._pole.steps)


cart = create_app(CartEnvironment, Push, Cart, env_name="cart", max_concurrent_envs=SESSIONS)
