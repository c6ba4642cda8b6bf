"""Whether a checkpoint's output layer is its embedding, where its config.json says so."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
ROWS_AT_ONCE = 4096
"""Of the two that are compared: both whole would be gigabytes beside the model."""


def has_another_output_layer(path: Path) -> bool:
    """Whether the files hold an output layer that is not equal to the embedding.

    Engines compare the two and believe the files; TorchTitan believes config.json and never looks at it.

    Args:
        path: A checkpoint's folder. It has been loaded, so the embedding is there.
    """
    with ExitStack() as files:
        found: dict[str, Any] = {}
        for file in sorted(path.glob("*.safetensors")):
            weights = files.enter_context(safe_open(file, framework="pt"))
            there = set(weights.keys()) & {EMBEDDING, OUTPUT}
            found |= {name: weights.get_slice(name) for name in there}
        if OUTPUT not in found:
            return False
        one, other = found[EMBEDDING], found[OUTPUT]
        if one.get_shape() != other.get_shape():
            return True
        return not all(
            torch.equal(
                one[first : first + ROWS_AT_ONCE].float(), other[first : first + ROWS_AT_ONCE].float()
            )
            for first in range(0, one.get_shape()[0], ROWS_AT_ONCE)
        )
