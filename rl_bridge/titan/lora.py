"""LoRA (arXiv 2106.09685): low-rank adapters beside frozen weights, added by TorchTitan's converter."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from rl_bridge.config import LoraConfig
from rl_bridge.errors import ModelError
from rl_bridge.titan.definitions import CheckpointNames
from rl_bridge.weights.peft import FACTOR_A, FACTOR_B, PREFIX
from rl_bridge.weights.snapshot import Box, LazySum, State

# After rl_bridge.titan.definitions, which prepares TorchTitan for machines without an accelerator.
from torchtitan.components.lora import LoRAConverter  # isort: skip

TITAN_TARGETS = {
    "q_proj": "wq",
    "k_proj": "wkv",
    "v_proj": "wkv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
"""The name of each target in TorchTitan's configuration; keys and values share one."""
SAMPLE_BYTES = 4096
"""Bytes of each tensor that identify a checkpoint: reading all bytes of a large one would take minutes."""


def with_adapters(config: Any, lora: LoraConfig) -> Any:
    """Return TorchTitan's configuration of a model with adapters in its layers and its own weights frozen."""
    targets = sorted({TITAN_TARGETS[target] for target in lora.targets})
    converter = LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=targets)
    return LoRAConverter(converter).convert(config)


class Adapters:
    """The adapters of a module that was made from `with_adapters` and has no memory yet.

    A is initialized with random numbers from the seed, the same on any number of ranks, and B with zeros.
    """

    def __init__(self, module: Any, lora: LoraConfig, names: CheckpointNames, *, seed: int) -> None:
        self._layers: dict[str, Any] = {}
        generator = torch.Generator().manual_seed(seed)
        for module_name, layer in module.named_modules():
            if not hasattr(layer, "lora_a"):
                continue
            titan_name = f"{module_name}.weight".replace("_checkpoint_wrapped_module.", "")
            (name,) = names.to_hf({titan_name: layer.weight})
            layer.lora_a._param_init = {"weight": partial(_init_factor, generator=generator)}
            if name.split(".")[-2] in lora.targets:
                self._layers[name] = layer
            else:  # only one of keys and values is a target: without a gradient the other's B stays zero
                layer.lora_a.requires_grad_(False)
                layer.lora_b.requires_grad_(False)
        self._scale = lora.alpha / lora.rank

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Disable the adapters within the block."""
        for layer in self._layers.values():
            layer._lora_scaling = 0.0
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer._lora_scaling = self._scale

    def state(self) -> dict[str, Tensor]:
        """Return A and B of each layer under PEFT's names, in the model's sharding and storage."""
        state: dict[str, Tensor] = {}
        for name, layer in self._layers.items():
            stem = PREFIX + name.removesuffix(".weight")
            state[f"{stem}.{FACTOR_A}"] = layer.lora_a.weight.detach()
            state[f"{stem}.{FACTOR_B}"] = layer.lora_b.weight.detach()
        return state

    def merge(self, state: Mapping[str, Tensor]) -> State:
        """Return a state dict with (alpha / rank) B A added to the layers' weights.

        It gathers A and B, so all ranks have to call it.
        """
        factors = {
            name: (_full_tensor(layer.lora_a.weight), _full_tensor(layer.lora_b.weight))
            for name, layer in self._layers.items()
        }
        return {
            name: LazySum(base=value, added=partial(_multiply_factors, *factors[name], self._scale))
            if name in factors
            else value
            for name, value in state.items()
        }


def _init_factor(weight: Tensor, generator: torch.Generator) -> None:
    """Fill a rank's part of A from the distribution of TorchTitan's converter."""
    values = torch.empty(weight.shape)
    torch.nn.init.kaiming_uniform_(values, a=5**0.5, generator=generator)
    if isinstance(weight, DTensor):
        sharded = distribute_tensor(
            values.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None
        )
        weight.to_local().copy_(sharded.to_local())
    else:
        weight.copy_(values)


def _full_tensor(weight: Tensor) -> Tensor:
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()


def _multiply_factors(a: Tensor, b: Tensor, scale: float, box: Box) -> Tensor:
    rows, columns = box.index_in(Box.of_shape((len(b), a.shape[1])))
    return scale * (b[rows] @ a[:, columns])


def checkpoint_identity(path: Path) -> str:
    """Return a hash of a checkpoint's weights, by each tensor's name, dtype, shape and first bytes; not of its path."""
    digests: list[tuple[str, str]] = []
    try:
        for file in sorted(path.glob("*.safetensors")):
            with file.open("rb") as reader:
                length = int.from_bytes(reader.read(8), "little")
                header = json.loads(reader.read(length))
                for name, tensor in header.items():
                    if name == "__metadata__":
                        continue
                    begin, end = tensor["data_offsets"]
                    reader.seek(8 + length + begin)
                    sample = reader.read(min(SAMPLE_BYTES, end - begin))
                    signature = f"{tensor['dtype']}{tensor['shape']}"
                    digests.append((name, signature + hashlib.sha256(sample).hexdigest()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"cannot read the weights at {str(path)!r}: {error}") from error
    return hashlib.sha256(repr(sorted(digests)).encode()).hexdigest()
