"""One episode against a scripted session: rewards, unscored episodes, and endings."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field
from rollout_fixtures import CUT, FakeEngine, FakeTokenizer, Note, NotebookTask, Notes, Script, word
from tool_fixtures import task_of

from openenv_core import Observation, StepResult
from openenv_core.protocol.frames import encode_request
from rl_bridge.config import Config
from rl_bridge.errors import EpisodeUnscoredError, ReplicaLostError
from rl_bridge.generator.client import GeneratorClient
from rl_bridge.rollout.assignment import EpisodeSettings
from rl_bridge.rollout.episode import Judge, play_episode
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.task import Task
from rl_bridge.services.handle import LocalService
from rl_bridge.types import Ending, Trajectory, Turn


class Listed:
    """Answers a reset, and then each step, with the next of a list: an observation and what it earned."""

    def __init__(self, *answers: tuple[Observation, float | None]) -> None:
        self._answers: Iterator[tuple[Observation, float | None]] = iter(answers)

    async def reset(self, **options: Any) -> StepResult[Any]:
        return await self.step(None)

    async def step(self, action: Any, /) -> StepResult[Any]:
        observation, reward = next(self._answers)
        return StepResult(observation, reward, observation.done, observation.metadata)


def noted(reward: float | None, *, done: bool = False) -> tuple[Observation, float | None]:
    return Notes(words=["a", "b"], done=done), reward


def policy_of(script: Script, *, max_new_tokens: int = 8) -> ChatPolicy:
    tokenizer: Any = FakeTokenizer()
    client = GeneratorClient(LocalService(FakeEngine(tokenizer, script)), max_batch=8)
    return ChatPolicy(tokenizer, client, max_new_tokens=max_new_tokens, max_length=640)


SETTINGS = EpisodeSettings(temperature=1.0, num_turns=8, illegal_reward=-1.0)


async def play(
    session: Listed,
    policy: ChatPolicy,
    task: Task | None = None,
    settings: EpisodeSettings = SETTINGS,
    **options: Any,
) -> Trajectory:
    task = task or task_of(NotebookTask)
    found = await play_episode(session, policy, task, seed=1, settings=settings, **options)
    assert isinstance(found, Trajectory)
    return found


async def noting(*answers: tuple[Observation, float | None], judge: Judge | None = None) -> Trajectory:
    return await play(Listed(*answers), policy_of(word), judge=judge)


@pytest.mark.parametrize(("reward", "at"), [(float("nan"), 0), (10**400, 2)])
async def test_reward_that_is_not_finite_leaves_the_episode_unscored(reward: float, at: int) -> None:
    answers = [noted(0.0), noted(0.25), noted(0.5, done=True)]
    assert (await noting(*answers)).reward == 0.75
    answers[at] = noted(reward, done=at == 2)
    with pytest.raises(
        EpisodeUnscoredError, match=r"the reward is (nan|an integer beyond the range of floats)"
    ):
        await noting(*answers)


async def test_scores_of_the_rubrics_parts_are_summed_as_rewards_are() -> None:
    def scored(scores: Any, *, done: bool = False) -> tuple[Observation, float]:
        return Notes(words=["a", "b"], done=done, metadata={"rubric": scores}), 0.5

    first = scored({"legal": 1, "style": 0.5})
    second = scored({"legal": 0.5, "odd": "high", "lost": None})
    found = await noting(noted(0.0), first, second, scored("none", done=True))
    assert (found.reward, found.scores) == (1.5, {"legal": 1.5, "style": 0.5})
    with pytest.raises(EpisodeUnscoredError, match="the score of style is nan"):
        await noting(noted(0.0), scored({"style": float("nan")}), scored({}, done=True))


@pytest.mark.parametrize("judged", [2.0, None, ReplicaLostError("replica 0 of reward was lost")])
async def test_judge_adds_to_what_was_earned_or_leaves_the_episode_unscored(judged: Any) -> None:
    async def judge(chat: Sequence[Any], answers: str, target: Any) -> float | None:
        assert ([message["content"] for message in chat], answers, target) == (["a b"], "word\nword", None)
        if isinstance(judged, Exception):
            raise judged
        return judged  # type: ignore[no-any-return]

    answers = noted(None), noted(0.25), noted(None, done=True)
    if judged == 2.0:
        assert (await noting(*answers, judge=judge)).reward == 2.25
    else:
        with pytest.raises(EpisodeUnscoredError, match="reward"):
            await noting(*answers, judge=judge)


class Noted(BaseModel):
    text: Annotated[str, Field(max_length=3)]


@pytest.mark.parametrize(
    "parse",
    [
        lambda text: Noted(text=text),
        lambda text: {"text": "\ud800"},
        lambda text: {"text": str(int(text))},
        lambda text: {"hit": 1}[text],
    ],
    ids=["model", "wire", "number", "table"],
)
async def test_action_that_its_model_refuses_is_the_policys_doing(parse: Any) -> None:
    """Be it when the task makes it, or when it is to be sent."""
    task = task_of(NotebookTask)
    task.parse = parse  # type: ignore[method-assign]

    class Sending(Listed):
        async def step(self, action: Any, /) -> StepResult[Any]:
            if action is not None:
                encode_request("step", action)
            return await super().step(action)

    session = Sending(noted(0.5), noted(0.25, done=True))
    found = await play(session, policy_of(lambda prompt: "lengthy"), task)
    assert (found.ending, found.reward, len(found.turns)) == (Ending.REFUSED_ACTION, 0.5 - 1.0, 1)
    assert found.refusal is not None


@pytest.mark.parametrize(
    ("rollout", "tokens", "ending"),
    [
        ({"max_new_tokens": 64}, 64, Ending.ILLEGAL),
        ({"max_new_tokens": 65}, 65, Ending.TRUNCATED_LENGTH),
        ({"max_new_tokens": 65, "cut_answer": "illegal"}, 65, Ending.ILLEGAL),
        ({"max_new_tokens": 8, "cut_answer": "truncated"}, 8, Ending.TRUNCATED_LENGTH),
        ({"max_new_tokens": 64}, 63, Ending.TRUNCATED_LENGTH),  # by the context: it might have had one more
    ],
)
async def test_cut_answer_that_means_nothing_is_paid_as_an_illegal_one_is(
    rollout: dict[str, Any], tokens: int, ending: Ending
) -> None:
    config = Config.model_validate({"env": {"app": "a:b"}, "rollout": {"task": "a:b", **rollout}})
    settings = EpisodeSettings.of(config, temperature=1.0)
    task = task_of(NotebookTask)
    task.parse = lambda text: Note(text=text) if text == "word" else None  # type: ignore[method-assign]
    answers = iter(
        ["word" + CUT, "well " * tokens + CUT]
    )  # one that means something counts, though it was cut
    policy = policy_of(lambda prompt: next(answers), max_new_tokens=rollout["max_new_tokens"])
    found = await play(Listed(noted(0.0), noted(0.5), noted(1.0, done=True)), policy, task, settings)
    assert (found.ending, found.reward, len(found.turns)) == (ending, 0.5 - 1.0, 2)


async def test_cut_answer_that_cannot_be_parsed_is_no_refused_action() -> None:
    task = task_of(NotebookTask)
    task.parse = lambda text: Note(text=str(int(text)))  # type: ignore[method-assign]
    policy = policy_of(lambda prompt: "let me think" + CUT)
    found = await play(Listed(noted(0.5), noted(0.25, done=True)), policy, task)
    assert (found.ending, found.reward, found.refusal) == (Ending.TRUNCATED_LENGTH, 0.5 - 1.0, None)


async def test_answers_of_a_failed_attempt_are_replayed_for_equal_prompts() -> None:
    numbers = itertools.count(1)
    policy, answers = policy_of(lambda prompt: f"word{next(numbers)}"), list[tuple[Turn, str]]()
    other = Notes(words=["c"]), 0.0

    with pytest.raises(EpisodeUnscoredError):  # after the second answer, by no fault of the policy's
        await play(Listed(noted(0.0), noted(0.0), noted(float("nan"))), policy, answers=answers)
    first = [turn.completion for turn, _ in answers]
    again = Listed(noted(0.0), noted(0.0), noted(0.0), noted(1.0, done=True))
    turns = (await play(again, policy, answers=answers)).turns
    assert [turn.completion for turn in turns[:2]] == first
    assert (len(turns), next(numbers)) == (3, 4)
    # Where an attempt comes to another observation, the policy is asked anew from there on.
    apart = Listed(noted(0.0), other, noted(0.0), noted(1.0, done=True))
    turns = (await play(apart, policy, answers=answers)).turns
    assert turns[0].completion == first[0]
    assert (len(turns), next(numbers)) == (3, 7)
