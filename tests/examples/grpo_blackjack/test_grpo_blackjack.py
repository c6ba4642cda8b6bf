"""Prompts of the policy, strict parsing of its answers, and the report's metrics by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_fields import REPORT_FIELDS

from envs.blackjack_env import BlackjackAction
from envs.blackjack_env.oracle import (
    DECISION_STATES,
    Answer,
    DecisionState,
    Rules,
    optimal_policy,
    optimal_return,
)
from envs.blackjack_env.server.environment import BlackjackEnvironment
from envs.blackjack_env.table import observe_decision
from examples.grpo_blackjack import chat
from examples.grpo_blackjack.hands import count_hands
from examples.grpo_blackjack.report import summarize, write_report
from examples.grpo_blackjack.task import BlackjackChatTask, BlackjackTask
from rl_bridge.config import Config, load_config, resolve
from rl_bridge.errors import ConfigError
from rl_bridge.rollout import EvaluationResult, Task
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Ending, Trajectory

CONFIG_FILE = Path(chat.__file__).with_name("config.yaml")
PUBLISHED_FILE = CONFIG_FILE.with_name("published.yaml")


@pytest.fixture
def task(tmp_path: Path) -> BlackjackTask:
    return BlackjackTask(load_config(CONFIG_FILE), tmp_path)


def test_an_answer_is_one_word_and_nothing_else(task: BlackjackTask) -> None:
    for text in (" HIT ", "hit.", "\nhit\n"):
        assert task.parse(text) == BlackjackAction(action="hit")
    for text in ("", ".", "hit stand", "do not hit", "hits", "white", "hit..", '"hit"', "1", "<think> hit"):
        assert chat.parse(text) is task.parse(text) is None
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
    config = load_config(CONFIG_FILE)
    assert resolve(config.rollout.task, key="rollout.task") is BlackjackTask
    assert issubclass(BlackjackTask, Task)
    resolve(str(config.env.app), key="env.app")
    # Enough held-out hands for an interval that tells the optimum from a rule that is blind to the dealer.
    assert config.evaluation.episodes == 100_000
    # An answer that is no action must cost more than the worst that play can.
    assert config.reward.illegal_answer < -1.0


@pytest.fixture
def chat_task(tmp_path: Path) -> BlackjackChatTask:
    config = load_config(PUBLISHED_FILE)
    task = resolve(str(config.rollout.task), key="rollout.task")(config, tmp_path)
    assert isinstance(task, BlackjackChatTask)
    return task


def test_chat_model_reads_worked_examples_then_the_decision(chat_task: BlackjackChatTask) -> None:
    system, *examples, question = chat_task.messages(observe_decision(DecisionState(17, True, 1)))
    assert system == {"role": "system", "content": chat.SYSTEM}
    assert question == {"role": "user", "content": "soft 17 against an ace"}
    assert [message["role"] for message in examples] == ["user", "assistant"] * len(chat.EXAMPLES)
    for state, shown, answer in zip(
        [state for state, _ in chat.EXAMPLES], examples[::2], examples[1::2], strict=True
    ):
        assert state in DECISION_STATES
        assert shown == chat_task.messages(observe_decision(state))[-1]
        assert chat_task.parse(answer["content"]) == BlackjackAction(action=optimal_policy()[state])
    assert len({chat.describe(*state) for state in DECISION_STATES}) == 280


def test_chat_model_without_a_path_is_refused_with_the_way_to_one(chat_task: BlackjackChatTask) -> None:
    with pytest.raises(ConfigError, match=r"expected model.path.*\./scripts/published-model"):
        chat_task.make_policy()
    config = chat_task.config
    assert (config.reward.illegal_answer, config.rollout.max_staleness) == (-2.0, 0)
    resolve(str(config.env.app), key="env.app")


class OneLetterTask(BlackjackTask):
    """Has a prompt and answers of its own, one of which is no action of the model's."""

    def messages(self, observation: Any) -> list[ChatMessage]:
        return [{"role": "user", "content": f"{observation.text} {observation.legal_actions}"}]

    def parse(self, text: str) -> BlackjackAction:
        return BlackjackAction(action={"h": "hit", "s": "stand"}.get(text, text))


async def test_probe_asks_by_the_tasks_own_prompt_and_reads_by_its_own_parser(tmp_path: Path) -> None:
    task = OneLetterTask(load_config(CONFIG_FILE), tmp_path)

    def answer(messages: Sequence[ChatMessage]) -> str:
        (message,) = messages
        assert message["content"].endswith("Hit or stand? ['hit', 'stand']")
        if "soft" in message["content"]:
            return "x"  # refused by the action's model
        return "h" if "shows 10" in message["content"] else "s"

    class Answers:
        async def answer_greedily(self, chats: Sequence[Sequence[ChatMessage]]) -> list[str]:
            return [answer(one) for one in chats]

    metrics = await task.probe(Answers())
    shares = {name: metrics[name] for name in ("legal", "hit", "stand")}
    assert shares == pytest.approx({"legal": 180 / 280, "hit": 18 / 280, "stand": 162 / 280})


