"""The defaults that depend on other keys: every combination of the main switches is a configuration that trains."""

from itertools import product
from typing import Any

import pytest

from rl_bridge.config import PRESETS, Config, require_trainable

ENGINES = ("auto", "vllm", "vllm_async")


@pytest.mark.parametrize("num_gpus", [None, 0, 1])
@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("lora", [None, {}, {"push": "merged"}])
def test_defaults_agree_with_each_other(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int | None, max_staleness: int, lora: dict[str, str] | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    expected = "continue" if max_staleness else "drain"
    for colocate, engine, name, kl_coef in product((None, False, True), ENGINES, PRESETS, (0.0, 0.1)):
        keys: dict[str, Any] = {
            "env": {"app": "a:b"},
            "rollout": {"max_staleness": max_staleness},
            "model": {"lora": lora},
            "generator": {"engine": engine},
            "algorithm": {"name": name, "kl_coef": kl_coef},
            "trainer": {"num_gpus": num_gpus},
            "monarch": {"colocate": colocate, "gpus_per_node": 8},
            "deterministic": not max_staleness,
        }
        config = Config.model_validate(keys)
        require_trainable(config)
        assert config.rollout.weight_update == expected
        assert Config.model_validate(config.model_dump(mode="json")) == config, "a saved run cannot go on"
