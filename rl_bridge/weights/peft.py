"""PEFT's format of adapters: names, `adapter_config.json`, `adapter_model.safetensors`."""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rl_bridge.config import LoraConfig

PREFIX = "base_model.model."
"""The prefix of names; the layer's name in the checkpoint and the factor's follow."""
FACTOR_A, FACTOR_B = "lora_A.weight", "lora_B.weight"
"""The factors' names, of shapes [rank, in] and [out, rank]."""


def write_adapter(folder: Path, state: Mapping[str, Tensor], lora: LoraConfig, *, base: str) -> None:
    """Write whole factors, under PEFT's names, into a folder that PEFT and vLLM load as an adapter of `base`."""
    from safetensors.torch import save_file  # importers of the names alone do not need it

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: value.cpu().contiguous() for name, value in state.items()}
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
