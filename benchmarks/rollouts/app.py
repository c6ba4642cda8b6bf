"""An environment whose steps wait, like steps that call a model or a sandbox."""

import asyncio

from openenv_core import Action, EnvClient, Environment, Observation, State
from servers import create_app

SESSIONS = 1024
WAIT_S = 0.1
STEPS = 4


class Go(Action):
    """Take a step."""

    number: int


class Waited(Observation):
    """The number of steps taken."""

    steps: int


class Waiting(Environment[Go, Waited, State]):
    """An environment whose episode is a few steps that wait."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._steps = 0

    async def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Waited:
        """Start an episode."""
        self._steps = 0
        return Waited(steps=0)

    async def step(self, action: Go) -> Waited:
        """Wait."""
        await asyncio.sleep(WAIT_S)
        self._steps += 1
        return Waited(steps=self._steps, reward=1.0, done=self._steps == STEPS)

    @property
    def state(self) -> State:
        """The number of steps taken."""
        return State(step_count=self._steps)


class WaitingClient(EnvClient[Go, Waited, State]):
    """A client of `Waiting`."""

    action_type = Go
    observation_type = Waited
    state_type = State


app = create_app(Waiting, Go, Waited, max_concurrent_envs=SESSIONS)
