"""docs/training.md, on tools and many turns: its example is a task, its endings and settings are those of the code."""

import re
from pathlib import Path
from typing import Any

import pytest

from envs.shop_env.server.environment import ShopEnvironment
from openenv_core import StepResult
from rl_bridge.config import Config
from rl_bridge.config.schema import ModelConfig, RolloutConfig
from rl_bridge.rollout import EvaluationResult, ToolTask
from rl_bridge.types import Ending

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Tools and many turns\n")[1].split("\n## ")[0]


class Direct:
    def __init__(self, environment: ShopEnvironment) -> None:
        self._environment = environment

    async def step(self, action: Any, /) -> StepResult[Any]:
        said: Any = self._environment.step(action)
        return StepResult(said, said.reward, said.done, said.metadata)


async def test_the_example_is_a_task(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", SECTION, flags=re.DOTALL)
    made: dict[str, Any] = {}
    exec(example, made)
    task = made["ShopTask"](
        Config.model_validate({"env": {"app": "a:b"}, "rollout": {"task": "a:b"}}), Path()
    )
    assert isinstance(task, ToolTask)
    environment = ShopEnvironment()
    first: Any = environment.reset(seed=1)
    session: Any = Direct(environment)
    assert task.messages(first) == [{"role": "user", "content": first.task}]
    assert len(await task.functions(session, first)) > 3
    await task.report(
        session,
        EvaluationResult(rewards=[1.0, 0.0], endings=[Ending.COMPLETED] * 2, dropped=0, train_seconds=1.0),
    )
    assert capsys.readouterr().out == "0.5\n"


def test_every_ending_is_in_the_table_and_what_becomes_of_it() -> None:
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


def test_settings_that_are_named_are_there() -> None:
    named = re.findall(r"`(rollout|model)\.([a-z_]+)`", SECTION)
    known = {"rollout": RolloutConfig.model_fields, "model": ModelConfig.model_fields}
    assert len(named) > 6
    assert [name for part, name in named if name not in known[part]] == []
