"""Rotary embeddings as Hugging Face checkpoints have them, stretched or not."""

from dataclasses import dataclass

import torch
from torch import Tensor

import rl_bridge.titan.devices  # noqa: F401 - before TorchTitan's modules

# isort: split
from torchtitan.models.common import ComplexRoPE, CosSinRoPE


class HalvesRoPE(CosSinRoPE):
    """Turns the halves of a head against each other, with Llama 3's stretching too.

    TorchTitan has that for `ComplexRoPE` alone, which turns neighbours: the rows of a checkpoint would have to be
    permuted, and shards of them, which may end within a head, cannot be.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """As for both of TorchTitan's."""

    def _precompute_cache(self) -> Tensor:
        if self.config.scaling != "llama":
            plain: Tensor = super()._precompute_cache()
            return plain
        turns = ComplexRoPE._precompute_cache(self)  # it needs the configuration alone
        return torch.cat([turns.real, turns.real, turns.imag, turns.imag], dim=-1)
