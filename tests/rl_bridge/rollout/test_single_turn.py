"""Answers to a dataset's prompts: whose example is answered, and what becomes of a sibling that comes to nothing."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from rl_bridge.data.examples import Example
from rl_bridge.errors import GeneratorError, PromptRefusedError
from rl_bridge.rollout.assignment import Absence, Assignment, EpisodeSettings, NoTrajectory
from rl_bridge.rollout.single_turn import SingleTurn
from rl_bridge.services.handle import LocalService
from rl_bridge.types import Completion, Ending, Trajectory, Turn

SIBLINGS = 3


class Parts:
    """The dataset, the policy and the reward function. `failing` is what the policy raises, by the sibling's number."""

    def __init__(self) -> None:
        self.failing: dict[int, Exception] = {}
        self.rewards: dict[str, float | None] = {}
        self.asked = 0
        self.under_way = 0

    def get_example(self, place: int) -> Example:
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

    def loop(self, *, max_attempts: int = 1) -> SingleTurn:
        service: Any = LocalService(self)
        policy: Any = SimpleNamespace(prompt=self.prompt, answer=self.answer)
        policy.pin_replica = lambda: nullcontext(policy)
        return SingleTurn(service, policy, service, max_attempts=max_attempts)

    def assignment(self, group: int) -> Assignment:
        settings = EpisodeSettings(temperature=1.0, num_turns=1, illegal_reward=0.0)
        return Assignment(
            lease=5,
            seeds=(7,) * SIBLINGS,
            siblings=tuple(range(SIBLINGS)),
            settings=settings,
            task=group,
            sampling_key=None,
        )


async def test_siblings_answer_their_groups_example() -> None:
    parts = Parts()
    parts.rewards["answer 1"] = None
    result = await parts.loop().play(parts.assignment(11))
    first, unscored, cut_off = result.outcomes
    assert isinstance(first, Trajectory)
    assert (first.seed, first.reward, first.ending) == (7, 11.0, Ending.COMPLETED)
    assert isinstance(unscored, NoTrajectory)
    assert unscored.absence is Absence.UNSCORED
    assert cut_off.ending is Ending.TRUNCATED_LENGTH


async def test_answer_that_fails_is_tried_again_and_costs_its_sibling_alone() -> None:
    parts = Parts()
    parts.failing[0] = parts.failing[3] = GeneratorError("the engine did not answer")
    result = await parts.loop(max_attempts=3).play(parts.assignment(11))
    assert all(isinstance(outcome, Trajectory) for outcome in result.outcomes)
    assert (result.retried, result.last_failure) == (2, "GeneratorError: the engine did not answer")
    assert parts.asked == SIBLINGS + 2
    parts = Parts()
    parts.failing[1] = GeneratorError("the engine did not answer")
    first, dropped, last = (await parts.loop().play(parts.assignment(11))).outcomes
    assert isinstance(dropped, NoTrajectory)
    assert (dropped.absence, dropped.reason) == (Absence.DROPPED, result.last_failure)
    assert isinstance(first, Trajectory)
    assert isinstance(last, Trajectory)


async def test_what_is_finished_comes_back_when_the_rest_is_cut() -> None:
    parts = Parts()
    parts.failing.update({number: GeneratorError("later") for number in range(2, 100)})
    loop = parts.loop(max_attempts=50)
    playing = asyncio.ensure_future(loop.play(parts.assignment(11)))
    async with asyncio.timeout(30):
        while parts.asked < SIBLINGS + 1 or parts.under_way:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        loop.cancel([4, 5])
        first, second, late = (await playing).outcomes
    assert isinstance(first, Trajectory)
    assert isinstance(second, Trajectory)
    assert isinstance(late, NoTrajectory)
    assert late.absence is Absence.UNFINISHED
    assert parts.under_way == 0


async def test_error_of_another_kind_ends_the_assignment_and_all_of_its_answers() -> None:
    parts = Parts()
    parts.failing[1] = PromptRefusedError(0, "too long")
    with pytest.raises(PromptRefusedError):
        await parts.loop().play(parts.assignment(11))
    await asyncio.sleep(0)
    assert parts.under_way == 0
