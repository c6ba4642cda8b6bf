"""Presets: their keys, overrides of each key, and saved runs that show all of them."""

import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rl_bridge.config import PRESETS, AlgorithmConfig, LoraConfig, load_config, save_config
from rl_bridge.config.effects import find_unused_keys
from rl_bridge.errors import ConfigError

RUN = "env: {app: 'package.app:app'}\nrollout: {task: 'package.task:Task', batch_size: 64, group_size: 8}\n"

# What the papers say, by the keys that set each apart from GRPO; of CISPO's the objective alone, without what its paper
# takes from DAPO.
BY_HAND: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"normalize_std": False, "aggregation": "fixed_length"},
    "dapo": {"clip_high": 0.28, "aggregation": "token_mean", "dynamic_sampling": True, "overlong": "penalty"},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"objective": "cispo", "clip_low": 1.0, "clip_high": 0.28, "aggregation": "token_mean"},
    "ppo": {"advantage": "gae", "aggregation": "token_mean", "value_clip": 0.2},
}


def preset(name: str, **keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"name": name, **keys})


def test_presets_follow_the_papers() -> None:
    names = typing.get_args(AlgorithmConfig.model_fields["name"].annotation)
    assert set(names) == set(PRESETS) == set(BY_HAND)
    plain = AlgorithmConfig().model_dump()
    for name, keys in BY_HAND.items():
        assert preset(name).model_dump() == {**plain, "name": name, **keys}


@pytest.mark.parametrize("name", PRESETS)
def test_another_name_takes_the_place_of_a_saved_runs(tmp_path: Path, name: str) -> None:
    """Its file has every key; they are the old name's, and what was set beside it stays."""
    file = tmp_path / "run.yaml"
    file.write_text(RUN + "algorithm: {name: ppo, kl_coef: 0.5}\n")
    save_config(load_config(file), tmp_path)
    saved = tmp_path / "config.yaml"
    assert yaml.safe_load(saved.read_text())["algorithm"] == preset("ppo", kl_coef=0.5).model_dump()
    assert load_config(saved, [f"algorithm={name}"]).algorithm == preset(name, kl_coef=0.5)
    # Wherever it stands, and whatever the old name says of that key.
    overrides = ["algorithm.clip_low=0.2", f"algorithm={name}"]
    assert load_config(saved, overrides).algorithm == preset(name, kl_coef=0.5, clip_low=0.2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"objective": "reinforce", "ratio": "sequence"}, "which uses no ratio, got sequence"),
        ({"correction_low": 5.0}, "correction_low below algorithm.correction_high, got 5.0 and 5.0"),
        ({"kl_in": "reward", "overlong": "mask"}, "algorithm.kl_in=loss with algorithm.overlong=mask"),
    ],
)
def test_conflicting_keys_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AlgorithmConfig.model_validate(keys)
    assert message in str(caught.value)


def test_adapters_are_made_by_nothing_but_their_section(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN + "algorithm: {kl_coef: 0.1}\n")
    assert load_config(file).has_reference
    lora = load_config(file, ["model.lora={}"])
    assert lora.model.lora == LoraConfig()
    assert (lora.has_reference, lora.pushed_adapter) == (False, LoraConfig())
    assert load_config(file, ["model.lora.push=merged", "model.lora.rank=4"]).pushed_adapter is None
    with pytest.raises(ConfigError, match=r'"continue" with model\.lora\.push=adapter, got "keep_cache"'):
        load_config(file, ["model.lora.rank=4", "rollout.weight_update=keep_cache"])
    with pytest.raises(ConfigError, match=r"(?s)model\.lora\.targets.*did you mean 'model\.lora\.rank'"):
        load_config(file, ["model.lora.rang=4", "model.lora.targets=[lm_head]"])
    idle = load_config(file, ["model.lora={}", "monarch.roles.reference.replicas=2"])
    assert [line.partition(":")[0] for line in find_unused_keys(idle)] == [
        "monarch.roles.reference has no effect"
    ]
