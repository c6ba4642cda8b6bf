"""An environment that accepts every input and never raises, with all optional methods."""

from typing import Any, Literal
from uuid import uuid4

from pydantic import Field

from openenv_core import Action, Environment, Observation, State
from servers import create_app


class Say(Action):
    text: str = Field(max_length=1000)
    times: int = Field(default=1, ge=1, le=3)
    manner: Literal["plain", "loud"] = "plain"


class Echo(Observation):
    echo: str = ""
    turn: int = 0


class EchoState(State):
    said: list[str] = Field(default_factory=list)


class Echoes(Environment[Say, Echo, EchoState]):
    """Echoes its actions."""

    BLOCKING = False
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state = EchoState()

    def reset(self, *, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Echo:
        self._state = EchoState(episode_id=episode_id or str(uuid4()))
        return Echo(echo="ready", metadata={"options": len(options)})

    def step(self, action: Say, **options: Any) -> Echo:
        state = self._state
        state.step_count += 1
        state.said = [*state.said[-3:], action.text]
        return Echo(echo=action.text * action.times, turn=state.step_count, reward=float(len(action.text)))

    @property
    def state(self) -> EchoState:
        return self._state

    def list_splits(self) -> list[str]:
        return ["train", "odd"]

    def list_tasks(self, split: str) -> list[str]:
        return [f"{split} {number}" for number in range(3)]

    def num_tasks(self, split: str) -> int:
        return 3

    def get_task(self, split: str, index: int) -> str:
        return self.list_tasks(split)[index]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[str]:
        return self.list_tasks(split)[start:stop]


class EchoesInThreads(Echoes):
    BLOCKING = True


def app_of(environment: type[Echoes]) -> Any:
    return create_app(
        environment, Say, Echo, env_name="echoes", max_concurrent_envs=100_000, state_cls=EchoState
    )


app = app_of(Echoes)
in_threads = app_of(EchoesInThreads)
"""The same in threads: the server reads ahead, so frames arrive while a step runs."""
