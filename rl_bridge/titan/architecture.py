"""The architecture of a checkpoint, read from its config.json."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rl_bridge.config import LoraConfig, ParallelConfig
from rl_bridge.errors import ConfigError, ModelError

T = TypeVar("T")

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""The `model_type` of each architecture that can be trained. Qwen2.5's is qwen2, Llama 3's is llama."""
MIXTURE = "qwen3_moe"
FEED_FORWARD_TARGETS = frozenset({"gate_proj", "up_proj", "down_proj"})
_DEFAULT_THETA = 10_000.0


@dataclass(kw_only=True, slots=True, frozen=True)
class RotaryScaling:
    """The scaling of rotary embeddings by Llama 3.1 and later; the names are those of config.json.

    Rotations with a wavelength above `original_max_position_embeddings / low_freq_factor` are slowed down by `factor`;
    those below `original_max_position_embeddings / high_freq_factor` are unchanged; between the two the scaling is
    interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Architecture:
    """A decoder: pre-norm blocks of grouped-query attention and a gated feed-forward network, or a mixture of them.

    Attributes:
        dim: The size of the hidden state.
        hidden_dim: The hidden size of the feed-forward network, or of each expert.
        norm_eps: Added to the mean square in RMS norms.
        positions: The greatest length, in tokens.
        rope_scaling: None for plain rotary embeddings.
        tied: Whether the embedding is also the output layer.
        qkv_bias: Whether queries, keys and values have a bias (Qwen2).
        qk_norm: Whether queries and keys are normalized per head (Qwen3).
        experts: The number of feed-forward networks in a block among which a router chooses; 0 without a router.
        experts_per_token: The number of them that each token is sent to.
        norm_routes: Whether the weights of those add up to 1.
    """

    family: str
    dim: int
    hidden_dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    norm_eps: float
    positions: int
    rope_theta: float
    rope_scaling: RotaryScaling | None
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    experts: int = 0
    experts_per_token: int = 0
    norm_routes: bool = False

    @property
    def layer_parameters(self) -> int:
        """The number of parameters of one block, norms and biases included."""
        return self._count_layer(self.experts or 1)

    @property
    def expert_parameters(self) -> int:
        """The number of parameters of all experts of one block; 0 without any."""
        return 3 * self.dim * self.hidden_dim * self.experts

    @property
    def active_layer_parameters(self) -> int:
        """The number of parameters of one block that a token meets: those of the experts it is sent to."""
        return self._count_layer(self.experts_per_token or 1)

    def _count_layer(self, networks: int) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        router = self.dim * self.experts
        matrices = 2 * self.dim * (queries + keys) + 3 * self.dim * self.hidden_dim * networks + router
        norms = 2 * self.dim + (2 * self.head_dim if self.qk_norm else 0)
        return matrices + norms + (queries + 2 * keys if self.qkv_bias else 0)

    @property
    def output_parameters(self) -> int:
        """The number of parameters of the output layer, which is the embedding if they are tied."""
        return self.vocabulary * self.dim

    @property
    def parameters(self) -> int:
        """The number of parameters of the model; a tied embedding is counted once."""
        tables = 1 if self.tied else 2
        return tables * self.output_parameters + self.layers * self.layer_parameters + self.dim

    def train_flops(
        self,
        lengths: Sequence[int],
        loss_tokens: int,
        *,
        computed: Sequence[int] | None = None,
        output_layer: bool = True,
        frozen: bool = False,
    ) -> float:
        """Return the model's floating-point operations in a forward and backward pass, as for model FLOPs utilization.

        Each token takes 6 per parameter, and 12 x layers x heads x head_dim x tokens of its document for attention,
        without a discount for the causal mask (PaLM, Chowdhery et al. 2022, appendix B; TorchTitan counts likewise).
        Recomputation to save memory is not counted. The output layer is applied to loss tokens only, and not in a
        critic. Frozen weights need no gradient, which saves 2 per parameter; adapters are not counted. `computed` are
        the tokens of each document that are computed, if others are shared with a document before it; None for all.
        """
        tokens, squares = 0, 0
        for length, count in zip(lengths, lengths if computed is None else computed, strict=True):
            tokens, squares = tokens + count, squares + count * length
        products = self.layers * self.active_layer_parameters * tokens
        if output_layer:
            products += self.output_parameters * loss_tokens
        attention = 12.0 * self.layers * self.heads * self.head_dim * squares
        return (4.0 if frozen else 6.0) * products + attention


def require_layout(
    architecture: Architecture, parallel: ParallelConfig, ranks: int, lora: LoraConfig | None = None
) -> None:
    """Raise ConfigError if the trainer's ranks cannot be laid out as configured, or cannot share this model so."""
    try:
        parallel.require_ranks(ranks)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    experts, tp, ep = architecture.experts, parallel.tp, parallel.ep
    for heads, kind in ((architecture.heads, "attention heads"), (architecture.kv_heads, "key-value heads")):
        if heads % tp:
            raise ConfigError(f"expected trainer.parallel.tp to divide the model's {heads} {kind}, got {tp}")
    if experts % ep or (ep > 1 and not experts):
        raise ConfigError(
            f"expected trainer.parallel.ep to divide the model's {experts} experts of a layer, got {ep}; "
            "a model without experts has 1"
        )
    if experts and tp > 1 and ep == 1:
        raise ConfigError(
            f"expected trainer.parallel.ep above 1 with tp of {tp}: experts are divided whole, over ep ranks; "
            "set ep to tp, or to a multiple of it"
        )
    spread, width = ranks // parallel.hsdp, architecture.hidden_dim
    for rows, kind in ((architecture.vocabulary, "vocabulary"), (0 if experts else width, "hidden size")):
        if not fsdp_parts_match_dtensors(rows, tp, spread // tp):
            raise ConfigError(
                f"expected FSDP's {spread // tp} parts of what each of {tp} tensor-parallel ranks has of a {kind} of "
                f"{rows} to be those that PyTorch's DTensors describe, they are not; set trainer.parallel.tp to a "
                f"divisor of {rows}, such as 1, or raise trainer.parallel.hsdp until fsdp is at most 2"
            )
    # With more ranks than experts FSDP divides each expert by its hidden size, and only evenly.
    if spread > experts > 0 and width % (spread // ep):
        raise ConfigError(
            f"expected FSDP's {spread // ep} parts of an expert to divide its hidden size of {width}, with {spread} "
            f"ranks for {experts} experts; change trainer.parallel, or the number of ranks"
        )
    if lora is not None and experts and (targets := sorted({*lora.targets} & FEED_FORWARD_TARGETS)):
        raise ConfigError(
            f"expected model.lora.targets of attention alone for a mixture of experts, got {', '.join(targets)}: "
            "experts have no adapters; set model.lora.targets=[q_proj,k_proj,v_proj,o_proj]"
        )


def fsdp_parts_match_dtensors(rows: int, tp: int, fsdp: int) -> bool:
    """Whether FSDP's parts of a tensor that tensor parallelism divides by its rows have the sizes that DTensors assume.

    FSDP divides what each tensor-parallel rank has. A DTensor (`_StridedShard`) takes what one FSDP rank has of all of
    them together as divided over tensor-parallel ranks, which is another division if the rows are uneven: of 33 over 2
    and then 4 ranks, the last FSDP rank has 2 + 4 rows, and a DTensor assumes 3 + 3. Weights, checkpoints and
    publications would be read at the wrong place.
    """
    parts = [_chunk_sizes(own, fsdp) for own in _chunk_sizes(rows, tp)]
    return all(list(sizes) == _chunk_sizes(sum(sizes), tp) for sizes in zip(*parts, strict=True))


def _chunk_sizes(rows: int, chunks: int) -> list[int]:
    """Return the sizes of `torch.chunk`'s chunks, and 0 for those that it leaves out."""
    size = -(-rows // chunks)
    return [max(0, min(size, rows - index * size)) for index in range(chunks)]


def read_hf_config(path: Path) -> dict[str, Any]:
    """Return the parsed config.json of a checkpoint; ModelError if it is missing or no JSON object."""
    try:
        config: Any = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it is no JSON object but of type {type(config).__name__}")
    except (OSError, ValueError) as error:  # invalid UTF-8 and invalid JSON both raise ValueErrors
        raise ModelError(f"expected a checkpoint with a config.json at {str(path)!r}: {error}") from error
    return config


def read_architecture(path: Path) -> Architecture:
    """Return the architecture of the checkpoint in a folder; ModelError if it is missing or not supported."""
    return architecture_of(read_hf_config(path), where=str(path))


def architecture_of(config: Mapping[str, Any], *, where: str) -> Architecture:
    """Return the architecture in a parsed config.json as written by transformers 4 or 5; ModelError likewise."""
    family = config.get("model_type")
    if family not in SUPPORTED:
        raise ModelError(
            f"expected an architecture among {', '.join(SUPPORTED)}, got {family!r} at {where!r}"
        )
    _refuse_unsupported_settings(config, where)
    dim = _require_key(config, "hidden_size", int, where)
    heads = _require_key(config, "num_attention_heads", int, where)
    theta, scaling = _read_rotary(config, where)
    return Architecture(
        family=family,
        dim=dim,
        hidden_dim=_require_key(
            config, "moe_intermediate_size" if family == MIXTURE else "intermediate_size", int, where
        ),
        layers=_require_key(config, "num_hidden_layers", int, where),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or dim // heads,
        vocabulary=_require_key(config, "vocab_size", int, where),
        norm_eps=_require_key(config, "rms_norm_eps", float, where),
        positions=_require_key(config, "max_position_embeddings", int, where),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(config.get("tie_word_embeddings")),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", MIXTURE),
        **(_read_experts(config, where) if family == MIXTURE else {}),
    )


def _read_experts(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {
        # transformers 5 writes num_local_experts, where version 4 wrote num_experts.
        "experts": config.get("num_local_experts") or _require_key(config, "num_experts", int, where),
        "experts_per_token": _require_key(config, "num_experts_per_tok", int, where),
        "norm_routes": bool(config.get("norm_topk_prob")),
    }


def _refuse_unsupported_settings(config: Mapping[str, Any], where: str) -> None:
    """Raise ModelError for settings that change the model's output and are not supported here."""
    supported = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "quantization_config": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise ModelError(f"expected {key} to be {value!r}, got {config[key]!r} at {where!r}")


def _read_rotary(config: Mapping[str, Any], where: str) -> tuple[float, RotaryScaling | None]:
    # transformers 5 writes rope_parameters; version 4 wrote rope_theta and rope_scaling separately.
    rope = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta", _DEFAULT_THETA),
        **(config.get("rope_scaling") or {}),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"expected rotary embeddings of whole heads, got parts of them at {where!r}")
    theta = float(rope.get("rope_theta", _DEFAULT_THETA))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(
            f"expected rotary embeddings that are plain or stretched as Llama 3's are, got {kind!r} at {where!r}"
        )
    return theta, RotaryScaling(
        factor=_require_key(rope, "factor", float, where),
        low_freq_factor=_require_key(rope, "low_freq_factor", float, where),
        high_freq_factor=_require_key(rope, "high_freq_factor", float, where),
        original_max_position_embeddings=_require_key(rope, "original_max_position_embeddings", int, where),
    )


def _require_key(config: Mapping[str, Any], key: str, kind: type[T], where: str) -> T:
    value = config.get(key)
    if kind is float and isinstance(value, int):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ModelError(
            f"expected {key} in config.json to be of type {kind.__name__}, got {value!r} at {where!r}"
        )
    return value
