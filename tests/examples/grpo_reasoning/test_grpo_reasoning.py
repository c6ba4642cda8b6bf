"""The task for a chat model: the splits of a run, the lenient parser, and the noisy verifiers."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from envs.reasoning_env import ReasoningAction
from examples.grpo_reasoning import world
from examples.grpo_reasoning.task import EXAMPLES, NeedleTask
from examples.grpo_reasoning.world import ERROR_RATE, NoisyEnvironment, SplitEnvironment
from rl_bridge.config import Config, load_config
from rl_bridge.rollout.assignment import held_out_seeds

CONFIG = Path(world.__file__).with_name("config.yaml")


@pytest.fixture
def config() -> Config:
    return load_config(CONFIG, ["evaluation.episodes=200", "model.path=models/any"])


def test_held_out_questions_are_of_the_test_split_and_have_many_answers(
    config: Config, tmp_path: Path
) -> None:
    asked = SplitEnvironment()
    for seeds, split in ((range(20), "train"), (held_out_seeds(0, 20), "test")):
        for seed in seeds:
            asked.reset(seed=seed, **config.environment.reset)
            assert asked.state.split == split
    answers = NeedleTask(config, tmp_path).held_out_answers()
    assert answers.total() == 200
    assert len(answers) >= 20
    assert answers.most_common(1)[0][1] <= 0.05 * 200


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Boris", "Boris"),
        (" Boris.\n", "Boris"),
        ("The answer is Mary-Ann", "Mary-Ann"),
        ("O'Neil hates running.\nAnna likes pasta", "O'Neil"),
        ("nobody", None),
        ("", None),
    ],
)
def test_the_parser_takes_a_name_with_or_without_a_sentence(
    text: str, answer: str | None, config: Config, tmp_path: Path
) -> None:
    action = NeedleTask(config, tmp_path).parse(text)
    assert (None if action is None else action.answer) == answer


def test_the_prompt_shows_the_examples_and_the_question(config: Config, tmp_path: Path) -> None:
    question = SplitEnvironment().reset(seed=1, **config.environment.reset)
    *shown, last = NeedleTask(config, tmp_path).messages(question)
    assert last == {"role": "user", "content": question.question}
    assert [message["content"] for message in shown if message["role"] == "assistant"] == [
        answer for _, answer in EXAMPLES
    ]


def share_of_mistakes(verdicts: Sequence[float], truth: float) -> float:
    return sum(verdict != truth for verdict in verdicts) / len(verdicts)


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
