"""The trivial environment on the released server. Runs in the released package's venv, which lacks ours."""

import asyncio
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

SESSIONS = 20_000
WAIT_S = 1.0


class Message(Action):
    """A message of the driver."""

    message: str


class Echo(Observation):
    """The echoed message."""

    echoed: str
    step: int


class Sync(Environment):
    """Plain methods, the way released environments are written."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._step = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Echo:
        """Set the count to 0."""
        self._step = 0
        return Echo(echoed="ready", step=0)

    def step(self, action: Message, timeout_s: float | None = None, **options: Any) -> Echo:
        """Count, and echo the message."""
        self._step += 1
        return Echo(echoed=action.message, step=self._step, reward=1.0)

    @property
    def state(self) -> State:
        """The number of steps taken."""
        return State(step_count=self._step)


class Waiting(Sync):
    """An environment whose step waits: coroutines in addition to the plain methods."""

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> Echo:
        """Set the count to 0."""
        return self.reset()

    async def step_async(self, action: Message, timeout_s: float | None = None, **options: Any) -> Echo:
        """Wait, then count."""
        await asyncio.sleep(WAIT_S)
        return self.step(action)


sync = create_app(Sync, Message, Echo, env_name="trivial", max_concurrent_envs=SESSIONS)
waiting = create_app(Waiting, Message, Echo, env_name="trivial", max_concurrent_envs=SESSIONS)
