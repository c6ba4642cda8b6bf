"""TorchTitan's model definitions for the supported architectures, with the sizes of a checkpoint."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rl_bridge.titan.architecture import Architecture
from rl_bridge.titan.layers import (
    DocumentAttention,
    Experts,
    HalvesRoPE,
    OutputLayer,
    RowAttention,
    ValueHead,
)
from rl_bridge.weights.snapshot import StackItem

# isort: split
# After layers, which prepares TorchTitan for machines without an accelerator.
import spmd_types as spmd
from torchtitan.models.common import Embedding, RMSNorm
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_router_config,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.sharding import ShardingConfig

# Every parameter is read from the checkpoint, so none needs to be initialized first.
_FROM_CHECKPOINT = dict.fromkeys(("weight", "bias", "w1_EFD", "w2_EDF", "w3_EFD"), skip_param_init)

VALUE_HEAD = "score.weight"


@dataclass(kw_only=True, slots=True, frozen=True)
class Definition:
    """TorchTitan's classes of a model and of its blocks, each with a `Config`, and its parallelization function."""

    model: Any
    block: Any
    parallelize: Callable[..., Any]


class TiedDecoder(Decoder):
    """A decoder whose tied embedding and output layer stay one parameter when tensor parallelism shards them.

    TorchTitan shards each by itself and ties them again only after FSDP has wrapped two. Where a rank's part of the
    vocabulary is smaller than the first rank's, FSDP pads it in a buffer of its own for each, and the one that the
    optimizer does not update stays at its first values.
    """

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard the layers over tensor-parallel ranks; FSDP comes after."""
        super().parallelize(parallel_dims)
        if self.enable_weight_tying:
            self.tok_embeddings.weight = self.lm_head.weight


class LlamaDecoder(TiedDecoder, Llama3Model):
    """TorchTitan's Llama."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        """The same as TorchTitan's."""


class Qwen3Decoder(TiedDecoder, Qwen3Model):
    """TorchTitan's Qwen3."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        """The same as TorchTitan's."""


# Qwen2 is Llama's block with a bias in the first projections.
_LLAMA = Definition(model=LlamaDecoder, block=Llama3TransformerBlock, parallelize=parallelize_llama)
_QWEN3 = Definition(model=Qwen3Decoder, block=Qwen3TransformerBlock, parallelize=parallelize_qwen3)
DEFINITIONS = {"llama": _LLAMA, "qwen2": _LLAMA, "qwen3": _QWEN3, "qwen3_moe": _QWEN3}


class CheckpointNames(Qwen3StateDictAdapter):
    """Translates state dicts to the names in checkpoints of any supported architecture.

    The names are the same in all of them except for Qwen2's biases. Tensors are unchanged: `HalvesRoPE` makes the
    permutation of TorchTitan's adapter for Llama unnecessary. Experts, which TorchTitan stacks, become items of their
    stack, whatever its sharding. A value head has the name used in checkpoints for classification, such as reward
    models.
    """

    def __init__(self, config: Any, *, value_head: bool) -> None:
        super().__init__(config, None)
        if value_head:
            self.from_hf_map[VALUE_HEAD] = self.from_hf_map.pop("lm_head.weight")
        for projection in "qkv":
            self.from_hf_map[f"model.layers.{{}}.self_attn.{projection}_proj.bias"] = (
                f"layers.{{}}.attention.qkv_linear.w{projection}.bias"
            )
        self._stacks = {titan: name for name, titan in self.from_hf_map.items() if "experts" in name}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict under the names in checkpoints, in the same order."""
        state: dict[str, Any] = {}
        for name, value in state_dict.items():
            layer = re.search(r"\d+", name)
            pattern = layer and self._stacks.get(name.replace(layer[0], "{}", 1))
            if layer is not None and pattern:
                for index in range(len(value)):
                    state[pattern.format(layer[0], index)] = StackItem(stack=value, index=index)
            else:
                state |= super().to_hf({name: value})
        return state


