"""An environment that waits and raises on request. Imported by the tests, and by the servers of its apps."""

import asyncio
import os

from fastapi import FastAPI

from openenv_core import Action, EnvClient, Environment, Observation, State
from servers import create_app


class Wait(Action):
    seconds: float = 0.0


class Waited(Observation):
    pid: int
    steps: int


class Slow(Environment[Wait, Waited, State]):
    """Takes as long as it is told."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._steps = 0

    async def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Waited:
        self._steps = 0
        return Waited(pid=os.getpid(), steps=0)

    async def step(self, action: Wait) -> Waited:
        if action.seconds < 0:
            raise RuntimeError("time does not run backwards")
        await asyncio.sleep(action.seconds)
        self._steps += 1
        return Waited(pid=os.getpid(), steps=self._steps)

    @property
    def state(self) -> State:
        return State(step_count=self._steps)


class SlowClient(EnvClient[Wait, Waited, State]):
    action_type = Wait
    observation_type = Waited
    state_type = State


def make_app(sessions: int) -> FastAPI:
    return create_app(Slow, Wait, Waited, env_name="slow", max_concurrent_envs=sessions)


app = make_app(512)
