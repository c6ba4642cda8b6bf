"""Reports of keys without effect: only keys that a user has set, never those of presets or shipped files."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_bridge.config.algorithm import PRESETS, AlgorithmConfig
from rl_bridge.config.effects import EPISODE_KEYS, find_unused_algorithm_keys, find_unused_keys
from rl_bridge.config.schema import Config

ROOT = Path(__file__).parents[3]
OURS = [Path(__file__).with_name("guide.yaml"), *ROOT.glob("examples/*/*.yaml")]


def unused_keys(**keys: Any) -> list[str]:
    return [
        line.partition("=")[0] for line in find_unused_algorithm_keys(AlgorithmConfig.model_validate(keys))
    ]


@pytest.mark.parametrize(
    ("needed", "idle"),
    [
        ({"objective": "reinforce"}, {"clip_low": 0.1, "clip_high": 0.3}),
        ({"correction": "icepop"}, {"correction_cap": 3.0}),
        ({}, {"max_refills": 5}),
        ({"name": "ppo", "advantage": "group"}, {"gamma": 0.9, "critic_learning_rate": 1e-4}),
    ],
)
def test_unused_keys_are_reported(needed: dict[str, Any], idle: dict[str, Any]) -> None:
    assert sorted(unused_keys(**needed, **idle)) == sorted(f"algorithm.{key}" for key in idle)


@pytest.mark.parametrize(
    "keys",
    [
        {"clip_low": 0.1, "clip_high": 0.3},
        {"entropy_coef": 0.1, "entropy_hold": 0.5, "entropy_final_factor": 0.1},
        {"correction": "icepop", "correction_low": 0.1, "correction_high": 3.0},
        {
            "advantage": "gae",
            "gamma": 0.9,
            "gae_lambda": 0.5,
            "value_clip": 0.1,
            "critic_learning_rate": 1e-4,
        },
    ],
)
def test_used_keys_are_not_reported(keys: dict[str, Any]) -> None:
    assert unused_keys(**keys) == []


def test_a_bonus_that_is_held_for_the_whole_run_is_lowered_to_nothing() -> None:
    lines = find_unused_algorithm_keys(AlgorithmConfig(entropy_coef=0.1, entropy_final_factor=0.1))
    assert lines == [
        "algorithm.entropy_final_factor=0.1 has no effect: it only counts if algorithm.entropy_coef is above 0, and "
        "entropy_final_factor and entropy_hold below 1"
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_preset_alone_reports_no_unused_key(name: str) -> None:
    assert unused_keys(name=name) == []
    assert (
        unused_keys(name=name, objective="reinforce", ratio="token", advantage="group", overlong="train")
        == []
    )


@pytest.mark.parametrize("name", [None, *PRESETS])
def test_shipped_files_set_no_unused_key(name: str | None) -> None:
    assert OURS
    for file in OURS:
        section = yaml.safe_load(file.read_text()).get("algorithm", {})
        keys = {"name": section} if isinstance(section, str) else dict(section)
        assert unused_keys(**keys | ({} if name is None else {"name": name})) == [], file


EPISODES: dict[str, dict[str, Any]] = {
    "rollout": {"num_turns": 3, "fork_turn": 1, "episode_timeout_s": 5.0},
    "reward": {"illegal_answer": -2.0},
    "evaluation": {"episodes": 7},
}


def config(*, world: dict[str, Any], **sections: dict[str, Any]) -> Config:
    reward = {"function": "package.module.judge", **sections.pop("reward", {})}
    return Config.model_validate({"rollout": {}, **world, **sections, "reward": reward})


def test_keys_of_episodes_are_unused_with_a_dataset() -> None:
    assert find_unused_keys(config(world={"data": {"source": "prompts.jsonl"}})) == []
    on_gpus = {"trainer": {"num_gpus": 1}, "monarch": {"gpus_per_node": 2}}
    assert find_unused_keys(config(world={"data": {"source": "prompts.jsonl"}}, **on_gpus)) == []
    lines = find_unused_keys(config(world={"data": {"source": "prompts.jsonl"}}, **EPISODES))
    assert lines == [
        f"{section}.{key}={value} has no effect: it only counts if env.* is set, not data.*"
        for section, keys in EPISODES.items()
        for key, value in keys.items()
    ]
    assert {section: tuple(keys) for section, keys in EPISODES.items()} == EPISODE_KEYS


def test_signal_sampling_without_repeated_tasks_is_reported() -> None:
    def lines(tasks: int, sampling: str) -> list[str]:
        env = {"url": "http://127.0.0.1:8000", "tasks": tasks, "sampling": sampling}
        rollout = {"batch_size": 64, "group_size": 8}
        return find_unused_keys(
            Config.model_validate({"env": env, "rollout": rollout, "trainer": {"iterations": 5}})
        )

    assert lines(40, "uniform") == lines(39, "signal") == []
    assert lines(40, "signal") == [
        "env.sampling=signal has no effect: 40 groups come back to none of 40 tasks"
    ]


def test_keys_of_events_that_cannot_happen_are_reported() -> None:
    def lines(**rollout: Any) -> list[str]:
        world = {"env": {"url": "http://127.0.0.1:8000"}}
        unused = find_unused_keys(config(world=world, rollout=rollout, trainer={"checkpoint_interval": 0}))
        return [line.partition(":")[0] for line in unused]

    assert lines(timeout_s=60.0) == lines(straggler_timeout_s=700.0) == []
    assert lines(straggler_timeout_s=3600.0, checkpoint_on_preemption=True) == [
        "rollout.straggler_timeout_s=3600 has no effect",
        "rollout.checkpoint_on_preemption=True has no effect on the run",
    ]


def test_an_order_of_tasks_without_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected env\.tasks.*with env\.sampling=signal, got none"):
        config(world={"env": {"url": "http://127.0.0.1:8000", "sampling": "signal"}})


@pytest.mark.parametrize(
    ("fork_turn", "sessions", "message"),
    [
        (4, 128, r"fork_turn below rollout\.num_turns, .*got 4 and 4"),
        ([3, 2], 128, r"the least and the most, got \(3, 2\) and 4"),
        (2, 8, r"env\.sessions of at least 9 for each of 1 rollout workers .*got 8"),
    ],
)
def test_a_fork_that_no_group_can_have_is_refused(fork_turn: Any, sessions: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(
            world={"env": {"url": "http://127.0.0.1:8000", "sessions": sessions}},
            rollout={"num_turns": 4, "fork_turn": fork_turn},
        )


def test_keys_of_episodes_are_used_with_an_environment() -> None:
    assert find_unused_keys(config(world={"env": {"url": "http://127.0.0.1:8000"}}, **EPISODES)) == []
