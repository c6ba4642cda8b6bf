"""Kuhn poker by self-play: prompts, the probe's exact figures, and the plot."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from envs.kuhn_env import KuhnAction
from envs.kuhn_env.oracle import INFORMATION_SETS
from envs.kuhn_env.server.environment import KuhnEnvironment
from examples.grpo_kuhn import task as example
from examples.grpo_kuhn.task import KuhnTask, write_prompt
from rl_bridge.config import load_config, resolve
from rl_bridge.rollout import EvaluationResult
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.types import Ending

CONFIG_FILE = Path(example.__file__).with_name("config.yaml")


@pytest.fixture
def task(tmp_path: Path) -> KuhnTask:
    return KuhnTask(load_config(CONFIG_FILE), tmp_path)


class FakePolicy:
    """Answers every chat with these probabilities."""

    def __init__(self, **probabilities: float) -> None:
        self._probabilities = probabilities

    async def answer_greedily(self, chats: Sequence[Sequence[ChatMessage]]) -> list[str]:
        return ["bet"] * len(chats)

    async def answer_probabilities(
        self, chats: Sequence[Sequence[ChatMessage]], *, samples: int
    ) -> list[dict[str, float]]:
        return [self._probabilities] * len(chats)


def test_every_decision_has_a_prompt_which_is_that_of_the_game(task: KuhnTask) -> None:
    assert len({write_prompt(*decision)[0]["content"] for decision in INFORMATION_SETS}) == 12
    game = KuhnEnvironment()
    shown = game.reset(seed=3)
    game.step({"first": KuhnAction(action="pass")})
    prompt = task.messages(shown["first"])[0]["content"]
    assert prompt == f"kuhn {shown['first'].card} answer pass or bet"
    assert task.parse(" Bet\n") == KuhnAction(action="bet")
    assert [task.parse(text) for text in ("", "bet bet", "fold")] == [None] * 3


def test_the_configuration_that_ships(task: KuhnTask) -> None:
    config = task.config
    assert resolve(config.rollout.task, key="rollout.task") is KuhnTask
    assert config.environment.seats == KuhnEnvironment.seats
    # An answer that is no action must cost more than the worst that play can; there is no momentum, and the bonus for
    # entropy, of the two words alone, ends above 0.
    assert config.reward.illegal_answer < -2.0
    assert config.trainer.betas[0] == 0.0
    assert config.algorithm.entropy_top_k == 2
    assert config.algorithm.entropy_coef * config.algorithm.entropy_final_factor > 0.05


async def test_probe_and_report_are_exact(task: KuhnTask) -> None:
    uniform = FakePolicy(**{"bet": 0.5, "pass": 0.5})
    assert await task.probe(uniform) == pytest.approx(
        {"exploitability": 11 / 24, "first_wins": 1 / 8, "legal": 1.0, "bet": 0.5}
    )
    # A word that is no action counts as a pass.
    assert (await task.probe(FakePolicy(bet=0.5, seat=0.2)))["exploitability"] == pytest.approx(11 / 24)
    rows = [{"iteration": 1, "probe/exploitability": 0.4}, {"iteration": 2}]
    (task.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = EvaluationResult(
        rewards=[1.0, -2.0], endings=[Ending.COMPLETED] * 2, dropped=0, train_seconds=1.0
    )
    await task.report(uniform, result)
    report = json.loads((task.folder / "report.json").read_text())
    assert (report["mean_reward"], report["exploitability"]) == (-0.5, pytest.approx(11 / 24))
    assert (task.folder / "exploitability.png").read_bytes().startswith(b"\x89PNG")
