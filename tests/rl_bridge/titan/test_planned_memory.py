"""Memory that `ropewalk plan` predicts for a pass and for adapters, against what a model really keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import titan

from benchmarks.gpu.shapes import SHAPES, documents, write_checkpoint
from rl_bridge.config import Config, LoraConfig
from rl_bridge.planning import ModelSize, memory_of_roles

pytestmark = pytest.mark.heavy

TOKENS = 500


def model(path: Path, **options: Any) -> Any:
    return titan(path, max_length=TOKENS, trainable=True, chunk=64, **options)


def run(dtype: str, checkpointing: str) -> Config:
    trainer: dict[str, Any] = {
        "tokens_per_pass": TOKENS,
        "tokens_per_chunk": 64,
        "activation_checkpointing": checkpointing,
    }
    trainer["share_prefixes"] = False  # the pass has one document
    return Config.model_validate(
        {"model": {"dtype": dtype}, "rollout": {"max_length": TOKENS}, "trainer": trainer}
    )


def kept_bytes(one: Any) -> int:
    """Bytes of activations that a pass forward leaves for the one backward."""
    batch = documents([TOKENS], vocabulary=512)
    storages: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        local = getattr(tensor, "_local_tensor", tensor)
        if {TOKENS, len(batch)} & set(local.shape):  # the others are weights
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), one.spmd():
        outputs = one.outputs(one.pack(batch))  # held: what is freed could be counted under the same address
    assert outputs.logprobs.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_those_that_a_pass_keeps(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "wide", SHAPES["tiny"] | {"hidden_size": 256, "intermediate_size": 768})
    path = write_checkpoint(tmp_path / "policy", "wide", device="cpu", dtype=torch.float32, layers=6)
    size = ModelSize.of_folder(path)

    for checkpointing in ("none", "full"):
        planned = memory_of_roles(run(dtype, checkpointing), size)[0].per_process["activations"]
        found = kept_bytes(model(path, dtype=dtype, activation_checkpointing=checkpointing))
        assert found == pytest.approx(planned, rel=0.06)


def test_adapters_are_as_many_as_are_trained(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "policy", "tiny", device="cpu", dtype=torch.float32)
    lora = LoraConfig(rank=3, targets=("q_proj", "v_proj", "gate_proj", "down_proj"))
    trained = model(path, lora=lora).trained_state().values()
    assert ModelSize.of_folder(path).adapter_parameters(lora) == sum(one.numel() for one in trained)
