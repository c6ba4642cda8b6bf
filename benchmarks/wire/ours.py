"""The trivial environment on our server, once for each way that a server can run a class."""

import asyncio

from openenv_core import Action, Environment, Observation, State
from servers import create_app

SESSIONS = 20_000
WAIT_S = 1.0


class Message(Action):
    """A message of the driver."""

    message: str


class Echo(Observation):
    """The echoed message."""

    echoed: str
    step: int


class Blocking(Environment[Message, Echo, State]):
    """Plain methods, which the server runs in a thread: the default."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._step = 0

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Echo:
        """Set the count to 0."""
        self._step = 0
        return Echo(echoed="ready", step=0)

    def step(self, action: Message) -> Echo:
        """Count, and echo the message."""
        self._step += 1
        return Echo(echoed=action.message, step=self._step, reward=1.0)

    @property
    def state(self) -> State:
        """The number of steps taken."""
        return State(step_count=self._step)


class Inline(Blocking):
    """The same methods, declared never to wait."""

    BLOCKING = False


class Async(Blocking):
    """The same methods as coroutines."""

    async def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Echo:  # type: ignore[override]
        """Set the count to 0."""
        return super().reset()

    async def step(self, action: Message) -> Echo:  # type: ignore[override]
        """Count, and echo the message."""
        return super().step(action)


class Waiting(Async):
    """An environment whose step waits, like one that calls a model or a sandbox."""

    async def step(self, action: Message) -> Echo:  # type: ignore[override]
        """Wait, then count."""
        await asyncio.sleep(WAIT_S)
        return await super().step(action)


inline = create_app(Inline, Message, Echo, max_concurrent_envs=SESSIONS)
blocking = create_app(Blocking, Message, Echo, max_concurrent_envs=SESSIONS)
asynchronous = create_app(Async, Message, Echo, max_concurrent_envs=SESSIONS)
waiting = create_app(Waiting, Message, Echo, max_concurrent_envs=SESSIONS)
