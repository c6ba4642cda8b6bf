"""Answers to a dataset's prompts: whose example is answered, and what becomes of a sibling that comes to nothing."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rl_bridge.data.examples import Example
from rl_bridge.errors import GeneratorError, PromptRefused, ReplicaLost
from rl_bridge.rollout.assignment import Absence, Assignment, NoTrajectory
from rl_bridge.rollout.episode import EpisodeSettings
from rl_bridge.rollout.single_turn import SingleTurn
from rl_bridge.services.local import LocalService
from rl_bridge.types import Completion, Ending, Trajectory, Turn

SIBLINGS = 3


class Parts:
    """The dataset, the policy and the reward function. `failing` is what the policy raises, by the sibling's number."""

    def __init__(self) -> None:
        self.failing: dict[int, Exception] = {}
        self.rewards: dict[str, float | None] = {}
        self.asked = 0
        self.under_way = 0

    def at(self, place: int) -> Example:
        return Example(id=str(place), prompt=({"role": "user", "content": str(place)},), target=place)

    def prompt(self, messages: Any) -> list[int] | None:
        return [int(messages[0]["content"])]

    async def answer(self, prompt: list[int], **_: Any) -> tuple[Turn, str]:
        number, self.asked = self.asked, self.asked + 1
        self.under_way += 1
        try:
            await asyncio.sleep(0 if number in self.failing else 0.01)
            if number in self.failing:
                raise self.failing[number]
        finally:
            self.under_way -= 1
        completion = Completion(tokens=[number], logprobs=[-0.5], versions=[0], stopped=number != 2)
        return Turn(prompt=prompt, completion=completion), f"answer {number}"

    async def evaluate_response(self, *, prompt: Any, response: str, target: int) -> float | None:
        return self.rewards.get(response, float(target))

    def play(self, group: int) -> Any:
        settings = EpisodeSettings(temperature=1.0, num_turns=1, illegal_reward=0.0)
        assignment = Assignment(
            lease=5,
            seeds=(7,) * SIBLINGS,
            siblings=tuple(range(SIBLINGS)),
            settings=settings,
            group=group,
            sampling_key=None,
        )
        service: Any = LocalService(self)
        policy: Any = SimpleNamespace(prompt=self.prompt, answer=self.answer)
        return SingleTurn(service, policy, service).play(assignment)


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


async def test_engine_that_fails_one_sibling_costs_that_sibling_alone() -> None:
    parts = Parts()
    parts.failing[1] = GeneratorError("the engine did not answer")
    first, dropped, last = (await parts.play(11)).outcomes
    assert isinstance(dropped, NoTrajectory)
    assert (dropped.absence, dropped.reason) == (
        Absence.DROPPED,
        "GeneratorError: the engine did not answer",
    )
    assert isinstance(first, Trajectory)
    assert isinstance(last, Trajectory)


@pytest.mark.parametrize("error", [PromptRefused(0, "too long"), ReplicaLost("gone")])
async def test_error_of_another_kind_ends_the_assignment_and_all_of_its_answers(error: Exception) -> None:
    parts = Parts()
    parts.failing[1] = error
    with pytest.raises(type(error)):
        await parts.play(11)
    await asyncio.sleep(0)
    assert parts.under_way == 0
