"""Adapters follow their formula for every model, and leave the model's own weights unchanged."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import load_reference, logprobs, make_checkpoint, model_logprobs, rows, titan
from torch import Tensor

from rl_bridge.config import LoraConfig

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(200)]

CASES = [
    ("qwen3", LoraConfig(rank=4, alpha=6.0)),
    # Keys and values have one configuration in common: of the keys' adapters nothing may be seen.
    ("llama-tied", LoraConfig(rank=3, alpha=2.0, targets=("v_proj", "down_proj"))),
    pytest.param(
        "qwen2", LoraConfig(rank=1, alpha=2.0, targets=("q_proj", "o_proj")), marks=pytest.mark.soak
    ),
]


def adapted(path: Path, lora: LoraConfig) -> Any:
    """A model whose adapters do something."""
    model = titan(path, trainable=True, lora=lora, seed=3, activation_checkpointing="full")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.adapter_state().items():
            if "lora_B" in name:
                value.to_local().copy_(0.1 * torch.randn(value.shape, generator=generator))
    return model


def factors(model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by the name of the layer's weight in the checkpoint."""
    found = {name: value.full_tensor() for name, value in model.adapter_state().items()}
    stems = {name.rpartition(".lora_")[0] for name in found}
    return {
        f"{stem.removeprefix('base_model.model.')}.weight": (
            found[f"{stem}.lora_A.weight"],
            found[f"{stem}.lora_B.weight"],
        )
        for stem in stems
    }


@pytest.mark.parametrize(("name", "lora"), CASES)
def test_gradients_are_those_of_merged_weights(name: str, lora: LoraConfig, tmp_path: Path) -> None:
    path, tokens, scale = make_checkpoint(tmp_path, name), rows(), lora.alpha / lora.rank
    model, merged = adapted(path, lora), load_reference(path)
    base = logprobs(merged(tokens).logits, tokens).detach()
    weights = dict(merged.named_parameters())
    pairs = factors(model)
    assert {name.split(".")[-2] for name in pairs} == set(lora.targets)
    with torch.no_grad():
        for weight, (a, b) in pairs.items():
            weights[weight] += scale * b @ a
    ours, theirs = model_logprobs(model, tokens), logprobs(merged(tokens).logits, tokens)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0.0)
    with model.without_adapters():
        torch.testing.assert_close(model_logprobs(model, tokens), base, atol=2e-5, rtol=0.0)
    assert (ours - base).abs().max() > 0.01
    ours.mean().backward()
    theirs.mean().backward()
    for weight, layer in model._adapters._layers.items():
        a, b = pairs[weight]
        gradient = weights[weight].grad
        assert gradient is not None
        got = [layer.lora_a.weight.grad.full_tensor(), layer.lora_b.weight.grad.full_tensor()]
        for one, expected in zip(got, [scale * b.T @ gradient, scale * gradient @ a.T], strict=True):
            torch.testing.assert_close(one, expected, atol=1e-6, rtol=0.0)
    trained = {weight for weight, value in model.module.named_parameters() if value.grad is not None}
    assert len(trained) == len(model.trained_state()) == 2 * len(pairs)
    assert all(".lora_" in weight for weight in trained)
    whole = model.hf_state_dict()
    for weight, value in whole.items():
        torch.testing.assert_close(value, weights[weight].detach(), atol=1e-6, rtol=0.0)


def test_a_checkpoint_is_known_by_its_weights_and_not_by_its_files(tmp_path: Path) -> None:
    from rl_bridge.titan.lora import checkpoint_identity

    one = make_checkpoint(tmp_path / "one", "qwen3")
    several = make_checkpoint(tmp_path / "several", "qwen3", most_a_file="20KB")
    assert len(list(several.glob("*.safetensors"))) > 1
    assert checkpoint_identity(one) == checkpoint_identity(several)
    other = Path(shutil.copytree(one, tmp_path / "other"))
    content = bytearray((other / "model.safetensors").read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1  # the first byte of the first tensor
    (other / "model.safetensors").write_bytes(content)
    assert checkpoint_identity(other) != checkpoint_identity(one)
