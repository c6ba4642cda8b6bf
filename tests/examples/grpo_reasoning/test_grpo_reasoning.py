"""The task for a chat model: the splits of a run, the lenient parser, and the noisy verifiers."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from envs.reasoning_env import ReasoningAction
from examples.grpo_reasoning import world
from examples.grpo_reasoning.task import EXAMPLES, QUESTION, ReversalTask, reverse
from examples.grpo_reasoning.world import ERROR_RATE, NoisyEnvironment, SplitEnvironment
from rl_bridge.config import Config, load_config
from rl_bridge.rollout import EvaluationResult
from rl_bridge.rollout.assignment import held_out_seeds
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Ending

CONFIG = Path(world.__file__).with_name("config.yaml")


@pytest.fixture
def config() -> Config:
    return load_config(CONFIG, ["evaluation.episodes=200", "model.path=models/any"])


def test_held_out_questions_are_of_the_test_split_and_have_many_answers(config: Config) -> None:
    world = SplitEnvironment()
    answers: Counter[str] = Counter()
    for seeds, split in ((range(20), "train"), (held_out_seeds(0, 200), "test")):
        for seed in seeds:
            world.reset(seed=seed, **config.environment.reset)
            assert world.state.split == split
            correct = str(world.step(ReasoningAction(answer="")).correct_answer)
            answers[correct] += split == "test"
    assert answers.total() == 200
    assert len(answers) >= 100
    assert answers.most_common(1)[0][1] <= 0.05 * 200


def test_only_an_exact_answer_is_rewarded(config: Config) -> None:
    world, reset = SplitEnvironment(), config.environment.reset
    world.reset(seed=3, **reset)
    correct = str(world.step(ReasoningAction(answer="")).correct_answer)
    for answer, reward in ((correct, 1.0), (f"{correct}, {correct}", 0.0), ("", 0.0)):
        world.reset(seed=3, **reset)
        assert world.step(ReasoningAction(answer=answer)).reward == reward


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("two, one", "two, one"),
        (" two,one.\n", "two, one"),
        ("Here is the list: two one", "two, one"),
        ("['two', 'one']\nI reversed it.", "two, one"),
        ("...", None),
        ("", None),
    ],
)
def test_the_parser_takes_words_however_they_are_separated(
    text: str, answer: str | None, config: Config, tmp_path: Path
) -> None:
    action = ReversalTask(config, tmp_path).parse(text)
    assert (None if action is None else action.answer) == answer


def test_the_prompt_shows_worked_examples_in_the_words_of_the_question(
    config: Config, tmp_path: Path
) -> None:
    world = SplitEnvironment()
    question = world.reset(seed=1, **config.environment.reset)
    _, *shown, last = ReversalTask(config, tmp_path).messages(question)
    assert last == {"role": "user", "content": question.question}
    correct = str(world.step(ReasoningAction(answer="")).correct_answer)
    assert question.question == QUESTION.format(reverse(correct))
    assert [message["content"] for message in shown[1::2]] == [reverse(words) for words in EXAMPLES]
    assert reverse(EXAMPLES[0]) == "apple, green"


@pytest.mark.slow
async def test_probe_and_report_count_exact_answers_to_held_out_questions(
    config: Config, tmp_path: Path
) -> None:
    class Half:
        """Answers every second question."""

        async def answer_greedily(self, chats: Sequence[Sequence[ChatMessage]]) -> list[str]:
            lists = [chat[-1]["content"].strip().rpartition(": ")[2] for chat in chats]
            return [reverse(words) if index % 2 else "" for index, words in enumerate(lists)]

    task = ReversalTask(config, tmp_path)
    assert await task.probe(Half()) == {"held_out_exact": 0.5}
    result = EvaluationResult(
        rewards=[1.0, 0.0], endings=[Ending.COMPLETED] * 2, dropped=0, train_seconds=1.0
    )
    await task.report(Half(), result)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["success"] == 0.5
    assert report["best_constant"]["success"] <= 0.05
    assert report["best_constant"]["distinct_answers"] >= 100


def share_of_mistakes(verdicts: Sequence[float], truth: float) -> float:
    return sum(verdict != truth for verdict in verdicts) / len(verdicts)


@pytest.mark.slow
def test_three_verifiers_err_independently_in_training_and_held_out_rewards_are_true(config: Config) -> None:
    noisy, exact = NoisyEnvironment(), SplitEnvironment()
    reset = config.environment.reset
    verdicts: list[list[float]] = []
    for seed in range(600):
        exact.reset(seed=seed, **reset)
        action = ReasoningAction(answer=str(exact.step(ReasoningAction(answer="")).correct_answer))
        for _ in range(2):  # the same verdict for the same answer
            noisy.reset(seed=seed, **reset)
            rewarded = noisy.step(action)
            verdicts.append(list(rewarded.metadata["rubric"].values()))
            assert rewarded.score == 1.0
            assert rewarded.reward == pytest.approx(sum(verdicts[-1]) / 3)
    assert verdicts[::2] == verdicts[1::2]
    first, second, third = zip(*verdicts[::2], strict=True)
    # Four standard errors of 600 draws.
    for one in (first, second, third):
        assert share_of_mistakes(one, 1.0) == pytest.approx(ERROR_RATE, abs=0.066)
    both = [float(a == b == 0.0) for a, b in zip(first, second, strict=True)]
    assert share_of_mistakes(both, 0.0) == pytest.approx(ERROR_RATE**2, abs=0.033)
    for seed in held_out_seeds(0, 50):
        noisy.reset(seed=seed, **reset)
        assert noisy.step(ReasoningAction(answer="nobody")).reward == 0.0