def model_config(
    architecture: Architecture, *, max_length: int, value_head: bool, in_one_row: bool = False
) -> Any:
    """Make TorchTitan's configuration of a model with rows of at most `max_length` tokens.

    A value head replaces logits by one number per token, zero until it is trained or loaded. `in_one_row` selects the
    GPU attention kernel that takes the document boundaries within one row.
    """
    spec, dim = architecture, architecture.dim
    last_layer = (
        ValueHead.Config(in_features=dim, out_features=1, param_init={"weight": torch.nn.init.zeros_})
        if value_head
        else OutputLayer.Config(in_features=dim, out_features=spec.vocabulary, param_init=_FROM_CHECKPOINT)
    )
    return DEFINITIONS[spec.family].model.Config(
        vocab_size=spec.vocabulary,
        dim=dim,
        norm=_make_norm(spec, dim),
        enable_weight_tying=spec.tied and not value_head,
        tok_embeddings=Embedding.Config(
            num_embeddings=spec.vocabulary, embedding_dim=dim, param_init=_FROM_CHECKPOINT
        ),
        lm_head=last_layer,
        layers=[_make_layer(spec, max_length, in_one_row) for _ in range(spec.layers)],
    )


def shard_last_layer(config: Any, *, value_head: bool) -> None:
    """Shard the vocabulary over tensor-parallel ranks, or replicate a value head on them."""
    placement = dense_param_placement(tp=spmd.R if value_head else spmd.S(0))
    config.lm_head.sharding_config = ShardingConfig(state_shardings={"weight": placement})


def _make_layer(architecture: Architecture, max_length: int, in_one_row: bool) -> Any:
    scaling: dict[str, Any] = {}
    if architecture.rope_scaling is not None:
        names = asdict(architecture.rope_scaling)
        scaling = {"scaling": "llama", "scaling_factor": names.pop("factor"), **names}
    attention = make_gqa_config(
        dim=architecture.dim,
        n_heads=architecture.heads,
        n_kv_heads=architecture.kv_heads,
        head_dim=architecture.head_dim,
        wqkv_param_init=_FROM_CHECKPOINT,
        wo_param_init=_FROM_CHECKPOINT,
        inner_attention=RowAttention.Config() if in_one_row else DocumentAttention.Config(),
        fuse_qkv=False,  # a fused one is gathered on every rank for each state dict
        rope=HalvesRoPE.Config(
            dim=architecture.head_dim, max_seq_len=max_length, theta=architecture.rope_theta, **scaling
        ),
        qk_norm=_make_norm(architecture, architecture.head_dim) if architecture.qk_norm else None,
    )
    attention.qkv_linear.wq.bias = attention.qkv_linear.wkv.bias = architecture.qkv_bias
    return DEFINITIONS[architecture.family].block.Config(
        attention_norm=_make_norm(architecture, architecture.dim),
        ffn_norm=_make_norm(architecture, architecture.dim),
        attention=attention,
        **(_make_experts(architecture) if architecture.experts else _make_feed_forward(architecture)),
    )


def _make_feed_forward(architecture: Architecture) -> dict[str, Any]:
    return {
        "feed_forward": make_ffn_config(
            dim=architecture.dim,
            hidden_dim=architecture.hidden_dim,
            w1_param_init=_FROM_CHECKPOINT,
            w2w3_param_init=_FROM_CHECKPOINT,
        )
    }


def _make_experts(architecture: Architecture) -> dict[str, Any]:
    """Make the mixture of a block, without TorchTitan's bias for an even load, which checkpoints lack."""
    dim, experts, top_k = architecture.dim, architecture.experts, architecture.experts_per_token
    router = make_router_config(
        dim=dim,
        num_experts=experts,
        gate_param_init=_FROM_CHECKPOINT,
        top_k=top_k,
        score_func="softmax",
        route_norm=architecture.norm_routes,
    )
    routed = RoutedExperts.Config(
        inner_experts=Experts.Config(
            dim=dim, hidden_dim=architecture.hidden_dim, num_experts=experts, param_init=_FROM_CHECKPOINT
        ),
        token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=experts, top_k=top_k),
    )
    mixture = make_moe_config(
        num_experts=experts, router=router, routed_experts=routed, load_balance_coeff=None
    )
    return {"moe": mixture}


def _make_norm(architecture: Architecture, size: int) -> Any:
    return RMSNorm.Config(normalized_shape=size, eps=architecture.norm_eps, param_init=_FROM_CHECKPOINT)
