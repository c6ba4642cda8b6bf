"""Answers to a dataset's prompts: the example of each group, and failed siblings."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from rl_bridge.data.examples import Example
from rl_bridge.errors import GeneratorError
from rl_bridge.rollout.assignment import Absence, Assignment, AssignmentResult, EpisodeSettings, NoTrajectory
from rl_bridge.rollout.single_turn import SingleTurn
from rl_bridge.types import Completion, Ending, Trajectory, Turn

SIBLINGS = 3


class Parts:
    """The dataset, the policy and the reward function. `failing` is what the policy raises, by the sibling's number."""

    def __init__(self) -> None:
        self.failing: dict[int, Exception] = {}
        self.rewards: dict[str, float | None] = {}
        self.asked = 0

    async def get_example(self, place: int) -> Example:
        return Example(id=str(place), prompt=({"role": "user", "content": str(place)},), target=place)

    def prompt(self, messages: Any) -> list[int] | None:
        return [int(messages[0]["content"])]

    async def answer(self, prompt: list[int], **_: Any) -> tuple[Turn, str]:
        number, self.asked = self.asked, self.asked + 1
        await asyncio.sleep(0)
        if number in self.failing:
            raise self.failing[number]
        completion = Completion(tokens=[number], logprobs=[-0.5], versions=[0], stopped=number != 2)
        return Turn(prompt=prompt, completion=completion), f"answer {number}"

    async def judge(self, prompt: Any, response: str, target: int) -> float | None:
        return self.rewards.get(response, float(target))

    async def play(self, group: int, *, max_attempts: int = 1) -> AssignmentResult:
        policy: Any = SimpleNamespace(prompt=self.prompt, answer=self.answer)
        policy.pin_replica = lambda: nullcontext(policy)
        loop = SingleTurn(self.get_example, policy, self.judge, max_attempts=max_attempts)
        settings = EpisodeSettings(temperature=1.0, num_turns=1, illegal_reward=0.0)
        siblings = tuple(range(SIBLINGS))
        return await loop.play(
            Assignment(lease=5, seeds=(7,) * SIBLINGS, siblings=siblings, settings=settings, task=group)
        )


async def test_siblings_answer_their_groups_example() -> None:
    parts = Parts()
    parts.rewards["answer 1"] = None
    result = await parts.play(11)
    first, unscored, cut_off = result.outcomes
    assert isinstance(first, Trajectory)
    assert (first.seed, first.reward, first.ending) == (7, 11.0, Ending.COMPLETED)
    assert isinstance(unscored, NoTrajectory)
    assert unscored.absence is Absence.UNSCORED
    assert cut_off.ending is Ending.TRUNCATED_LENGTH


async def test_answer_that_fails_is_tried_again_and_costs_its_sibling_alone() -> None:
    parts = Parts()
    parts.failing[0] = parts.failing[3] = GeneratorError("the engine did not answer")
    result = await parts.play(11, max_attempts=3)
    assert all(isinstance(outcome, Trajectory) for outcome in result.outcomes)
    assert (result.retried, result.last_failure) == (2, "GeneratorError: the engine did not answer")
    assert parts.asked == SIBLINGS + 2
    parts = Parts()
    parts.failing[1] = GeneratorError("the engine did not answer")
    first, dropped, last = (await parts.play(11)).outcomes
    assert isinstance(dropped, NoTrajectory)
    assert (dropped.absence, dropped.reason) == (Absence.DROPPED, result.last_failure)
    assert isinstance(first, Trajectory)
    assert isinstance(last, Trajectory)
