"""From the configuration to which groups and trajectories are trained."""

from pathlib import Path
from typing import Any

import pytest

from rl_bridge.config import Config
from rl_bridge.loops.run import trainer_settings
from rl_bridge.rollout import Task
from rl_bridge.rollout.groups import OverlongHandling, make_group_filter, overlong_handling

GROWING = "rl_bridge.rollout.tool_task:ToolWorldTask"
STATES = f"{__name__}:StateTask"


class StateTask(Task):
    """Shows a chat of its own making in every turn, as tasks do that say nothing else."""


def config(rollout: dict[str, Any], algorithm: dict[str, Any] | str) -> Config:
    return Config.model_validate(
        {
            "env": {"app": "package.app:app"},
            "rollout": {"task": GROWING, "batch_size": 64, "group_size": 8, **rollout},
            "algorithm": algorithm,
        }
    )


@pytest.mark.parametrize(
    ("rollout", "longest", "buffer"),
    [
        # Four answers of 25 tokens, a fifth of which is 20.
        ({"num_turns": 4, "max_new_tokens": 25, "max_length": 1000}, 100, 20),
        # The context is shorter than that, and there is one for all of them.
        ({"num_turns": 4, "max_new_tokens": 25, "max_length": 60}, 60, 12),
        # Here each has one, and fits it.
        ({"task": STATES, "num_turns": 4, "max_new_tokens": 25, "max_length": 60}, 100, 20),
        ({"num_turns": 1, "max_new_tokens": 1, "max_length": 60}, 1, 1),
    ],
)
def test_the_greatest_length_and_the_share_before_it(
    rollout: dict[str, Any], longest: int, buffer: int
) -> None:
    assert overlong_handling(config(rollout, "dapo")) == OverlongHandling(
        handling="penalty", max_length=longest, buffer=buffer
    )


def test_the_answer_to_a_datasets_prompt_is_all_that_there_is() -> None:
    """Whatever `num_turns` says, of which there are 32 unless told otherwise: DAPO's penalty would never be met."""
    answers = Config.model_validate(
        {
            "data": {"source": "prompts.jsonl"},
            "reward": {"function": "package.rewards:right"},
            "rollout": {"batch_size": 64, "group_size": 8, "max_new_tokens": 50, "max_length": 1000},
            "algorithm": "dapo",
        }
    )
    assert overlong_handling(answers) == OverlongHandling(handling="penalty", max_length=50, buffer=10)
    assert trainer_settings(answers, Path("run"), Path("model")).max_loss_tokens == 50


def test_refills_are_so_many_for_each_group_of_a_step() -> None:
    found = make_group_filter(config({}, {"name": "dapo", "max_refills": 3}))
    assert found.function is not None
    assert (found.refills, found.overlong.handling) == (3 * 8, "penalty")
