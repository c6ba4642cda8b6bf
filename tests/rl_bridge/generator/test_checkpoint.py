"""What an engine needs of a state dict before it replaces its weights, which it cannot take back."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rl_bridge.errors import ModelError, WeightsError
from rl_bridge.generator.replica import Checkpoint

pytestmark = pytest.mark.heavy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in two files, as large ones are."""
    from safetensors.torch import save_file

    save_file({"first": torch.ones(2, 3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"second": torch.zeros(4)}, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


def state(**changes: Tensor) -> dict[str, Tensor]:
    return {"first": torch.zeros(2, 3), "second": torch.zeros(4, dtype=torch.bfloat16), **changes}


def test_all_tensors_of_all_files_are_read_and_required(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    tensors = checkpoint.tensors()
    assert {name: tensor.sum().item() for name, tensor in tensors.items()} == {"first": 6.0, "second": 0.0}
    checkpoint.require_like(state())
    checkpoint.require_like(state(head=torch.zeros(9)))  # a trainer names what others share
    incomplete = state()
    del incomplete["second"]
    with pytest.raises(WeightsError, match=r"expected all 2 tensors .* got 1 without second"):
        checkpoint.require_like(incomplete)
    with pytest.raises(WeightsError, match=r"expected first of shape \[2, 3\].* got \[3, 2\]"):
        checkpoint.require_like(state(first=torch.zeros(3, 2)))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_output_layer_need_not_come_twice(folder: Path, tied: bool) -> None:
    """Qwen3's smaller checkpoints have it in their files none the less."""
    from safetensors.torch import save_file

    save_file({"lm_head.weight": torch.zeros(2, 3)}, folder / "more.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    if tied:
        Checkpoint(folder).require_like(state())
    else:
        with pytest.raises(WeightsError, match=r"without lm_head\.weight"):
            Checkpoint(folder).require_like(state())


def test_folder_without_weights_and_broken_files_are_named(folder: Path) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(ModelError, match="found none"):
        Checkpoint(folder / "empty").tensors()
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"no header")
    for read in (Checkpoint(folder).tensors, lambda: Checkpoint(folder).require_like(state())):
        with pytest.raises(ModelError, match="model-00002-of-00002"):
            read()
