"""What the policy reads, and how strictly its answer is read."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from envs.blackjack_env import BlackjackAction
from envs.blackjack_env.oracle import DECISION_STATES, optimal_policy, optimal_return
from envs.blackjack_env.server.environment import BlackjackEnvironment
from examples.grpo_blackjack import chat
from examples.grpo_blackjack.task import BlackjackTask
from rl_bridge.config import load_config, resolve
from rl_bridge.rollout import Task
from rl_bridge.tokens.chat import Message
from rl_bridge.types import Ending, Trajectory

CONFIG = Path(chat.__file__).with_name("config.yaml")


@pytest.fixture
def task(tmp_path: Path) -> BlackjackTask:
    return BlackjackTask(load_config(CONFIG), tmp_path)


def test_an_answer_is_one_word_and_nothing_else(task: BlackjackTask) -> None:
    for text in (" HIT ", "hit.", "\nhit\n"):
        assert task.parse(text) == BlackjackAction(action="hit")
    for text in ("", ".", "hit stand", "do not hit", "hits", "white", "hit..", '"hit"', "1", "<think> hit"):
        assert chat.parse(text) is None
        assert task.parse(text) is None
    sent = task.parse("stand")
    assert sent is not None
    table = BlackjackEnvironment()
    table.reset(seed=3)
    table.step(sent)
    assert task.parse("stand") == BlackjackAction(action="stand")  # one that was sent is as it was


def test_every_decision_has_a_prompt_of_its_own_that_shows_all_the_optimum_depends_on(
    task: BlackjackTask,
) -> None:
    prompts = {chat.prompt(*state)[0]["content"] for state in DECISION_STATES}
    assert len(prompts) == len(DECISION_STATES) == 280
    (message,) = chat.prompt(17, True, 1)
    assert message == {"role": "user", "content": "blackjack total=17 ace=yes dealer=1 answer hit or stand"}
    table = BlackjackEnvironment()
    seen = table.reset(seed=3)
    assert task.messages(seen) == chat.prompt(seen.player_total, seen.usable_ace, seen.dealer_card)


def test_the_configuration_that_ships(task: BlackjackTask) -> None:
    config = load_config(CONFIG)
    assert resolve(config.rollout.task, key="rollout.task") is BlackjackTask
    assert issubclass(BlackjackTask, Task)
    resolve(str(config.env.app), key="env.app")
    # Enough held-out hands for an interval that tells the optimum from a rule that is blind to the dealer.
    assert config.evaluation.episodes == 100_000
    # An answer that is no action must cost more than the worst that play can.
    assert config.reward.illegal_answer < -1.0


def test_the_rate_of_wins(task: BlackjackTask) -> None:
    def hand(reward: float) -> Trajectory:
        return Trajectory(seed=0, turns=[], ending=Ending.COMPLETED, reward=reward)

    # A push is no win.
    assert task.figures([hand(1.0), hand(0.0), hand(-1.0), hand(-1.5)]) == {"blackjack/win_rate": 0.25}


class FakePolicy:
    """Answers from a table of prompts."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers

    async def answer_greedily(self, chats: Sequence[Sequence[Message]]) -> list[str]:
        return [self.answers[one[0]["content"]] for one in chats]


def policy_of(answers: dict[tuple[int, bool, int], str]) -> FakePolicy:
    return FakePolicy({chat.prompt(*state)[0]["content"]: answer for state, answer in answers.items()})


async def exact(folder: Path, answers: dict[tuple[int, bool, int], str], *overrides: str) -> dict[str, float]:
    return await BlackjackTask(load_config(CONFIG, list(overrides)), folder).probe(policy_of(answers))


async def test_a_probe_knows_a_policys_exact_return(tmp_path: Path) -> None:
    best = dict(optimal_policy())
    figures = await exact(tmp_path, best)
    assert figures == pytest.approx({"exact_return": optimal_return(), "agreement": 1.0})
    stands = await exact(tmp_path, dict.fromkeys(DECISION_STATES, "stand"))
    assert stands["exact_return"] == pytest.approx(-0.187, abs=1e-3)
    assert 0.3 < stands["agreement"] < 0.7
    # What is no action pays the penalty.
    folds = await exact(tmp_path, dict.fromkeys(DECISION_STATES, "fold"), "reward.illegal_answer=-3")
    assert folds == pytest.approx({"exact_return": -3.0, "agreement": 0.0})
    # About one hand in 21 is a natural, and most win half a bet more: 0.045 * 0.5 is about 0.022.
    paid = await exact(tmp_path, best, "env.reset.natural=true")
    assert 0.015 < paid["exact_return"] - figures["exact_return"] < 0.03
