"""The trivial environment on the released server. Runs in a venv of its own, where ours is absent."""

import asyncio
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

SESSIONS = 20_000
WAIT_S = 1.0


class Message(Action):
    """What the driver sends."""

    message: str


class Echo(Observation):
    """What it gets back."""

    echoed: str
    step: int


class Sync(Environment):
    """Plain methods, which is how released environments are written."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._step = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Echo:
        """Begin to count."""
        self._step = 0
        return Echo(echoed="ready", step=0)

    def step(self, action: Message, timeout_s: float | None = None, **options: Any) -> Echo:
        """Count, and give the message back."""
        self._step += 1
        return Echo(echoed=action.message, step=self._step, reward=1.0)

    @property
    def state(self) -> State:
        """Where it stands."""
        return State(step_count=self._step)


class Async(Sync):
    """The same with coroutines beside the plain methods."""

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> Echo:
        """Begin to count."""
        return self.reset()

    async def step_async(self, action: Message, timeout_s: float | None = None, **options: Any) -> Echo:
        """Count, and give the message back."""
        return self.step(action)


class Waiting(Async):
    """A step that waits."""

    async def step_async(self, action: Message, timeout_s: float | None = None, **options: Any) -> Echo:
        """Wait, then count."""
        await asyncio.sleep(WAIT_S)
        return self.step(action)


sync = create_app(Sync, Message, Echo, env_name="trivial", max_concurrent_envs=SESSIONS)
asynchronous = create_app(Async, Message, Echo, env_name="trivial", max_concurrent_envs=SESSIONS)
waiting = create_app(Waiting, Message, Echo, env_name="trivial", max_concurrent_envs=SESSIONS)
