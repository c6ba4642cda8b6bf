"""What the policy reads, and how strictly its answer is read."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from envs.blackjack_env import BlackjackAction, BlackjackObservation
from envs.blackjack_env.oracle import DECISION_STATES, optimal_policy, optimal_return
from envs.blackjack_env.server.environment import BlackjackEnvironment
from examples.grpo_blackjack import chat
from examples.grpo_blackjack.task import BlackjackTask
from rl_bridge.config import Config, load_config, resolve
from rl_bridge.rollout import Task
from rl_bridge.tokens.chat import Message
from rl_bridge.types import Ending, Trajectory

CONFIG = Path(chat.__file__).with_name("config.yaml")


@pytest.fixture
def task(tmp_path: Path) -> BlackjackTask:
    return BlackjackTask(load_config(CONFIG), tmp_path)


@pytest.mark.parametrize("text", ["hit", "Hit", " HIT ", "hit.", "\nhit\n"])
def test_hit(text: str) -> None:
    assert chat.parse(text) == "hit"


@pytest.mark.parametrize("text", ["stand", "Stand", "STAND.", "  stand"])
def test_stand(text: str) -> None:
    assert chat.parse(text) == "stand"


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ".",
        "hit stand",
        "hit or stand",
        "do not hit",
        "I hit",
        "hits",
        "hitstand",
        "white",  # contains "hit"
        "standing",
        "hit..",
        "hit!",
        '"hit"',
        "0",
        "1",
        "double",
        "h",
        "<think> hit",
    ],
)
def test_anything_else_is_no_action(text: str, task: BlackjackTask) -> None:
    assert chat.parse(text) is None
    assert task.parse(text) is None


def test_every_decision_has_a_prompt_of_its_own_that_shows_all_the_optimum_depends_on() -> None:
    prompts = {chat.prompt(*state)[0]["content"] for state in DECISION_STATES}
    assert len(prompts) == len(DECISION_STATES) == 280
    (message,) = chat.prompt(17, True, 1)
    assert message == {"role": "user", "content": "blackjack total=17 ace=yes dealer=1 answer hit or stand"}


def test_the_prompt_is_made_from_declared_fields_of_the_observation(task: BlackjackTask) -> None:
    observation = BlackjackObservation(
        player_total=12,
        dealer_card=10,
        usable_ace=False,
        legal_actions=["hit", "stand"],
        player_cards=[2, 10],
        dealer_cards=[10],
        text="",
    )
    assert task.messages(observation) == chat.prompt(12, False, 10)
    assert "total=12 ace=no dealer=10" in task.messages(observation)[0]["content"]


def test_answers_become_actions(task: BlackjackTask) -> None:
    assert task.parse("hit") == BlackjackAction(action="hit")
    assert task.parse("Stand.") == BlackjackAction(action="stand")


def test_an_action_that_has_been_sent_is_as_it_was(task: BlackjackTask) -> None:
    table = BlackjackEnvironment()
    table.reset(seed=3)
    action = task.parse("stand")
    assert action is not None
    table.step(action)
    assert task.parse("stand") == BlackjackAction(action="stand")


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


async def test_a_perfect_policy_is_seen_as_one(task: BlackjackTask) -> None:
    figures = await task.probe(policy_of(dict(optimal_policy())))
    assert figures == pytest.approx({"exact_return": optimal_return(), "agreement": 1.0})


async def test_a_policy_that_always_stands(task: BlackjackTask) -> None:
    figures = await task.probe(policy_of(dict.fromkeys(DECISION_STATES, "stand")))
    assert figures["exact_return"] == pytest.approx(-0.187, abs=1e-3)
    assert 0.3 < figures["agreement"] < 0.7


async def test_a_policy_that_says_nothing_sensible_pays_the_penalty(tmp_path: Path) -> None:
    config = load_config(CONFIG, ["reward.illegal_answer=-3"])
    figures = await BlackjackTask(config, tmp_path).probe(policy_of(dict.fromkeys(DECISION_STATES, "fold")))
    assert figures == pytest.approx({"exact_return": -3.0, "agreement": 0.0})


async def test_naturals_count_where_the_reset_pays_for_them(tmp_path: Path) -> None:
    config: Config = load_config(CONFIG, ["env.reset.natural=true"])
    plain = await BlackjackTask(load_config(CONFIG), tmp_path).probe(policy_of(dict(optimal_policy())))
    paid = await BlackjackTask(config, tmp_path).probe(policy_of(dict(optimal_policy())))
    # About one hand in 21 is a natural, and most win half a bet more: 0.045 * 0.5 is about 0.022.
    assert 0.015 < paid["exact_return"] - plain["exact_return"] < 0.03
