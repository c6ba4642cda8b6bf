"""TorchTitan's Qwen3 against transformers' own, from the same checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge.errors import ModelError

pytestmark = pytest.mark.heavy

VOCABULARY = 50


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(4)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=64,
            rope_theta=10_000.0,
            tie_word_embeddings=request.param,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    with torch.no_grad():  # norms of one hide mistakes in their place
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.to(torch.float32).save_pretrained(str(folder))
    return folder


def titan(path: Path, *, trainable: bool = False) -> Any:
    from rl_bridge.titan.model import TitanModel

    return TitanModel(path, dtype="float32", max_length=32, trainable=trainable, device=torch.device("cpu"))


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), model.spmd():
        result: torch.Tensor = model.logits(tokens)
        return result


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (5, 17), generator=torch.Generator().manual_seed(2))


def test_logits_are_those_of_transformers(checkpoint: Path, tokens: torch.Tensor) -> None:
    from transformers import Qwen3ForCausalLM

    reference = Qwen3ForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(tokens).logits
    ours = logits(titan(checkpoint), tokens)
    assert ours.shape == (5, 17, VOCABULARY)
    assert expected.std() > 0.05, "the checkpoint says nothing, so agreeing with it shows nothing"
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)


def test_padding_on_the_right_changes_nothing(checkpoint: Path, tokens: torch.Tensor) -> None:
    model = titan(checkpoint)
    whole = logits(model, tokens)
    padded = torch.full((5, 25), 0)
    padded[:, :9] = tokens[:, :9]
    torch.testing.assert_close(logits(model, padded)[:, :9], whole[:, :9], atol=1e-6, rtol=1e-5)


def test_what_comes_later_changes_nothing(checkpoint: Path, tokens: torch.Tensor) -> None:
    model = titan(checkpoint)
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 7) % VOCABULARY
    before, after = logits(model, tokens), logits(model, changed)
    torch.testing.assert_close(after[:, :10], before[:, :10], atol=1e-6, rtol=1e-5)
    assert (after[:, 10:] - before[:, 10:]).abs().max() > 1e-3


def test_documents_of_a_row_see_nothing_of_each_other(checkpoint: Path, tokens: torch.Tensor) -> None:
    model = titan(checkpoint)
    lengths = [(7, 10), (17,), (1, 3, 12)]
    packed, positions = torch.zeros(3, 17, dtype=torch.int64), torch.zeros(3, 17, dtype=torch.int64)
    document = torch.full((3, 17), -1)
    alone: list[tuple[int, int, torch.Tensor]] = []
    for row, documents in enumerate(lengths):
        first = 0
        for number, length in enumerate(documents):
            inside = slice(first, first + length)
            packed[row, inside] = tokens[row + number, :length]
            positions[row, inside] = torch.arange(length)
            document[row, inside] = number
            alone.append((row, first, logits(model, tokens[row + number : row + number + 1, :length])[0]))
            first += length
    with torch.no_grad(), model.spmd():
        together = model.logits(packed, positions=positions, document=document)
    assert together.isfinite().all()
    for row, first, expected in alone:
        torch.testing.assert_close(
            together[row, first : first + len(expected)], expected, atol=1e-6, rtol=1e-5
        )


def test_names_and_weights_go_back_as_they_came(checkpoint: Path) -> None:
    from safetensors.torch import load_file

    stored = load_file(checkpoint / "model.safetensors")
    ours = titan(checkpoint).hf_state_dict()
    assert set(stored) <= set(ours)
    assert set(ours) - set(stored) <= {"lm_head.weight"}  # tied weights are stored once
    for name, tensor in stored.items():
        assert torch.equal(ours[name], tensor), name


def test_a_frozen_model_keeps_no_gradients(checkpoint: Path, tokens: torch.Tensor) -> None:
    assert not any(p.requires_grad for p in titan(checkpoint).module.parameters())
    trainable = titan(checkpoint, trainable=True)
    with trainable.spmd():
        trainable.logits(tokens).square().mean().backward()
    gradients = [p.grad for p in trainable.module.parameters()]
    assert all(gradient is not None for gradient in gradients)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "llama"}, "expected an architecture among qwen3, got 'llama'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "expected plain rotary embeddings"),
    ],
)
def test_what_is_not_supported_is_refused(
    checkpoint: Path, tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=expected):
        titan(tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"a checkpoint with a config\.json"):
        titan(tmp_path)


def test_a_checkpoint_without_weights_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(ModelError, match="cannot load the weights"):
        titan(tmp_path)
