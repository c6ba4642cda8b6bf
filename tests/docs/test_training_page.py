"""docs/training.md and docs/algorithms.md: example, endings, settings, keys and metrics are those of the code."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import blocks, page

from envs.shop_env.server.environment import ShopEnvironment
from openenv_core import StepResult
from rl_bridge.algorithms.policy_loss import LossInputs, policy_loss
from rl_bridge.config import PRESETS, AlgorithmConfig, Config
from rl_bridge.config.rollout import RolloutConfig
from rl_bridge.config.schema import ModelConfig
from rl_bridge.rollout import EvaluationResult, ToolTask
from rl_bridge.rollout.groups import rollout_metrics
from rl_bridge.trainer.metrics import LossMetrics
from rl_bridge.types import Completion, Ending, Group, Trajectory, Turn

ALGORITHMS = page("docs/algorithms.md")
PAGE = page("docs/training.md")
SECTION = PAGE.split("## Tools and many turns\n")[1].split("\n## ")[0]


def section(title: str) -> str:
    return ALGORITHMS.split(f"## {title}\n")[1].split("\n## ")[0]


def first_column(text: str) -> list[str]:
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_preset_and_every_key_is_named() -> None:
    assert first_column(ALGORITHMS.split("\n## ")[0]) == list(PRESETS)
    named = set(re.findall(r"`([a-z_]+)`", section("What can be chosen") + section("Engine and trainer")))
    assert set(AlgorithmConfig.model_fields) - {"name"} <= named
    assert set(first_column(section("What can be chosen"))) <= set(AlgorithmConfig.model_fields)


def logged_by_the_loss(settings: AlgorithmConfig, **more: torch.Tensor) -> set[str]:
    """With the least of a batch: a token, of older weights than the trainer's."""
    one = {"logprobs": torch.zeros(1), "entropy": torch.zeros(1), "old_logprobs": torch.zeros(1)}
    _, loss_metrics = policy_loss(LossInputs(**one, advantages=torch.zeros(1), **more), settings)
    metrics = LossMetrics()
    metrics.add({**loss_metrics, "policy/entropy": torch.zeros(1)})
    metrics.add_mismatch(torch.zeros(1), fresh=torch.tensor([False]))
    return set(metrics.reduce(lambda sums: sums, lambda most: most))


LEAST = AlgorithmConfig()


def test_metrics_of_the_loss_are_listed() -> None:
    always, _, sometimes = section("What is always logged").partition("Where there is such a thing")
    least = logged_by_the_loss(LEAST)
    more = {"reference_logprobs": torch.zeros(1), "proximal_logprobs": torch.zeros(1)}
    everything = logged_by_the_loss(AlgorithmConfig(dual_clip=3.0, correction="truncated"), **more)
    assert len(everything) > len(least)
    for name in everything - {"train/valid_token_share"}:
        assert f"`{name}`" in (always if name in least else sometimes), name


def test_metrics_listed_as_always_logged_are_logged() -> None:
    answer = Completion(tokens=[1], logprobs=[0.0], versions=[0], stopped=True)
    one = Trajectory(seed=0, turns=[Turn(prompt=[1], completion=answer)], ending=Ending.COMPLETED, reward=0.0)
    logged = {
        *logged_by_the_loss(LEAST),
        *rollout_metrics([Group(seed=0, trajectories=[one, one])], version=1),
    }
    always, _, _ = section("What is always logged").partition("Where there is such a thing")
    for name in first_column(always):
        assert any(re.fullmatch(re.sub("<.*?>", ".+", name), figure) for figure in logged), name


class Direct:
    def __init__(self, environment: ShopEnvironment) -> None:
        self._environment = environment

    async def step(self, action: Any, /) -> StepResult[Any]:
        observation: Any = self._environment.step(action)
        return StepResult(observation, observation.reward, observation.done, observation.metadata)


async def test_the_example_is_a_task(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks(SECTION, "python")
    made: dict[str, Any] = {}
    exec(example, made)
    config = Config.model_validate({"env": {"app": "a:b"}, "rollout": {"task": "a:b"}})
    task = made["ShopTask"](config, Path())
    assert isinstance(task, ToolTask)
    environment = ShopEnvironment()
    first: Any = environment.reset(seed=1)
    session: Any = Direct(environment)
    assert task.messages(first) == [{"role": "user", "content": first.task}]
    assert len(await task.functions(session, first)) > 3
    endings = [Ending.COMPLETED] * 2
    result = EvaluationResult(rewards=[1.0, 0.0], endings=endings, dropped=0, train_seconds=1.0)
    await task.report(session, result)
    assert capsys.readouterr().out == "0.5\n"


def test_every_ending_and_its_treatment_are_in_the_table() -> None:
    table = [row for row in SECTION.splitlines() if row.startswith("| `")]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table]
    endings = [Ending(row[0].strip("`")) for row in rows]
    assert sorted(endings) == sorted(Ending)
    becomes = "likewise"
    for ending, (_, _, last) in zip(endings, rows, strict=True):
        becomes = becomes if last == "likewise" else last
        # What is dropped or left out is a failure; of what is truncated the algorithm's settings decide.
        assert (not becomes.startswith("trained")) == ending.is_failure(), ending
        assert ("`algorithm.overlong`" in becomes) == ending.is_truncated(), ending


def test_named_settings_exist() -> None:
    named = re.findall(r"`(rollout|model)\.([a-z_]+)`", SECTION)
    known = {"rollout": RolloutConfig.model_fields, "model": ModelConfig.model_fields}
    assert len(named) > 6
    assert [name for part, name in named if name not in known[part]] == []
