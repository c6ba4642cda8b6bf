"""Published models: their config.json is understood, and the presets for them load, fit and train."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.config import Config, load_config
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
SHAPE = {  # By the name in config.json.
    "model_type": "family",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "vocab_size": "vocabulary",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "positions",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "tied",
}


@pytest.mark.parametrize(
    ("name", "qkv_bias", "qk_norm", "scaling"),
    [
        ("qwen2.5-1.5b", True, False, None),
        ("qwen3-8b", False, True, None),
        ("llama3-8b", False, False, STRETCHED),
    ],
)
def test_published_configurations_are_understood(
    name: str, qkv_bias: bool, qk_norm: bool, scaling: RotaryScaling | None
) -> None:
    config = PUBLISHED[name]
    read = architecture_of(config, where="there")
    assert {key: getattr(read, field) for key, field in SHAPE.items()} == {key: config[key] for key in SHAPE}
    assert (read.head_dim, read.qkv_bias, read.qk_norm, read.rope_scaling) == (
        128,
        qkv_bias,
        qk_norm,
        scaling,
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"model_type": "mamba"},
            "expected an architecture among llama, qwen2, qwen3, got 'mamba' at 'there'",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "plain or stretched as Llama 3's are, got 'yarn'",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "expected low_freq_factor .* got None"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "of whole heads"),
        ({"use_sliding_window": True}, "expected use_sliding_window to be False, got True"),
        ({"attention_bias": True}, "expected attention_bias to be False, got True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "expected quantization_config to be None"),
        (
            {"num_hidden_layers": "36"},
            "expected num_hidden_layers in config.json to be of type int, got '36'",
        ),
    ],
)
def test_unsupported_architectures_are_refused(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        architecture_of({**PUBLISHED["qwen3-8b"], **change}, where="there")


@pytest.mark.parametrize("content", [None, b"{", b"[]"])
def test_a_folder_without_a_configuration_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"expected a checkpoint with a config\.json"):
        read_architecture(tmp_path)


TINY = {
    "qwen2.5-1.5b": "qwen2-tied",
    "qwen3-1.7b": "qwen3-tied",
    "qwen3-8b": "qwen3",
    "llama3-8b": "llama-stretched",
}


def preset(name: str, *overrides: str) -> Config:
    return load_config(FOLDER / f"{name}.yaml", overrides)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_process_fits_into_80_gb(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config, size = preset(name), ModelSize.of_folder(tmp_path)
    needed = {one.role: one for one in memory_of_roles(config, size)}
    assert needed["policy"].process_bytes < config.rollout.gpu_memory_utilization * GPU_BYTES
    trainer = needed["trainer"]
    assert trainer.process_bytes < GPU_BYTES
    assert config.monarch.roles.gpus() == config.monarch.num_nodes * config.monarch.gpus_per_node


@pytest.mark.heavy
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tiny_model_of_the_same_architecture_trains_by_it(name: str, tmp_path: Path) -> None:
    from tiny_checkpoints import documents, make_checkpoint

    from rl_bridge.loops.run import trainer_settings
    from rl_bridge.trainer.trainer import Trainer

    config = preset(
        name,
        "trainer.num_gpus=0",
        "monarch.gpus_per_node=0",
        "rollout.max_length=32",
        "rollout.max_new_tokens=8",
        "trainer.learning_rate=1e-3",
        "trainer.warmup_updates=0",
    )
    path = make_checkpoint(tmp_path / "model", TINY[name])
    trainer = Trainer(trainer_settings(config, tmp_path, path))
    before = {key: tensor.clone() for key, tensor in trainer.hf_state_dict().items()}
    metrics = trainer.step(documents())
    assert metrics["train/grad_norm"] > 0
    after = trainer.hf_state_dict()
    assert all(not before[key].equal(after[key]) for key in before)


def test_operations_of_frozen_weights_and_of_a_critic() -> None:
    one = architecture_of(PUBLISHED["qwen3-1.7b"], where="here")
    attention = 12 * 28 * 16 * 128 * (10**2 + 30**2)
    body, logits = 28 * one.layer_parameters * 40, 151936 * 2048 * 7
    assert one.train_flops([10, 30], 7) == 6 * (body + logits) + attention
    assert one.train_flops([10, 30], 7, output_layer=False) == 6 * body + attention
    assert one.train_flops([10, 30], 7, frozen=True) == 4 * (body + logits) + attention
