"""Contexts whose common prefixes are computed once: the same outputs and gradients as those computed apart."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import VOCABULARY, make_checkpoint, titan
from torch import Tensor
from train_samples import train_sample

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.config import LoraConfig

pytestmark = pytest.mark.heavy


def forest(seed: int) -> TrainBatch:
    """A random forest: each row continues a beginning of an earlier one, or none; loss tokens anywhere but first."""
    random = np.random.default_rng(seed)
    rows: list[list[int]] = [random.integers(0, VOCABULARY, 12).tolist()]
    for _ in range(48):
        earlier = rows[int(random.integers(len(rows)))]
        kept = int(random.integers(0, len(earlier) + 1))
        rows.append(
            [*earlier[:kept], *random.integers(0, VOCABULARY, int(random.integers(1, 6))).tolist()][:30]
        )
    samples = []
    for number, row in enumerate(row for row in rows if len(row) > 1):
        mask = random.random(len(row)) < random.choice([0.0, 0.2, 0.8])  # some have no loss token
        mask[0] = False
        advantage = float(random.normal())
        samples.append(train_sample(row, mask.tolist(), advantage=advantage, trajectory=number))
    return replace(TrainBatch.from_samples(samples), shares_prefixes=True)


def outputs_of(model: Any, parts: list[TrainBatch]) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Values and entropies of loss tokens, and the gradient of a sum with a weight of its own for each."""
    model.module.zero_grad()
    found, entropies = [], []
    for part in parts:
        with model.spmd():
            outputs = model.outputs(model.pack(part), temperature=0.7)
            loss = (outputs.logprobs * torch.from_numpy(part.advantages)).sum()
            if outputs.entropy is not None:
                loss = loss + 0.1 * outputs.entropy.sum()
                entropies.append(outputs.entropy.detach())
            loss.backward()
        found.append(outputs.logprobs.detach())
    gradients = {
        name: getattr(one.grad, "full_tensor", one.grad.clone)().clone()
        for name, one in model.module.named_parameters()
        if one.grad is not None
    }
    return torch.cat(found), torch.cat(entropies) if entropies else None, gradients


@pytest.mark.parametrize("kind", ["policy", "critic", "adapters", "recomputed"])
@pytest.mark.parametrize("seed", range(2))
def test_outputs_and_gradients_are_those_of_separate_contexts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    monkeypatch.setattr("rl_bridge.buffer.forest.MIN_BLOCK", 7)
    options: dict[str, dict[str, Any]] = {
        "policy": {},
        "critic": {"value_head": True},
        "adapters": {"lora": LoraConfig(rank=3)},
        "recomputed": {"activation_checkpointing": "full"},
    }
    name = ["qwen3", "llama-stretched"][seed]
    model = titan(make_checkpoint(tmp_path, name), trainable=True, **options[kind])
    if kind == "critic":
        with torch.no_grad():
            model.module.state_dict()["lm_head.weight"].to_local().normal_()
    batch = forest(seed)
    rows = model.pack(batch)
    assert rows.blocks is not None
    assert rows.blocks.columns.shape[0] > 3
    assert rows.valid == batch.computed.sum() < 0.7 * batch.lengths.sum()
    apart = [batch.take(np.flatnonzero(batch.context == one)) for one in range(len(batch.lengths))]
    order = np.concatenate([np.flatnonzero(batch.context == one) for one in range(len(apart))])
    values, entropies, gradients = outputs_of(model, [batch])
    expected, expected_entropies, expected_gradients = outputs_of(model, apart)
    assert expected.std() > 0.3
    torch.testing.assert_close(values[order], expected, atol=1e-5, rtol=1e-5)
    if entropies is not None and expected_entropies is not None:
        torch.testing.assert_close(entropies[order], expected_entropies, atol=1e-5, rtol=1e-5)
    largest = max(float(one.abs().max()) for one in expected_gradients.values())
    assert set(gradients) == set(expected_gradients)
    for which, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[which], gradient, atol=1e-5 * largest, rtol=0.0, msg=which)
    assert model.train_flops(batch) < 0.8 * sum(model.train_flops(one) for one in apart)


def test_rows_of_the_mask_are_aligned_so_that_layers_share_it_on_a_gpu(tmp_path: Path) -> None:
    """There torch otherwise pads a copy in every layer, which is kept for the backward pass."""
    model = titan(make_checkpoint(tmp_path, "qwen3"), trainable=True)
    seen: list[Any] = []
    model.module.register_forward_pre_hook(
        lambda module, args, options: seen.append(options["attention_masks"]), with_kwargs=True
    )
    outputs_of(model, [forest(seed) for seed in range(3)])
    for mask in seen:
        *strides, last = mask.bias.stride()
        assert last == 1
        assert not any(stride % 8 for stride in strides)
    assert any(mask.bias.shape[-1] % 8 for mask in seen), "all were aligned by chance"


@pytest.mark.parametrize("seed", range(5))
def test_attention_in_float64_is_that_of_separate_contexts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only layer in which tokens meet; all others compute each token by itself."""
    from rl_bridge.titan.layers import BlockMask, DocumentAttention

    monkeypatch.setattr("rl_bridge.buffer.forest.MIN_BLOCK", 5)
    batch, attention = forest(seed), DocumentAttention.Config().build()
    rows = batch.pack_rows()
    assert rows.blocks is not None
    hidden = torch.from_numpy(~rows.blocks.visible).unsqueeze(1)
    bias = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill_(hidden, -torch.inf)
    mask = BlockMask(torch.from_numpy(rows.blocks.columns), bias)
    torch.manual_seed(seed)
    length = rows.tokens.size
    query, key, value = (
        torch.randn(1, length, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    output = attention(query, key, value, attention_masks=mask)
    weights = torch.randn(len(batch), 4, 8, dtype=torch.float64)
    at = torch.from_numpy(rows.column)
    found = torch.autograd.grad((output[0, at] * weights).sum(), (query, key, value))
    total = torch.zeros((), dtype=torch.float64)
    columns = context_columns(batch)
    assert set(np.concatenate(columns)) == set(range(rows.valid))
    for number, own in enumerate(columns):
        alone = attention(query[:, own], key[:, own], value[:, own], enable_gqa=True)
        tokens = np.flatnonzero(batch.context == number)
        total = total + (alone[0, batch.position[tokens]] * weights[tokens]).sum()
    for gradient, expected in zip(found, torch.autograd.grad(total, (query, key, value)), strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-10 * float(expected.abs().max()), rtol=0.0)


def context_columns(batch: TrainBatch) -> list[np.ndarray[Any, Any]]:
    """The columns of each context's tokens: where a loss token at each of its positions would be predicted."""
    every = np.concatenate([np.arange(length) for length in batch.lengths])
    context = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    target = np.zeros(len(every), dtype=np.int64)
    rows = TrainBatch(
        tokens=batch.tokens,
        lengths=batch.lengths,
        context=context,
        position=every,
        target=target,
        old_logprobs=target.astype(np.float32),
        versions=target,
        advantages=target.astype(np.float32),
        trajectory=target,
        group=target,
        rewards=target.astype(np.float32),
        index=target,
        total=len(every),
        shares_prefixes=True,
    ).pack_rows()
    return np.split(rows.column, np.cumsum(batch.lengths)[:-1])
