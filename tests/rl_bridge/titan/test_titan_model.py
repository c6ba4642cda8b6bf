"""TorchTitan's models against transformers' own, from the same checkpoints, one by one and packed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import (
    NAMES,
    POSITIONS,
    VOCABULARY,
    documents,
    every_token,
    load_reference,
    logprobs,
    make_checkpoint,
    model_logprobs,
    rows,
    titan,
)
from torch.utils.flop_counter import FlopCounterMode

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.errors import ConfigError, ModelError
from rl_bridge.titan.ranks import gather_state

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param)


@pytest.fixture(scope="module")
def any_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3")


def test_names_log_probabilities_and_gradients_are_those_of_transformers(checkpoint: Path) -> None:
    from safetensors.torch import load_file

    model, reference, tokens = titan(checkpoint, trainable=True, chunk=7), load_reference(checkpoint), rows()
    stored, state = load_file(checkpoint / "model.safetensors"), model.hf_state_dict()
    assert set(state) == set(stored)  # tied weights are there once
    for name, tensor in stored.items():
        assert torch.equal(state[name], tensor), name

    ours, expected = model_logprobs(model, tokens), logprobs(reference(tokens).logits, tokens)
    assert expected.std() > 0.3, "the checkpoint says nothing, so agreeing with it shows nothing"
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)

    ours.sum().backward()
    expected.sum().backward()
    gradients = gather_state(
        model.adapter.to_hf({name: one.grad for name, one in model.module.named_parameters()})
    )
    theirs = expert_by_expert({name: parameter.grad for name, parameter in reference.named_parameters()})
    assert set(gradients) == set(theirs)
    for name, gradient in theirs.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-4, rtol=1e-4, msg=name)


def expert_by_expert(gradients: dict[str, Any]) -> dict[str, Any]:
    """The gradients under their names in checkpoints: transformers stacks experts, and gate on up, in memory."""
    named: dict[str, Any] = {}
    for name, gradient in gradients.items():
        stem, _, stacked = name.rpartition(".experts.")
        if not stem:
            named[name] = gradient
            continue
        parts = {"gate_proj": 0, "up_proj": 1} if stacked == "gate_up_proj" else {"down_proj": 0}
        for number, of_expert in enumerate(gradient):
            for part, rows_of_part in zip(parts, of_expert.chunk(len(parts)), strict=True):
                named[f"{stem}.experts.{number}.{part}.weight"] = rows_of_part
    return named


def test_a_loss_token_that_is_no_word_is_refused(any_checkpoint: Path) -> None:
    """It would not be noticed: no rank has its row of the output layer."""
    tokens = rows()
    tokens[1, -1] = VOCABULARY
    with pytest.raises(ValueError, match=f"not in the vocabulary of {VOCABULARY}"):
        model_logprobs(titan(any_checkpoint), tokens)


def test_an_output_layer_in_the_file_is_a_copy_where_it_is_tied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3's smaller checkpoints have it beside the embedding. transformers and vLLM use it though it differs."""
    monkeypatch.setattr("rl_bridge.titan.model.ROWS_PER_COMPARISON", VOCABULARY // 4)
    file, tokens = make_checkpoint(tmp_path, "qwen3-tied") / "model.safetensors", rows()
    model = titan(tmp_path)
    store_output_layer(file, change=0.0)
    again = titan(tmp_path)
    assert torch.equal(model_logprobs(again, tokens), model_logprobs(model, tokens))
    assert set(again.hf_state_dict()) == set(model.hf_state_dict())
    store_output_layer(file, change=1.0)
    with torch.no_grad():
        expected = logprobs(load_reference(tmp_path)(tokens).logits, tokens)
    with pytest.raises(ModelError, match=r"lm_head\.weight .* set tie_word_embeddings to false"):
        titan(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    torch.testing.assert_close(model_logprobs(titan(tmp_path), tokens), expected, atol=1e-5, rtol=1e-5)


def store_output_layer(file: Path, *, change: float) -> None:
    """Store it beside the embedding, which it is but for its last row."""
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    head = weights["model.embed_tokens.weight"].clone()
    head[-1] += change
    save_file({**weights, "lm_head.weight": head}, file, metadata={"format": "pt"})


def test_activations_computed_anew_change_no_gradient(any_checkpoint: Path) -> None:
    """How much memory that takes is in test_planned_memory.py; here, that some and then all of it is computed anew."""
    names, gradients, operations, tokens = [], [], [], rows(64, 31)
    for which in ("none", "selective", "full"):
        model = titan(any_checkpoint, trainable=True, activation_checkpointing=which)
        with FlopCounterMode(display=False) as counter:
            model_logprobs(model, tokens).sum().backward()
        names.append(list(model.hf_state_dict()))
        gradients.append([one.grad.full_tensor() for one in model.module.parameters()])
        operations.append(counter.get_total_flops())
    assert names[1] == names[2] == names[0]
    for anew in gradients[1:]:
        torch.testing.assert_close(anew, gradients[0], atol=1e-6, rtol=0.0)
    assert operations[0] < operations[1] < operations[2]


def test_compiled_rows_of_any_shape_need_a_few_graphs_and_have_the_same_gradient(
    any_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the C++ that graphs are made into, which takes minutes: see trainer/test_trainer.py."""
    from torch._dynamo.utils import counters

    from rl_bridge.titan import model as titan_model

    original = titan_model.CompileConfig
    options: list[dict[str, Any]] = [{"enable": False}, {"enable": True, "backend": "aot_eager"}]
    models = []
    for changed in options:
        monkeypatch.setattr(
            titan_model, "CompileConfig", lambda one=changed, **given: original(**given | one)
        )
        models.append(titan(any_checkpoint, trainable=True, compile=True))
    counters.clear()
    whole = documents()
    for contexts in ([0], range(10), [1], [1, 2, 3, 9], range(5)):
        part = whole.take(np.flatnonzero(np.isin(whole.context, list(contexts))))
        (expected, gradients), (found, others) = (passes(model, [part]) for model in models)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0.0)
        for which, gradient in gradients.items():
            torch.testing.assert_close(others[which], gradient, atol=1e-6, rtol=0.0, msg=which)
        with torch.no_grad(), models[1].spmd():
            models[1].outputs(models[1].pack(part))
            models[1].idle()
        models[1].hf_state_dict()  # without a backward pass FSDP has left the last layer whole
    # One length and all others, with a gradient and without.
    assert 0 < counters["stats"]["unique_graphs"] <= 4


def test_without_a_compiler_compiling_is_refused(
    any_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config

    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(ConfigError, match=r"trainer\.compile needs a C\+\+ compiler on .*install g\+\+"):
        titan(any_checkpoint, trainable=True, compile=True)


def test_rows_as_long_as_was_asked_for_and_no_longer(any_checkpoint: Path) -> None:
    model = titan(any_checkpoint, max_length=POSITIONS)
    assert model_logprobs(model, rows(1, POSITIONS + 1)).isfinite().all()
    # Of many layers, positions that no row has take gigabytes.
    assert titan(any_checkpoint, max_length=20).module.layers["0"].attention.rope.cache.shape[0] == 20
    with pytest.raises(
        ConfigError, match=rf"rows of at most {POSITIONS} tokens.*got {POSITIONS + 1}.*max_length"
    ):
        titan(any_checkpoint, max_length=POSITIONS + 1)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = make_checkpoint(tmp_path, "qwen2") / "model.safetensors"
    lacking = load_file(file)
    del lacking["model.layers.1.self_attn.k_proj.bias"]
    save_file(lacking, file)
    with pytest.raises(ModelError, match=r"(?s)cannot load the weights.*k_proj\.bias"):
        titan(tmp_path)


TEMPERATURE = 0.7


def test_packing_changes_neither_log_probabilities_nor_gradients(checkpoint: Path) -> None:
    batch, model = documents(), titan(checkpoint, trainable=True)
    alone = [batch.take(np.flatnonzero(batch.context == one)) for one in range(len(batch.lengths))]
    assert not batch.pack_rows().one_a_row, "nothing was packed"
    assert batch.pack_rows().tokens.shape[0] < 0.6 * len(alone)
    packed, packed_gradients = passes(model, [batch])
    single, single_gradients = passes(model, alone)
    order = np.concatenate([np.flatnonzero(batch.context == one) for one in range(len(alone))])
    assert single.std() > 0.3
    torch.testing.assert_close(packed[order], single, atol=1e-5, rtol=0.0)
    assert max(float(one.abs().max()) for one in single_gradients.values()) > 0.01
    for which, gradient in single_gradients.items():
        torch.testing.assert_close(packed_gradients[which], gradient, atol=1e-5, rtol=0.0, msg=which)


def passes(model: Any, parts: list[TrainBatch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss tokens' log-probabilities, and the gradient of their mean weighted by the advantages."""
    model.module.zero_grad()
    tokens = sum(map(len, parts))
    found = []
    for part in parts:
        with model.spmd():
            chosen = model.outputs(model.pack(part), temperature=TEMPERATURE).logprobs
            (chosen * torch.from_numpy(part.advantages)).sum().div(tokens).backward()
        found.append(chosen.detach())
    gradients = {name: one.grad.full_tensor().clone() for name, one in model.module.named_parameters()}
    return torch.cat(found), gradients


@pytest.mark.parametrize("value_head", [False, True])
def test_operations_are_those_that_torch_counts(any_checkpoint: Path, value_head: bool) -> None:
    model = titan(any_checkpoint, trainable=True, value_head=value_head)
    batch = every_token(rows(3, 21))  # contexts of 20 tokens, a row each: no padding
    with FlopCounterMode(display=False) as counter, model.spmd():
        model.outputs(model.pack(batch)).logprobs.sum().backward()
    one = model._architecture
    # Torch counts neither norms nor a CPU's attention. Of the output layer it counts the logits twice, which are
    # computed again in the backward pass, and leaves out the product that is added in place to the gradient: as much.
    norms = 6 * 60 * one.layers * (2 * one.dim + 2 * one.head_dim)
    attention = 12 * one.layers * one.heads * one.head_dim * 3 * 20 * 20
    assert model.train_flops(batch) - norms - attention == counter.get_total_flops()


def test_flash_attention_that_is_not_installed_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a Hopper GPU, where TorchTitan asks for a package that torch does not bring."""
    from torchtitan.tools import utils

    from rl_bridge.titan.layers import RowAttention, _warn_once

    _warn_once.cache_clear()
    monkeypatch.setattr(utils, "get_cuda_flash_attention_impl", lambda: "FA3")
    assert RowAttention.Config().build().window_size == (-1, 0)
    RowAttention.Config().build()
    assert caplog.text.count("No module named 'flash_attn_interface'") == 1


def test_models_of_one_layout_share_their_meshes(any_checkpoint: Path) -> None:
    """And so their process groups, of which a trainer of PPO would have twice as many."""
    one, critic = titan(any_checkpoint), titan(any_checkpoint, value_head=True)
    assert one.parallel_dims.get_mesh("fsdp") is critic.parallel_dims.get_mesh("fsdp")
    torch.distributed.destroy_process_group()
    assert titan(any_checkpoint).parallel_dims is not one.parallel_dims


def test_further_options_reach_torchtitan_and_what_other_keys_decide_is_refused(
    any_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.config import TrainerOptions
    from rl_bridge.titan import model as titan_model

    seen: dict[str, Any] = {}

    class Noting(titan_model.ParallelDims):  # type: ignore[name-defined,misc]
        @classmethod
        def from_config(cls, parallelism: Any, ranks: int) -> Any:
            seen["parallelism"] = parallelism
            return super().from_config(parallelism, ranks)

    monkeypatch.setattr(titan_model, "ParallelDims", Noting)
    titan(
        any_checkpoint,
        trainable=True,
        options=TrainerOptions(
            parallelism={"fsdp_reshard_after_forward": "never"},
            training={"mixed_precision_reduce": "float32"},
        ),
    )
    assert seen["parallelism"].fsdp_reshard_after_forward == "never"
    for options, name in (
        (TrainerOptions(parallelism={"expert_parallel_degree": 2}), "expert_parallel_degree"),
        (TrainerOptions(parallelism={"tensor_parallel_degree": 2}), "tensor_parallel_degree"),
        (TrainerOptions(training={"no_such_field": 2}), "no_such_field"),
    ):
        with pytest.raises(ConfigError, match=rf"that no other key decides, .*got {name}$"):
            titan(any_checkpoint, trainable=True, options=options)
