"""Qwen3's shapes with random weights, and batches of random tokens."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from rl_bridge.titan.architecture import Architecture, architecture_of

COMMON: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
KEYS: Final = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "tie_word_embeddings"),
)
SHAPES: Final = {
    size: COMMON | dict(zip(KEYS, values, strict=True))
    for size, values in {
        "0.6B": (1024, 3072, 28, 16, 8, 128, 151_936, True),
        "8B": (4096, 12_288, 36, 32, 8, 128, 151_936, False),
        "tiny": (64, 128, 2, 4, 2, 32, 512, False),
    }.items()
}
"""The config.json of Qwen3's models by size; `tiny` is not a published model."""


def shape_of(size: str, layers: int | None = None) -> Architecture:
    """Return the architecture of a size, with `layers` layers if given."""
    architecture = architecture_of(SHAPES[size], where=size)
    return replace(architecture, layers=layers or architecture.layers)


def tensors(architecture: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of a checkpoint's tensors."""
    queries, keys = architecture.heads * architecture.head_dim, architecture.kv_heads * architecture.head_dim
    yield "model.embed_tokens.weight", (architecture.vocabulary, architecture.dim)
    for layer in range(architecture.layers):
        for name, shape in (
            ("input_layernorm", (architecture.dim,)),
            ("self_attn.q_proj", (queries, architecture.dim)),
            ("self_attn.k_proj", (keys, architecture.dim)),
            ("self_attn.v_proj", (keys, architecture.dim)),
            ("self_attn.o_proj", (architecture.dim, queries)),
            ("self_attn.q_norm", (architecture.head_dim,)),
            ("self_attn.k_norm", (architecture.head_dim,)),
            ("post_attention_layernorm", (architecture.dim,)),
            ("mlp.gate_proj", (architecture.hidden_dim, architecture.dim)),
            ("mlp.up_proj", (architecture.hidden_dim, architecture.dim)),
            ("mlp.down_proj", (architecture.dim, architecture.hidden_dim)),
        ):
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (architecture.dim,)
    if not architecture.tied:
        yield "lm_head.weight", (architecture.vocabulary, architecture.dim)


def random_weights(
    architecture: Architecture, *, device: str, dtype: torch.dtype, seed: int = 0
) -> dict[str, Tensor]:
    """Return random weights at the scale of an initialization; norms are 1."""
    draw = torch.Generator(device).manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in tensors(architecture):
        weights[name] = torch.ones(shape, device=device, dtype=dtype)
        if len(shape) > 1:
            weights[name].normal_(0.0, 0.02 if architecture.dim > 64 else 0.2, generator=draw)
    return weights


def write_checkpoint(
    folder: Path, size: str, *, device: str, dtype: torch.dtype, layers: int | None = None, seed: int = 0
) -> Path:
    """Write a model with random weights in the Hugging Face layout, without a tokenizer."""
    from safetensors.torch import save_file

    architecture = shape_of(size, layers)
    folder.mkdir(parents=True)
    config = SHAPES[size] | {
        "num_hidden_layers": architecture.layers,
        "dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = random_weights(architecture, device=device, dtype=dtype, seed=seed)
    save_file({name: tensor.cpu() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def documents(lengths: list[int], *, vocabulary: int) -> Any:
    """Return a batch of documents of random tokens; the second half of each is in the loss."""
    from rl_bridge.buffer.batch import TrainBatch
    from rl_bridge.types import NO_VERSION, TrainSample

    draw = random.Random(0)
    samples = []
    for number, length in enumerate(lengths):
        mask = [at > length // 2 for at in range(length + 1)]
        samples.append(
            TrainSample(
                tokens=[draw.randrange(vocabulary) for _ in mask],
                loss_mask=mask,
                logprobs=[-5.0 if is_loss_token else 0.0 for is_loss_token in mask],
                versions=[0 if is_loss_token else NO_VERSION for is_loss_token in mask],
                advantage=draw.gauss(0.0, 1.0),
                trajectory=number,
                group=number // 4,
            )
        )
    return TrainBatch.from_samples(samples)
