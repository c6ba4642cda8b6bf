"""Reports of keys without effect: only keys that a user has set, never those of presets or shipped files."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_bridge.config.algorithm import PRESETS, AlgorithmConfig
from rl_bridge.config.effects import find_unused_keys
from rl_bridge.config.schema import Config

ROOT = Path(__file__).parents[3]
OURS = [Path(__file__).with_name("guide.yaml"), *ROOT.glob("examples/*/*.yaml")]


def unused_keys(**keys: Any) -> list[str]:
    return [line.partition("=")[0] for line in find_unused_keys(AlgorithmConfig.model_validate(keys))]


@pytest.mark.parametrize(
    ("keys", "idle"),
    [
        ({"objective": "reinforce", "clip_low": 0.1, "clip_high": 0.3}, {"clip_low", "clip_high"}),
        ({"clip_low": 0.1, "clip_high": 0.3, "dual_clip": None}, set()),
        ({"name": "cispo", "dual_clip": 5.0}, {"dual_clip"}),
        ({"correction": "decoupled", "correction_high": 3.0, "correction_low": 0.1}, {"correction_low"}),
        ({"correction": "icepop", "correction_low": 0.1, "correction_cap": 3.0}, {"correction_cap"}),
        ({"max_refills": 5}, {"max_refills"}),
        ({"entropy_coef": 0.1, "entropy_hold": 0.5, "entropy_final_factor": 0.1}, set()),
        # A bonus that is held for the whole run is lowered to nothing.
        ({"entropy_coef": 0.1, "entropy_final_factor": 0.1}, {"entropy_final_factor"}),
        ({"name": "ppo", "advantage": "group", "gamma": 0.9, "value_clip": 0.1}, {"gamma", "value_clip"}),
        ({"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.5, "critic_learning_rate": 1e-4}, set()),
    ],
)
def test_keys_without_effect_are_reported_and_no_others(keys: dict[str, Any], idle: set[str]) -> None:
    assert set(unused_keys(**keys)) == {f"algorithm.{key}" for key in idle}


@pytest.mark.parametrize("name", PRESETS)
def test_neither_presets_nor_shipped_files_set_a_key_without_effect(name: str) -> None:
    assert unused_keys(name=name) == []
    others = {"objective": "reinforce", "ratio": "token", "advantage": "group", "overlong": "train"}
    assert unused_keys(name=name, **others) == []
    assert len(OURS) > 1
    for file in OURS:
        section = yaml.safe_load(file.read_text()).get("algorithm", {})
        keys = {"name": section} if isinstance(section, str) else dict(section)
        assert unused_keys(**keys) == unused_keys(**keys | {"name": name}) == [], file


def config(*, world: dict[str, Any], **sections: dict[str, Any]) -> Config:
    reward = {"function": "package.module.judge", **sections.pop("reward", {})}
    return Config.model_validate({"rollout": {}, **world, **sections, "reward": reward})


WORLD = {"env": {"url": "http://127.0.0.1:8000"}}


def test_an_order_of_tasks_needs_their_number() -> None:
    with pytest.raises(ValueError, match=r"expected env\.tasks.*with env\.sampling=sequential, got none"):
        config(world={"env": {**WORLD["env"], "sampling": "sequential"}})
