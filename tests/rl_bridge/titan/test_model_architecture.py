"""What config.json says, in the words of both transformers 4 and 5."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.errors import ModelError
from rl_bridge.titan.architecture import Architecture, RotaryScaling, architecture_of, read_architecture

# As published with the models, less the keys that say nothing about the shape.
QWEN2_5_1_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
EXPECTED = [
    (
        QWEN2_5_1_5B,
        Architecture(
            family="qwen2",
            dim=1536,
            hidden_dim=8960,
            layers=28,
            heads=12,
            kv_heads=2,
            head_dim=128,
            vocabulary=151936,
            norm_eps=1e-6,
            positions=32768,
            rope_theta=1e6,
            rope_scaling=None,
            tied=True,
            qkv_bias=True,
            qk_norm=False,
        ),
    ),
    (
        QWEN3_8B,
        Architecture(
            family="qwen3",
            dim=4096,
            hidden_dim=12288,
            layers=36,
            heads=32,
            kv_heads=8,
            head_dim=128,
            vocabulary=151936,
            norm_eps=1e-6,
            positions=40960,
            rope_theta=1e6,
            rope_scaling=None,
            tied=False,
            qkv_bias=False,
            qk_norm=True,
        ),
    ),
    (
        LLAMA_3_1_8B,
        Architecture(
            family="llama",
            dim=4096,
            hidden_dim=14336,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            vocabulary=128256,
            norm_eps=1e-5,
            positions=131072,
            rope_theta=5e5,
            rope_scaling=RotaryScaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
            ),
            tied=False,
            qkv_bias=False,
            qk_norm=False,
        ),
    ),
]
FAMILIES = ["qwen2", "qwen3", "llama"]


@pytest.mark.parametrize(("config", "expected"), EXPECTED, ids=FAMILIES)
def test_published_configurations_are_understood(config: dict[str, Any], expected: Architecture) -> None:
    assert architecture_of(config, where="there") == expected


@pytest.mark.parametrize(("config", "expected"), EXPECTED, ids=FAMILIES)
def test_newer_files_say_the_same_in_other_words(config: dict[str, Any], expected: Architecture) -> None:
    newer = {key: value for key, value in config.items() if key not in {"rope_theta", "rope_scaling"}}
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    newer["rope_parameters"] = {**scaling, "rope_theta": config["rope_theta"]}
    assert architecture_of(newer, where="there") == expected


def test_what_older_files_leave_out() -> None:
    older = {
        key: value
        for key, value in LLAMA_3_1_8B.items()
        if key not in {"num_key_value_heads", "rope_theta", "rope_scaling", "tie_word_embeddings"}
    }
    read = architecture_of(older, where="there")
    assert (read.kv_heads, read.rope_theta, read.rope_scaling, read.tied) == (32, 10_000.0, None, False)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"model_type": "mamba"},
            "expected an architecture among llama, qwen2, qwen3, got 'mamba' at 'there'",
        ),
        ({"model_type": None}, "got None at 'there'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "plain or stretched as Llama 3's are, got 'yarn'",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "got 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "expected low_freq_factor .* got None"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "of whole heads"),
        ({"use_sliding_window": True}, "expected use_sliding_window to be False, got True"),
        ({"attention_bias": True}, "expected attention_bias to be False, got True"),
        ({"mlp_bias": True}, "expected mlp_bias to be False, got True"),
        ({"hidden_act": "gelu"}, "expected hidden_act to be 'silu', got 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "expected quantization_config to be None"),
        (
            {"num_hidden_layers": "36"},
            "expected num_hidden_layers in config.json to be of type int, got '36'",
        ),
        ({"vocab_size": True}, "expected vocab_size .* got True"),
    ],
)
def test_what_is_not_supported_is_refused(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        architecture_of({**QWEN3_8B, **change}, where="there")


def test_what_a_file_lacks_is_named() -> None:
    lacking = {key: value for key, value in QWEN3_8B.items() if key != "rms_norm_eps"}
    with pytest.raises(
        ModelError, match=r"expected rms_norm_eps in config\.json to be of type float, got None"
    ):
        architecture_of(lacking, where="there")


def test_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    assert read_architecture(tmp_path) == EXPECTED[1][1]


@pytest.mark.parametrize("content", [None, b"{", b"", b"[]", b'{"model_type": "\xff"}'])
def test_a_folder_without_a_configuration_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"expected a checkpoint with a config\.json"):
        read_architecture(tmp_path)
