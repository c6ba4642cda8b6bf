"""What a synthetic worker plays: an environment that sleeps, and a policy that answers at once."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from openenv_core import StepResult
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import Task
from rl_bridge.synthetic.settings import SyntheticSettings
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Completion, PolicyVersion, Turn

PROMPT, ANSWER = 1, 2
"""The only tokens there are."""


class SleepingClient:
    """A session with an environment whose only step takes its time."""

    def __init__(self, settings: SyntheticSettings) -> None:
        self._settings = settings

    async def connect(self) -> Self:
        """Nothing has to be reached."""
        return self

    async def reset(self, *, seed: int) -> StepResult[int]:
        """Begin an episode."""
        return StepResult(observation=seed)

    async def step(self, action: int) -> StepResult[int]:
        """Sleep; the action decides for how long."""
        await asyncio.sleep(self._settings.sleep_s(action))
        return StepResult(observation=action, reward=float(action % 2), done=True)

    async def close(self) -> None:
        """Nothing has to be let go."""


class SleepingTask(Task):
    """Shows nothing, and takes every answer for a number."""

    def __init__(self) -> None:
        self.folder = Path()

    def messages(self, observation: Any) -> list[ChatMessage]:
        """One empty message."""
        return [ChatMessage(role="user", content="")]

    def parse(self, text: str) -> int:
        """The number that the answer is."""
        return int(text)


class InstantPolicy(ChatPolicy):
    """Answers with the seed that it is to sample by, under the weights that it was told of last."""

    def __init__(self) -> None:
        self.version: PolicyVersion = 0

    @contextmanager
    def settled(self) -> Iterator["InstantPolicy"]:
        """There is no replica to settle at."""
        yield self

    def prompt(self, messages: Sequence[ChatMessage]) -> Sequence[int]:
        """One token."""
        return [PROMPT]

    async def answer(
        self, prompt: Sequence[int], *, temperature: float, seed: int | None = None
    ) -> tuple[Turn, str]:
        """The seed, as text."""
        completion = Completion(tokens=[ANSWER], logprobs=[0.0], versions=[self.version], stopped=True)
        return Turn(prompt=prompt, completion=completion), str(seed)
