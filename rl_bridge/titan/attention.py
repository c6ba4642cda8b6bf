"""Attention for rows of several documents, on any device."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

import rl_bridge.titan.devices  # noqa: F401 - before TorchTitan's modules

# isort: split
from torchtitan.models.common.attention import ScaledDotProductAttention


class DocumentAttention(ScaledDotProductAttention):
    """Scaled dot-product attention, causal, and kept within documents where a mask says which.

    TorchTitan offers language models flex and varlen attention; the former has no backward pass on a CPU,
    the latter no kernel.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        """Without options."""

    def forward(
        self,
        q_BLNH: Tensor,  # noqa: N803 - TorchTitan calls it by these names
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Attention over [B, L, N, H], under a mask of shape [B, 1, L, L] or a causal one without."""
        if attention_masks is None:
            plain: Tensor = super().forward(q_BLNH, k_BLNH, v_BLNH, **options)
            return plain
        # On GPUs the one kernel that takes a mask and shared keys keeps every score, so each head gets keys of its own.
        shared = q_BLNH.shape[2] // k_BLNH.shape[2]
        return F.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k_BLNH.transpose(1, 2).repeat_interleave(shared, dim=1),
            v_BLNH.transpose(1, 2).repeat_interleave(shared, dim=1),
            attn_mask=attention_masks,
            scale=options.get("scale"),
        ).transpose(1, 2)


def document_mask(document: Tensor) -> Tensor:
    """True where a token may look: at itself, and at what came before it in its own document.

    Args:
        document: Which document each token belongs to, shape [B, L].

    Returns:
        Shape [B, 1, L, L].
    """
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return torch.tril(same).unsqueeze(1)
