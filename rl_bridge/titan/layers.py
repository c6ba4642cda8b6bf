"""Layers of our own in place of some of TorchTitan's: attention by document, rotary embeddings, the last layer."""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
import torchtitan.tools.utils as titan_utils
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_bridge.algorithms.logprobs import token_logprobs

# TorchTitan takes a machine without an accelerator for one with CUDA; its other modules read this on import.
if not torch.cuda.is_available():
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention

logger = logging.getLogger(__name__)


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


class RowAttention(VarlenAttention):
    """TorchTitan's attention over the documents of one row, which CUDA alone has a kernel for, in bfloat16.

    On Hopper TorchTitan asks for FlashAttention 3, on Blackwell for 4, which are packages of their own. Where they are
    not installed, FlashAttention 2 does, which torch brings.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """As for TorchTitan's."""

    def __init__(self, config: Config) -> None:
        try:
            super().__init__(config)
        except (ImportError, RuntimeError) as error:  # it is the last thing that TorchTitan's does
            _warn_once(str(error))


@cache
def _warn_once(reason: str) -> None:
    """Every layer would say so."""
    logger.warning("attention by torch's own FlashAttention 2: %s", reason)


def document_mask(document: Tensor) -> Tensor:
    """True where a token may look: at itself, and at what came before it in its own document. Shape [B, 1, L, L].

    Args:
        document: Which document each token belongs to, shape [B, L].
    """
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return torch.tril(same).unsqueeze(1)


class HalvesRoPE(CosSinRoPE):
    """Rotary embeddings as checkpoints have them, by the halves of a head, with Llama 3's stretching too.

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


@dataclass(kw_only=True, slots=True, frozen=True)
class LossTokens:
    """The targets of the last layer in a pass.

    Attributes:
        row: Where the hidden state is from which each loss token is predicted, shape [T]; `column` likewise.
        target: The loss tokens, shape [T].
        temperature: Divides the logits.
        chunk: How many tokens have logits at once.
    """

    row: Tensor
    column: Tensor
    target: Tensor
    temperature: float
    chunk: int


class TokenOutputs(NamedTuple):
    """The outputs of loss tokens, each float32 and of shape [T].

    Attributes:
        logprobs: Of each under the distribution that the engine sampled it from; of a critic the value of what came
            before it.
        entropy: Of that distribution, in nats; None of a critic.
    """

    logprobs: Tensor
    entropy: Tensor | None


class OutputLayer(Linear):
    """TorchTitan's output layer for loss tokens alone, which the next pass names by `wanted`.

    It is called within the model's forward pass, so that FSDP gathers its weights once for all chunks. Tensor-parallel
    ranks have a part of the vocabulary each, and tell each other sums alone.
    """

    wanted: LossTokens

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """As for TorchTitan's."""

    def forward(self, input: Tensor) -> TokenOutputs:  # noqa: A002 - TorchTitan calls it so
        """From hidden states, shape [B, L, D]."""
        wanted, weight = self.wanted, self.weight
        first, group = 0, None
        if isinstance(weight, DTensor):
            _, (first, _) = compute_local_shape_and_global_offset(
                weight.shape, weight.device_mesh, weight.placements
            )
            group, weight = weight.device_mesh.get_group(), weight.to_local()
        if isinstance(input, DTensor):  # of which each rank's gradient is that of its part of the vocabulary
            input = input.to_local(grad_placements=[Partial()])  # noqa: A001
        logprobs, entropy = token_logprobs(
            input[wanted.row, wanted.column],
            weight,
            wanted.target,
            temperature=wanted.temperature,
            chunk=wanted.chunk,
            first=first,
            group=group,
        )
        return TokenOutputs(logprobs, entropy)


class ValueHead(Linear):
    """One number a token in place of logits. Every tensor-parallel rank has all of it."""

    wanted: LossTokens

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """As for TorchTitan's."""

    def forward(self, input: Tensor) -> TokenOutputs:  # noqa: A002 - TorchTitan calls it so
        """From hidden states, shape [B, L, D]."""
        hidden = input.to_local() if isinstance(input, DTensor) else input
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        chosen = hidden[self.wanted.row, self.wanted.column]
        return TokenOutputs((chosen @ weight[0]).float(), None)
