"""Reports of keys without effect: only keys that a user has set, never those of presets or shipped files."""

import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from rl_bridge.config import effects
from rl_bridge.config.algorithm import PRESETS, AlgorithmConfig
from rl_bridge.config.effects import EPISODE_KEYS, find_unused_algorithm_keys, find_unused_keys
from rl_bridge.config.schema import Config
from rl_bridge.config.sections import MetricsConfig
from rl_bridge.errors import ConfigError

ROOT = Path(__file__).parents[3]
OURS = [Path(__file__).with_name("guide.yaml"), *ROOT.glob("examples/*/*.yaml")]


def unused_keys(**keys: Any) -> list[str]:
    return [
        line.partition("=")[0] for line in find_unused_algorithm_keys(AlgorithmConfig.model_validate(keys))
    ]


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


EPISODES: dict[str, dict[str, Any]] = {
    "rollout": {"num_turns": 3, "episode_timeout_s": 5.0, "cut_answer": "illegal"},
    "reward": {"illegal_answer": -2.0},
    "evaluation": {"episodes": 7, "curve_interval": 5, "curve_tasks": 9, "repetitions": 4, "success": 0.5},
}


def config(*, world: dict[str, Any], **sections: dict[str, Any]) -> Config:
    reward = {"function": "package.module.judge", **sections.pop("reward", {})}
    return Config.model_validate({"rollout": {}, **world, **sections, "reward": reward})


WORLD = {"env": {"url": "http://127.0.0.1:8000"}}


def test_keys_of_episodes_are_unused_with_a_dataset() -> None:
    dataset = {"data": {"source": "prompts.jsonl"}}
    assert find_unused_keys(config(world=dataset)) == []
    on_gpus = {"trainer": {"num_gpus": 1}, "monarch": {"gpus_per_node": 2}}
    assert find_unused_keys(config(world=dataset, **on_gpus)) == []
    assert find_unused_keys(config(world=WORLD, **EPISODES)) == []
    lines = find_unused_keys(config(world=dataset, **EPISODES))
    assert lines == [
        f"{section}.{key}={value} has no effect: it only counts if env.* is set, not data.*"
        for section, keys in EPISODES.items()
        for key, value in keys.items()
    ]
    assert {section: tuple(keys) for section, keys in EPISODES.items()} == EPISODE_KEYS


def test_keys_of_our_own_dialogue_are_unused_with_an_agent() -> None:
    agent = {"function": "package.module:play"}
    lines = find_unused_keys(
        config(world=WORLD, **EPISODES | {"rollout": {**EPISODES["rollout"], "agent": agent}})
    )
    assert [line.partition("=")[0] for line in lines] == ["rollout.cut_answer", "reward.illegal_answer"]
    with pytest.raises(ValueError, match=r"no rollout\.agent with data"):
        config(world={"data": {"source": "prompts.jsonl"}}, rollout={"agent": agent})
    for wrong in ({}, {**agent, "preset": "codex"}, {"function": "a:b", "program": "x"}):
        with pytest.raises(ValueError, match=r"expected rollout\.agent"):
            config(world=WORLD, rollout={"agent": wrong})


def test_keys_of_a_curve_that_is_not_drawn_are_unused() -> None:
    keys = {"repetitions": 4, "success": 0.5}
    lines = find_unused_keys(config(world=WORLD, evaluation=keys))
    assert lines == [
        f"evaluation.{key}={value} has no effect: it only counts if evaluation.curve_interval is above 0"
        for key, value in keys.items()
    ]
    assert find_unused_keys(config(world=WORLD, evaluation={**keys, "curve_interval": 1})) == []


def test_signal_sampling_without_repeated_tasks_is_reported() -> None:
    def lines(tasks: int, sampling: str) -> list[str]:
        env = {"url": "http://127.0.0.1:8000", "tasks": tasks, "sampling": sampling}
        rollout = {"batch_size": 64, "group_size": 8}
        return find_unused_keys(config(world={"env": env}, rollout=rollout, trainer={"iterations": 5}))

    assert lines(40, "uniform") == lines(39, "signal") == []
    assert lines(40, "signal") == [
        "env.sampling=signal has no effect: 40 groups come back to none of 40 tasks"
    ]
    with pytest.raises(ValueError, match=r"expected env\.tasks.*with env\.sampling=signal, got none"):
        config(world={"env": {**WORLD["env"], "sampling": "signal"}})


def test_keys_of_events_that_cannot_happen_are_reported() -> None:
    def lines(**rollout: Any) -> list[str]:
        unused = find_unused_keys(config(world=WORLD, rollout=rollout, trainer={"checkpoint_interval": 0}))
        return [line.partition(":")[0] for line in unused]

    assert lines(checkpoint_on_preemption=True) == [
        "rollout.checkpoint_on_preemption=True has no effect on the run",
    ]


def test_missing_sinks_are_hinted_with_extras_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effects, "find_spec", lambda name: None)
    sinks = get_args(get_args(MetricsConfig.model_fields["sinks"].annotation)[0])
    config = Config.model_validate({"rollout": {}, **WORLD, "metrics": {"sinks": sinks}})
    with pytest.raises(ConfigError) as caught:
        effects.require_trainable(config)
    hinted = re.findall(r"ropewalk\[([\w-]+)\]", str(caught.value))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(hinted) == len(sinks) == 3
    assert {*hinted} <= project["optional-dependencies"].keys()
