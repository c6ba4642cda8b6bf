"""Three words are said, each scored as it comes and all of them at the end; a model judges each step."""

import os
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.llm_client import OpenAIClient
from openenv.core.rubrics import (
    ExponentialDiscountingTrajectoryRubric,
    Gate,
    LLMJudge,
    Rubric,
    Sequential,
    WeightedSum,
)
from pydantic import Field

WORDS = 3


class Say(Action):
    word: str


class Heard(Observation):
    words: list[str] = Field(default_factory=list)


class Lower(Rubric):
    def forward(self, action: Say, observation: Heard) -> float:
        return float(action.word.islower())


class Different(ExponentialDiscountingTrajectoryRubric):
    def score_trajectory(self, trajectory: list[Any]) -> float:
        words = trajectory[-1][1].words
        return len(set(words)) / len(words)


class JudgedEnvironment(Environment[Say, Heard, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        client = OpenAIClient("http://127.0.0.1", int(os.environ["JUDGE_PORT"]), model="judge")
        self.different = Different(gamma=0.5, intermediate_reward=0.25)
        judge = LLMJudge("{action.word} of {observation.words}, from 0 to 1?", client, default_score=0.0)
        super().__init__(
            rubric=Sequential(Gate(Lower()), WeightedSum([judge, self.different], weights=[0.5, 0.5]))
        )
        self._words: list[str] = []

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        raise NotImplementedError("reset_async is there")

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> Heard:
        self._words = []
        self.different.reset()
        return Heard()

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        raise NotImplementedError("step_async is there")

    async def step_async(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        self._words.append(action.word)
        heard = Heard(words=list(self._words), done=len(self._words) == WORDS)
        heard.reward = await self._apply_rubric_async(action, heard)
        return heard

    @property
    def state(self) -> State:
        return State(step_count=len(self._words))


app = create_app(JudgedEnvironment, Say, Heard, env_name="judged_env", max_concurrent_envs=2)
