"""The architecture of a checkpoint, read from its config.json."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rl_bridge.errors import ModelError

T = TypeVar("T")

SUPPORTED = ("llama", "qwen2", "qwen3")
"""The `model_type` of each architecture that can be trained. Qwen2.5's is qwen2, Llama 3's is llama."""
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
    """A decoder: pre-norm blocks of grouped-query attention and a gated feed-forward network.

    Attributes:
        dim: The size of the hidden state.
        hidden_dim: The hidden size of the feed-forward network.
        norm_eps: Added to the mean square in RMS norms.
        positions: The greatest length, in tokens.
        rope_scaling: None for plain rotary embeddings.
        tied: Whether the embedding is also the output layer.
        qkv_bias: Whether queries, keys and values have a bias (Qwen2).
        qk_norm: Whether queries and keys are normalized per head (Qwen3).
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

    @property
    def layer_parameters(self) -> int:
        """The number of parameters of one block, norms and biases included."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = 2 * self.dim * (queries + keys) + 3 * self.dim * self.hidden_dim
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
        products = self.layers * self.layer_parameters * tokens
        if output_layer:
            products += self.output_parameters * loss_tokens
        attention = 12.0 * self.layers * self.heads * self.head_dim * squares
        return (4.0 if frozen else 6.0) * products + attention


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
        hidden_dim=_require_key(config, "intermediate_size", int, where),
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
        qk_norm=family == "qwen3",
    )


def _refuse_unsupported_settings(config: Mapping[str, Any], where: str) -> None:
    """Raise ModelError for settings that change the model's output and are not supported here."""
    supported = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "quantization_config": None,
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
