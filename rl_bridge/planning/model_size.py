"""How large a model is, from its checkpoint's folder: config.json is enough."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from rl_bridge.errors import ModelError

DENSE: Final = ("llama", "qwen2", "qwen3")
"""Architectures whose parameters can be counted by their config.json alone."""
INDEX: Final = "model.safetensors.index.json"


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelSize:
    """How large a model is.

    Attributes:
        parameters: How many; a tied output layer is counted once.
        vocabulary: Entries; None where only the number of parameters is known.
        cached_per_token: Numbers that the key-value cache keeps of each token, over all layers; None likewise.
        output_layer: Parameters of the output layer that are no others' too: none of a tied one; None likewise.
        width: Of the hidden state; None likewise.
    """

    parameters: int
    vocabulary: int | None = None
    cached_per_token: int | None = None
    output_layer: int | None = None
    width: int | None = None

    @property
    def critic_parameters(self) -> int:
        """Of a critic with this body: one number a token in place of logits. All of them where only those are known."""
        if self.output_layer is None or self.width is None:
            return self.parameters
        return self.parameters - self.output_layer + self.width

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Read it off a checkpoint in the Hugging Face layout.

        Weights are looked at only where the configuration does not say it: some may be missing, or quantised.

        Raises:
            ModelError: There is no config.json that says it, or a file of weights is none.
        """
        config = _config(folder)
        try:
            tied, width = bool(config.get("tie_word_embeddings")), config["hidden_size"]
            heads = config["num_attention_heads"]
            head = config.get("head_dim") or width // heads
            kv_heads = config.get("num_key_value_heads") or heads
            return cls(
                parameters=(
                    _counted(config, head, heads, kv_heads)
                    if config.get("model_type") in DENSE
                    else _stored(folder, config.get("model_type"))
                ),
                vocabulary=config["vocab_size"],
                cached_per_token=2 * config["num_hidden_layers"] * kv_heads * head,
                output_layer=0 if tied else config["vocab_size"] * width,
                width=width,
            )
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ModelError(
                f"expected the config.json of a language model in {str(folder)!r}, it does not say {error}"
            ) from error


def parse_count(text: str) -> int:
    """A number of parameters as people write it: 8030261248, 8e9, 8B, 1.7b, 350M.

    Raises:
        ValueError: It is none.
    """
    factor = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:].lower())
    number = float(text if factor is None else text[:-1]) * (factor or 1.0)
    if not (math.isfinite(number) and number >= 1):
        raise ValueError(f"expected a number of parameters such as 8B or 8e9, got {text!r}")
    return round(number)


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"expected a checkpoint with a config.json at {str(folder)!r}: {error}; "
            "without one say how large the model is by --parameters"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"expected an object in the config.json at {str(folder)!r}, got {config!r:.100}")
    return config


def _stored(folder: Path, kind: object) -> int:
    """Numbers in the files of weights."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"expected the weights, or an architecture among {', '.join(DENSE)} to count by its config.json, "
            f"got {kind!r}; say how large the model is by --parameters"
        )
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        missing = sorted(set(index["weight_map"].values()) - {file.name for file in files})
    except OSError:
        missing = []  # it is in one file
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"expected the names of the files of weights in {str(folder / INDEX)!r}: {error!r}"
        ) from error
    if missing:
        raise ModelError(
            f"expected all files of weights that {INDEX} names at {str(folder)!r}, {len(missing)} are missing, "
            f"{missing[0]} among them; say how large the model is by --parameters"
        )
    return sum(map(_numbers_in, files))


def _numbers_in(file: Path) -> int:
    """Of a file of safetensors, by its header: a length of 8 bytes, then JSON."""
    try:
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError) as error:
        raise ModelError(f"expected a file of safetensors at {str(file)!r}, got: {error!r}") from error


def _counted(config: Mapping[str, Any], head: int, heads: int, kv_heads: int) -> int:
    """Embedding, layers, last norm, and the output layer unless it is the embedding."""
    kind = config["model_type"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = heads * head, kv_heads * head
    layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner + 2 * hidden
    if kind == "qwen2" or config.get("attention_bias"):
        layer += queries + 2 * keys + (hidden if config.get("attention_bias") else 0)
    if kind == "qwen3":
        layer += 2 * head  # norms of queries and keys
    tables = 1 if config.get("tie_word_embeddings") else 2
    parameters: int = tables * config["vocab_size"] * hidden + config["num_hidden_layers"] * layer + hidden
    return parameters
