"""A trainer of adapters: training, checkpoints, publishing, exports, and its reference model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from trainer_ranks import Ranks, alone, assert_close, batch, copied, join_published, settings

from rl_bridge.config import LoraConfig
from rl_bridge.errors import ModelError

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

LORA = LoraConfig(rank=4, alpha=8.0, push="merged")
OPTIONS: dict[str, Any] = {"lora": LORA, "updates_per_iteration": 2, "deterministic": True}


def merged(base: dict[str, Tensor], factors: dict[str, Tensor], lora: LoraConfig = LORA) -> dict[str, Tensor]:
    """By hand, from the files of both."""
    found = dict(base)
    for name, b in factors.items():
        if name.endswith("lora_B.weight"):
            a = factors[name.replace("lora_B", "lora_A")]
            weight = name.removeprefix("base_model.model.").replace("lora_B.weight", "weight")
            found[weight] = base[weight] + lora.alpha / lora.rank * b @ a
    return found


def test_adapters_are_trained_merged_exported_and_resumed(policy: Path, tmp_path: Path) -> None:
    trainer = alone(policy, tmp_path / "run", **OPTIONS)
    first, base = copied(trainer), load_file(policy / "model.safetensors")
    assert_close(first, base)  # B is 0
    trainer.step(batch(0))
    trainer.save(1, {"number": 1})
    trainer.export(tmp_path)
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(factors) == 2 * 2 * 7  # two factors, two layers
    exported = load_file(tmp_path / "model.safetensors")
    assert_close(exported, merged(base, factors), atol=1e-6)
    changed = {name for name in base if not torch.equal(exported[name], base[name])}
    assert {name.split(".")[-2] for name in changed} == set(LORA.targets)
    assert len(changed) == 14
    assert_close(published(trainer, 1), exported)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", LORA.rank, LORA.alpha)
    assert config["target_modules"] == list(LORA.targets)
    assert config["base_model_name_or_path"] == str(policy)

    held = trainer._checkpoints.names_below("model", 1)
    assert len(held) == len(factors)
    assert all(".lora_" in name for name in held)
    metrics = trainer.step(batch(1))
    again = alone(policy, tmp_path / "run", **OPTIONS)
    assert again.resume().run_state == {"number": 1}
    assert again.step(batch(1)) == metrics
    assert_close(copied(again), copied(trainer))

    other = LORA.model_copy(update={"alpha": 9.0})
    with pytest.raises(ModelError, match=r"rank 4 and alpha 9 .* got adapters of rank 4 and alpha 8"):
        alone(policy, tmp_path / "run", lora=other).resume()
    with pytest.raises(ModelError, match="expected whole weights, got adapters of rank 4"):
        alone(policy, tmp_path / "run").resume()


@pytest.mark.parametrize("kl_in", ["loss", pytest.param("reward", marks=pytest.mark.soak)])
def test_the_reference_is_the_model_with_its_adapters_off(policy: Path, tmp_path: Path, kl_in: str) -> None:
    algorithm = {"kl_coef": 0.5, "kl_in": kl_in}
    trainer = alone(policy, tmp_path / "run", algorithm=algorithm, **OPTIONS)
    for number in range(3):
        trainer.step(batch(number))
    frozen = alone(policy, tmp_path / "other").logprobs(batch(1))
    assert abs(trainer.logprobs(batch(1)) - frozen).max() > 1e-3
    mine = trainer._prepare(trainer._take_own_part(batch(1)))
    np.testing.assert_allclose(mine.batch.reference_logprobs, frozen, atol=1e-6)
    assert trainer.step(batch(1))["policy/kl_to_reference"] > 0


def test_only_adapters_have_a_state_in_the_optimizer(policy: Path, tmp_path: Path) -> None:
    trainer, again = (alone(policy, tmp_path, algorithm={"advantage": "gae"}, **OPTIONS) for _ in range(2))
    assert trainer.step(batch(0))["critic/grad_norm"] > 0
    for optimization, count in ((trainer._optimizer, 28), (trainer._critic.optimization, 29)):  # its head too
        (optimizer,) = optimization._optimizer
        assert len([value for group in optimizer.param_groups for value in group["params"]]) == count
    trainer.save(1)
    again.resume()
    assert again.step(batch(1)) == trainer.step(batch(1))


def published(trainer: Any, version: int) -> dict[str, Tensor]:
    from rl_bridge.weights.snapshot import own_shards

    with trainer.weights(version) as state:
        return {name: shard.values().clone() for name, shard in own_shards(state, rank=0).items()}


def test_generators_get_all_of_a_first_small_update_in_bfloat16(policy: Path, tmp_path: Path) -> None:
    lora = LoraConfig()
    trainer = alone(policy, tmp_path, lora=lora, dtype="bfloat16", learning_rate=1e-5)
    base = copied(trainer)
    trainer.step(batch(0))
    sent = {name: tensor.to(torch.bfloat16).float() for name, tensor in published(trainer, 1).items()}
    as_served = {name: tensor.to(torch.bfloat16).float() for name, tensor in base.items()}
    if lora.push == "adapter":
        sent = merged(as_served, sent, lora)
    change, arrived = (
        torch.cat([(after[name] - before[name]).flatten() for name in before if name in after])
        for after, before in ((trainer.hf_state_dict(), base), (sent, as_served))
    )
    assert change.norm() > 0
    assert float((arrived - change).norm() / change.norm()) < 0.01  # merged in bfloat16: 6.6


@pytest.mark.parametrize(
    ("tensor_parallel", "push"),
    [
        (1, "merged"),
        (1, "adapter"),
        pytest.param(2, "merged", marks=pytest.mark.soak),
        pytest.param(2, "adapter", marks=pytest.mark.soak),
    ],
)
def test_two_ranks_train_and_publish_what_one_does(
    pair: Ranks, policy: Path, tmp_path: Path, tensor_parallel: int, push: str
) -> None:
    lora = LoraConfig.model_validate({"rank": 3, "push": push})
    one = alone(policy, tmp_path / "one", lora=lora)
    options = settings(policy, folder=tmp_path / "two", lora=lora, parallel={"tp": tensor_parallel})
    pair.build(options)
    assert_close(pair.call("hf_state_dict")[0], copied(one))
    for number in range(2):
        told = pair.call("step", batch(number))[0]
        assert told["loss/total"] == pytest.approx(one.step(batch(number))["loss/total"], abs=1e-5)
    whole = pair.call("hf_state_dict")[0]
    assert_close(whole, one.hf_state_dict(), atol=5e-5)
    assert_close(join_published(pair, 2), published(one, 2), atol=5e-5)
