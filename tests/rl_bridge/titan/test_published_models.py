"""Published models: their config.json is understood, and the presets for them load, fit and train."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.config import load_config
from rl_bridge.errors import ModelError
from rl_bridge.planning import ModelSize, memory_of_roles
from rl_bridge.titan.architecture import RotaryScaling, architecture_of, read_architecture
from tests.rl_bridge.planning.published_models import LLAMA3_8B, QWEN2_5_1_5B, QWEN3_1_7B, QWEN3_8B

FOLDER = Path(__file__).parents[3] / "examples" / "presets"
GPU_BYTES = 80e9

PUBLISHED = {
    "qwen2.5-1.5b": QWEN2_5_1_5B,
    "qwen3-1.7b": QWEN3_1_7B,
    "qwen3-8b": QWEN3_8B,
    "llama3-8b": LLAMA3_8B,
}
STRETCHED = RotaryScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


@pytest.mark.parametrize(
    ("config", "qkv_bias", "qk_norm", "scaling"),
    [
        (QWEN2_5_1_5B, True, False, None),
        (QWEN3_8B, False, True, None),
        (LLAMA3_8B, False, False, STRETCHED),
    ],
)
def test_published_configurations_are_understood(
    config: dict[str, Any], qkv_bias: bool, qk_norm: bool, scaling: RotaryScaling | None
) -> None:
    read = architecture_of(config, where="there")
    assert (read.head_dim, read.qkv_bias, read.qk_norm, read.rope_scaling) == (
        128,
        qkv_bias,
        qk_norm,
        scaling,
    )
    assert (read.rope_theta, read.norm_eps) == (config["rope_theta"], config["rms_norm_eps"])
    assert (read.positions, read.tied) == (config["max_position_embeddings"], config["tie_word_embeddings"])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "mamba"}, "among llama, qwen2, qwen3, qwen3_moe, got 'mamba' at 'there'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "stretched as Llama 3's are, got 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor .* got None"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "of whole heads"),
        ({"use_sliding_window": True}, "use_sliding_window to be False, got True"),
        ({"attention_bias": True}, "attention_bias to be False, got True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config to be None"),
        ({"num_hidden_layers": "36"}, "num_hidden_layers in config.json to be of type int, got '36'"),
    ],
)
def test_unsupported_architectures_are_refused(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        architecture_of({**QWEN3_8B, **change}, where="there")


@pytest.mark.parametrize("content", [None, b"{", b"[]"])
def test_a_folder_without_a_configuration_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"expected a checkpoint with a config\.json"):
        read_architecture(tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_process_fits_into_80_gb(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config, size = load_config(FOLDER / f"{name}.yaml"), ModelSize.of_folder(tmp_path)
    needed = {one.role: one.process_bytes for one in memory_of_roles(config, size)}
    assert needed["policy"] < config.rollout.gpu_memory_utilization * GPU_BYTES
    assert needed["trainer"] < GPU_BYTES
    assert config.monarch.roles.gpus() == config.monarch.num_nodes * config.monarch.gpus_per_node


TINY_OVERRIDES = (
    "trainer.num_gpus=0",
    "monarch.gpus_per_node=0",
    "rollout.max_length=32",
    "rollout.max_new_tokens=8",
    "trainer.learning_rate=1e-3",
    "trainer.warmup_updates=0",
)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "tiny"),
    [
        ("qwen2.5-1.5b", "qwen2-tied"),
        ("qwen3-1.7b", "qwen3-tied"),
        ("qwen3-8b", "qwen3"),
        ("llama3-8b", "llama-stretched"),
    ],
)
def test_a_tiny_model_of_the_same_architecture_trains_by_it(name: str, tiny: str, tmp_path: Path) -> None:
    from tiny_checkpoints import documents, make_checkpoint

    from rl_bridge.loops.run import trainer_settings
    from rl_bridge.trainer.trainer import Trainer

    config = load_config(FOLDER / f"{name}.yaml", TINY_OVERRIDES)
    trainer = Trainer(trainer_settings(config, tmp_path, make_checkpoint(tmp_path / "model", tiny)))
    before = {key: tensor.clone() for key, tensor in trainer.hf_state_dict().items()}
    assert trainer.step(documents())["train/grad_norm"] > 0
    assert all(not before[key].equal(after) for key, after in trainer.hf_state_dict().items())


def test_operations_of_frozen_weights_and_of_a_critic() -> None:
    one = architecture_of(PUBLISHED["qwen3-1.7b"], where="here")
    attention = 12 * 28 * 16 * 128 * (10**2 + 30**2)
    body, logits = 28 * one.layer_parameters * 40, 151936 * 2048 * 7
    assert one.train_flops([10, 30], 7) == 6 * (body + logits) + attention
    assert one.train_flops([10, 30], 7, output_layer=False) == 6 * body + attention
    assert one.train_flops([10, 30], 7, frozen=True) == 4 * (body + logits) + attention
