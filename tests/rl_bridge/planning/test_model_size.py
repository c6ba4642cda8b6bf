"""How large a model is: by its config.json against published metrics, by its weights, or as people write it."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.config import LoraConfig, ParallelConfig
from rl_bridge.errors import ConfigError, ModelError
from rl_bridge.planning import ModelSize, parse_count
from rl_bridge.titan.architecture import architecture_of, require_layout
from tests.rl_bridge.planning.published_models import (
    LLAMA3_8B,
    QWEN2_5_1_5B,
    QWEN3_1_7B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_32B,
)

OTHER = LLAMA3_8B | {"model_type": "another"}


def folder(path: Path, config: object) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "parameters", "output", "critic"),
    [
        # The sums of the published checkpoints' shapes.
        # A critic has one row of width in place of the output layer, beside the embedding where that was both.
        (LLAMA3_8B, 8_030_261_248, 128256 * 4096, 8_030_261_248 - 525_336_576 + 4096),
        (QWEN3_8B, 8_190_735_360, 151936 * 4096, 8_190_735_360 - 622_329_856 + 4096),
        (QWEN3_32B, 32_762_123_264, 151936 * 5120, 32_762_123_264 - 777_912_320 + 5120),
        (QWEN3_30B_A3B, 30_532_122_624, 151936 * 2048, 30_532_122_624 - 311_164_928 + 2048),
        (QWEN3_1_7B, 1_720_574_976, 151936 * 2048, 1_720_574_976 + 2048),
        (QWEN2_5_1_5B, 1_543_714_304, 151936 * 1536, 1_543_714_304 + 1536),
    ],
)
def test_published_models_by_their_configuration_alone(
    tmp_path: Path, config: dict[str, Any], parameters: int, output: int, critic: int
) -> None:
    size = ModelSize.of_folder(folder(tmp_path, config))
    assert size.architecture is not None
    assert (size.parameters, size.critic_parameters) == (parameters, critic)
    assert size.architecture.output_parameters == output


def test_a_token_meets_few_of_the_experts() -> None:
    architecture = architecture_of(QWEN3_30B_A3B, where="here")
    spared = 120 * 3 * 2048 * 768
    assert architecture.layer_parameters - architecture.active_layer_parameters == spared
    assert architecture.train_flops([1], 0) < 0.1 * 6 * architecture.parameters


@pytest.mark.parametrize(
    ("config", "parallel", "ranks", "message"),
    [
        (QWEN3_8B, {"tp": 3}, 3, "to divide the model's 32 attention heads, got 3"),
        (QWEN3_8B, {"tp": 16}, 16, "to divide the model's 8 key-value heads, got 16"),
        (QWEN3_8B, {"ep": 2}, 2, "to divide the model's 0 experts of a layer, got 2"),
        (QWEN3_30B_A3B, {"ep": 3}, 6, "to divide the model's 128 experts of a layer, got 3"),
        (
            QWEN3_30B_A3B,
            {"ep": 32},
            160,
            "5 parts of an expert to divide its hidden size of 768, with 160 ranks",
        ),
        (QWEN3_30B_A3B, {"tp": 2}, 4, "expected trainer.parallel.ep above 1 with tp of 2"),
        (QWEN3_30B_A3B, {"tp": 4}, 6, "got 1 x any x 4 and 6; change trainer.parallel"),
        (
            QWEN3_8B | {"vocab_size": 32_001},
            {"tp": 2},
            8,
            "4 parts of what each of 2 tensor-parallel ranks has of a vocabulary of 32001",
        ),
        (QWEN3_8B | {"intermediate_size": 12_289}, {"tp": 2}, 8, "has of a hidden size of 12289"),
    ],
)
def test_a_model_that_its_ranks_cannot_share_is_refused(
    config: dict[str, Any], parallel: dict[str, int], ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        require_layout(architecture_of(config, where="here"), ParallelConfig(**parallel), ranks)


def test_experts_have_no_adapters() -> None:
    architecture, parallel = architecture_of(QWEN3_30B_A3B, where="here"), ParallelConfig(hsdp=2, ep=4)
    require_layout(architecture, parallel, 16, LoraConfig(targets=("q_proj",)))
    with pytest.raises(ConfigError, match="got down_proj, gate_proj, up_proj: experts have no adapters"):
        require_layout(architecture, parallel, 16, LoraConfig())


def weights(path: Path, name: str, shapes: dict[str, list[int]]) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}} | {k: {"shape": v} for k, v in shapes.items()})
    data = len(header).to_bytes(8, "little") + header.encode() + b"\0" * 64
    (path / f"{name}.safetensors").write_bytes(data)


def test_weights_of_other_architectures_are_counted(tmp_path: Path) -> None:
    folder(tmp_path, OTHER)
    weights(tmp_path, "a", {"x": [3, 5], "y": []})
    weights(tmp_path, "b", {"z": [2, 2, 2]})
    assert ModelSize.of_folder(tmp_path).parameters == 15 + 1 + 8


def test_weights_of_which_some_are_missing_are_not_taken_for_all(tmp_path: Path) -> None:
    """As a download that was broken off leaves them."""
    folder(tmp_path, OTHER)
    weights(tmp_path, "a", {"x": [3, 5]})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "z": "b.safetensors"}}))
    with pytest.raises(ModelError, match=r"1 are missing, b\.safetensors among them"):
        ModelSize.of_folder(tmp_path)
    index.write_text("[]")
    with pytest.raises(ModelError, match="expected an index or a file of safetensors"):
        ModelSize.of_folder(tmp_path)
    assert ModelSize.of_folder(folder(tmp_path, LLAMA3_8B)).parameters == 8_030_261_248


@pytest.mark.parametrize("content", [b"short", b"\x02" + b"\0" * 7 + b"[]", b"\xff" * 64])
def test_invalid_weight_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"a file of safetensors at .*model\.safetensors'"):
        ModelSize.of_folder(folder(tmp_path, OTHER))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "it is no JSON object"),
        (LLAMA3_8B | {"hidden_size": None}, "expected hidden_size in config.json to be of type int"),
        (LLAMA3_8B | {"model_type": "mixtral"}, "got 'mixtral' at .*; or say how large .* by --parameters"),
    ],
)
def test_configuration_without_a_size_is_refused(tmp_path: Path, config: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelSize.of_folder(folder(tmp_path, config))


def test_counts_as_people_write_them() -> None:
    assert [parse_count(text) for text in ("8e9", "70B", "1.7b", "350M", "12")] == [
        8_000_000_000,
        70_000_000_000,
        1_700_000_000,
        350_000_000,
        12,
    ]


def test_adapters_are_as_many_as_peft_counts(tmp_path: Path) -> None:
    size = ModelSize.of_folder(folder(tmp_path, LLAMA3_8B))
    assert size.adapter_parameters(LoraConfig(rank=16)) == 41_943_040
