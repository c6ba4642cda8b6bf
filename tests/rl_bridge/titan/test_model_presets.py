"""The presets for published models: they load, they fit, and a tiny model of the same architecture trains by them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.config import Config, load_config
from rl_bridge.planning.memory import memory_of_roles
from rl_bridge.planning.model_size import ModelSize
from rl_bridge.titan.architecture import architecture_of

FOLDER = Path(__file__).parents[3] / "examples" / "presets"
GPU_BYTES = 80e9

QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": QWEN
    | {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": QWEN
    | {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": QWEN
    | {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "llama3-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}
"""What the models' config.json says of their size."""
# By the model cards: 1.54 billion parameters; 1.7; 8.2; 8.03.
BILLIONS = {"qwen2.5-1.5b": 1.54, "qwen3-1.7b": 1.72, "qwen3-8b": 8.19, "llama3-8b": 8.03}
TINY = {
    "qwen2.5-1.5b": "qwen2-tied",
    "qwen3-1.7b": "qwen3-tied",
    "qwen3-8b": "qwen3",
    "llama3-8b": "llama-stretched",
}


def preset(name: str, *overrides: str) -> Config:
    return load_config(FOLDER / f"{name}.yaml", overrides)


def test_every_preset_is_looked_at() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_loads_and_uses_every_gpu_that_it_asks_for(name: str) -> None:
    config = preset(name, "env.app=some.module:app", "rollout.task=some.module:Task")
    monarch = config.monarch
    assert monarch.roles.gpus() == monarch.num_nodes * monarch.gpus_per_node
    assert (monarch.roles.policy.gpus, config.model.dtype, config.name) == (1, "bfloat16", name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_process_fits_into_80_gb(name: str, tmp_path: Path) -> None:
    """With room for what the calculator leaves out: activations, and more than one copy of the logits."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config, size = preset(name), ModelSize.of_folder(tmp_path)
    assert size.parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    needed = {one.role: one for one in memory_of_roles(config, size)}
    assert needed["policy"].process_bytes < config.rollout.gpu_memory_utilization * GPU_BYTES
    trainer = needed["trainer"]
    (logits,) = trainer.per_process.values()
    # Logits as they come, at the loss tokens, divided by the temperature, normalised, and the gradients of these.
    assert trainer.process_bytes + 6 * logits < GPU_BYTES


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_architecture_can_be_trained(name: str) -> None:
    config, architecture = preset(name), architecture_of(PUBLISHED[name], where=name)
    assert architecture.positions >= config.rollout.max_length
    assert architecture.kv_heads % config.trainer.tensor_parallel == 0


@pytest.mark.heavy
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tiny_model_of_the_same_architecture_trains_by_it(name: str, tmp_path: Path) -> None:
    from tiny_checkpoints import documents, make_checkpoint

    from rl_bridge.loops.settings import trainer_settings
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
    figures = trainer.step(documents())
    assert figures["train/grad_norm"] > 0
    after = trainer.hf_state_dict()
    assert all(not before[key].equal(after[key]) for key in before)