def test_the_rate_of_wins(task: BlackjackTask) -> None:
    rewards = (1.0, 0.0, -1.0, -1.5)  # a push is no win
    hands = [Trajectory(seed=0, turns=[], ending=Ending.COMPLETED, reward=reward) for reward in rewards]
    assert task.metrics(hands) == {"blackjack/win_rate": 0.25}


class FakePolicy:
    """Answers from a table of prompts."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers

    async def answer_greedily(self, chats: Sequence[Sequence[ChatMessage]]) -> list[str]:
        return [self.answers[one[0]["content"]] for one in chats]


async def exact(folder: Path, answers: dict[DecisionState, Any], *overrides: str) -> dict[str, float]:
    task = BlackjackTask(load_config(CONFIG_FILE, overrides), folder)
    by_prompt = {chat.prompt(*state)[0]["content"]: answer for state, answer in answers.items()}
    return await task.probe(FakePolicy(by_prompt))


async def test_a_probe_knows_a_policys_exact_return(tmp_path: Path) -> None:
    best = dict(optimal_policy())
    hits = sum(answer == "hit" for answer in best.values()) / 280
    metrics = await exact(tmp_path, best)
    assert metrics == pytest.approx(
        {"exact_return": optimal_return(), "agreement": 1.0, "legal": 1.0, "hit": hits, "stand": 1 - hits}
    )
    stands = await exact(tmp_path, dict.fromkeys(DECISION_STATES, "stand"))
    assert stands["exact_return"] == pytest.approx(-0.187, abs=1e-3)
    assert 0.3 < stands["agreement"] < 0.7
    # What is no action pays the penalty.
    folds = await exact(tmp_path, dict.fromkeys(DECISION_STATES, "fold"), "reward.illegal_answer=-3")
    assert folds == pytest.approx(
        {"exact_return": -3.0, "agreement": 0.0, "legal": 0.0, "hit": 0.0, "stand": 0.0}
    )
    # About one hand in 21 is a natural, and most win half a bet more: 0.045 * 0.5 is about 0.022.
    paid = await exact(tmp_path, best, "env.reset.natural=true")
    assert 0.015 < paid["exact_return"] - metrics["exact_return"] < 0.03


CONFIG = load_config(CONFIG_FILE, ["trainer.iterations=3", "rollout.batch_size=32", "seed=5"])
OPTIMUM: dict[DecisionState, Answer] = dict(optimal_policy())
STAND: dict[DecisionState, Answer] = dict.fromkeys(DECISION_STATES, "stand")


def result(*hands: tuple[float, Ending], dropped: int = 0) -> EvaluationResult:
    rewards, endings = [reward for reward, _ in hands], [ending for _, ending in hands]
    return EvaluationResult(rewards=rewards, endings=endings, dropped=dropped, train_seconds=12.5)


# Three won, two pushed, four lost, one answered illegally at -1.5.
TEN = result(
    *[(1.0, Ending.COMPLETED)] * 3,
    *[(0.0, Ending.COMPLETED)] * 2,
    *[(-1.0, Ending.COMPLETED)] * 4,
    (-1.5, Ending.ILLEGAL),
    dropped=2,
)


# A batch of 32 hands in groups of 8, then another; the second and third iteration refused groups beside them.
ROWS = [
    {
        "iteration": number,
        "reward/mean": mean + 0.2,
        "rollout/reward_mean": mean,
        "rollout/trajectories": hands,
        "rollout/groups": hands / 8,
        "rollout/refused_groups": refused,
    }
    for number, mean, hands, refused in ((1, -0.4, 32.0, 0.0), (2, -0.3, 32.0, 2.0), (3, -0.25, 64.0, 4.0))
]


def summary(
    answers: dict[DecisionState, Answer], outcome: EvaluationResult, config: Config = CONFIG
) -> dict[str, object]:
    return summarize(answers, outcome, config=config, rules=Rules(), rows=ROWS)


def test_report_by_hand() -> None:
    report = summary(OPTIMUM, TEN)
    assert set(report) >= REPORT_FIELDS
    assert report["mean_return"] == pytest.approx(-0.25)
    # Sum of squares 3 + 4 + 2.25 = 9.25; less 10 * 0.0625 = 8.625; over 9: variance 0.9583333, deviation
    # 0.9789450; 1.96 * 0.9789450 / sqrt(10) = 0.6067564.
    assert report["ci95"] == pytest.approx([-0.8567564, 0.3567564], abs=1e-6)
    rates = [report[f"{name}_rate"] for name in ("win", "push", "loss", "illegal")]
    assert rates == pytest.approx([0.3, 0.2, 0.4, 0.1])
    assert (report["hands"], report["hands_dropped"], report["seed"]) == (10, 2, 5)
    assert (report["train_seconds"], report["training_hands"], report["answer_masking"]) == (12.5, 176, False)


def test_hands_of_refused_groups_were_played_and_a_batch_may_change() -> None:
    # 4 groups of 8; 4 and 2 that were refused; 8 and 4.
    assert count_hands(ROWS).tolist() == [32.0, 80.0, 176.0]
    # An illegal answer is no loss by play, whatever it costs.
    lenient = summary(STAND, result((0.0, Ending.ILLEGAL), (1.0, Ending.COMPLETED)))
    assert [lenient[f"{name}_rate"] for name in ("win", "push", "loss", "illegal")] == [0.5, 0.0, 0.0, 0.5]
    nothing = summary(OPTIMUM, result())
    rates = (f"{name}_rate" for name in ("win", "push", "loss", "illegal"))
    unknown = {"mean_return", "ci95", "exact_within_ci95", *rates}
    assert {name for name, value in nothing.items() if value is None} == unknown


def test_whether_hands_agree_with_the_exact_return() -> None:
    # The optimum is -0.0466. Of 1000 hands, the interval is about 0.0619 to each side.
    for won, agrees in ((477, True), (440, False), (515, False), (450, True), (502, True)):
        hands = [(1.0, Ending.COMPLETED)] * won + [(-1.0, Ending.COMPLETED)] * (1000 - won)
        assert summary(OPTIMUM, result(*hands))["exact_within_ci95"] is agrees


def test_exact_figures_are_of_the_answers_not_of_the_hands() -> None:
    assert summary(OPTIMUM, TEN)["exact_return"] == pytest.approx(optimal_return())
    assert summary(OPTIMUM, TEN)["optimal_agreement"] == 1.0
    assert summary(STAND, TEN)["exact_return"] == pytest.approx(-0.187, abs=1e-3)
    wrong = {**OPTIMUM, DecisionState(20, False, 5): "hit", DecisionState(19, False, 6): None}
    report = summary(wrong, TEN)
    assert report["optimal_agreement"] == pytest.approx(278 / 280)
    assert report["exact_return"] < optimal_return()  # type: ignore[operator]
    hits = sum(answer == "hit" for answer in OPTIMUM.values())
    rates = [report[f"greedy_{name}_rate"] for name in ("legal", "hit", "stand")]
    assert rates == pytest.approx([279 / 280, (hits + 1) / 280, (278 - hits) / 280])


def write_metrics(folder: Path, rows: list[dict[str, float]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def pixels(picture: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    import matplotlib.image  # takes long, and each worker imports this file

    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    image = matplotlib.image.imread(picture)
    assert min(image.shape[:2]) > 300
    return image[..., :3]


@pytest.mark.slow
def test_everything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probed = [row | {"probe/exact_return": -0.3 + 0.1 * number} for number, row in enumerate(ROWS)]
    write_metrics(tmp_path, probed)
    write_report(tmp_path, answers=OPTIMUM, result=TEN, config=CONFIG, rules=Rules())
    written = json.loads((tmp_path / "report.json").read_text())
    assert written == json.loads(json.dumps(summary(OPTIMUM, TEN)))
    printed = capsys.readouterr().out
    assert "10 held-out hands: mean return -0.2500 (95% interval -0.8568 to +0.3568)" in printed
    assert "DISAGREES" not in printed
    assert "greedy answers to all observations: 100.0% legal, " in printed
    pictures = {name: pixels(tmp_path / f"{name}.png") for name in ("learning_curve", "policy_grid")}
    lost = result(*[(-1.0, Ending.COMPLETED)] * 90, *[(1.0, Ending.COMPLETED)] * 10)
    write_metrics(tmp_path, ROWS)
    answers = STAND | {DecisionState(20, False, 5): None}
    write_report(tmp_path, answers=answers, result=lost, config=CONFIG, rules=Rules())
    for name, before in pictures.items():
        assert not np.array_equal(pixels(tmp_path / f"{name}.png"), before)
    write_report(tmp_path, answers=OPTIMUM, result=lost, config=CONFIG, rules=Rules())
    assert "DISAGREES" in capsys.readouterr().out
