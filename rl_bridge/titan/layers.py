"""Replacements of TorchTitan's layers: attention within documents, rotary embeddings, and the last layer."""

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

# TorchTitan assumes CUDA on a machine without an accelerator; its other modules read this on import.
if not torch.cuda.is_available():
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention
from torchtitan.models.common.moe import GroupedExperts

logger = logging.getLogger(__name__)


class BlockMask(NamedTuple):
    """The keys that each block of a single row's queries attends to.

    Attributes:
        columns: The columns of each block's keys, shape [blocks, K].
        bias: 0 where a query attends to a key, and -inf elsewhere, shape [blocks, 1, Q, K].
    """

    columns: Tensor
    bias: Tensor


class DocumentAttention(ScaledDotProductAttention):
    """Causal scaled dot-product attention; with a mask within documents, or along the branches of a forest.

    Of TorchTitan's own alternatives for documents, flex attention has no backward pass on a CPU, and varlen attention
    no kernel.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        """The configuration, without options of its own."""

    def forward(
        self,
        q_BLNH: Tensor,  # noqa: N803 - TorchTitan calls it by these names
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: Tensor | BlockMask | None = None,
        **options: Any,
    ) -> Tensor:
        """Compute attention over [B, L, N, H] with a mask of shape [B, 1, L, L], or causal attention without one.

        With a `BlockMask`, B is 1, and its blocks take the place of rows.
        """
        if attention_masks is None:
            output: Tensor = super().forward(q_BLNH, k_BLNH, v_BLNH, **options)
            return output
        scale, mask = options.get("scale"), attention_masks
        if isinstance(mask, BlockMask):
            query = q_BLNH.reshape(len(mask.columns), -1, *q_BLNH.shape[2:])
            key, value = (_gather_blocks(one, mask.columns) for one in (k_BLNH, v_BLNH))
            mask = mask.bias
        else:
            query, key, value = q_BLNH, k_BLNH, v_BLNH
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        # On GPUs the only kernel with a mask and shared keys materializes all scores, so keys are repeated per head.
        shares_keys = isinstance(attention_masks, BlockMask) and query.device.type == "cpu"
        if not shares_keys:
            repeats = query.shape[1] // key.shape[1]
            key, value = (one.repeat_interleave(repeats, dim=1) for one in (key, value))
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=shares_keys
        )
        return output.transpose(1, 2).reshape(q_BLNH.shape)


def _gather_blocks(values: Tensor, columns: Tensor) -> Tensor:
    """Return each block's keys or values, shape [blocks, K, N, H], of those of one row, shape [1, L, N, H].

    An embedding's gradient is the fastest sum over copies on a CPU.
    """
    return F.embedding(columns, values[0].flatten(1)).view(*columns.shape, *values.shape[2:])


class Experts(GroupedExperts):
    """TorchTitan's experts of a layer, in the dtype that the model computes in: TorchTitan's are always in bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """The same as TorchTitan's."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:  # noqa: N803
        """Compute each expert's outputs of its tokens, which follow each other in `x_RD`, shape [R, D]."""
        if x_RD.dtype == torch.bfloat16:
            output: Tensor = super().forward(x_RD, num_tokens_per_expert_E)
            return output
        w1, w2, w3 = (
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        parts = torch.split(x_RD, num_tokens_per_expert_E.tolist())
        outputs = [
            F.linear(F.silu(F.linear(x, w1[expert])) * F.linear(x, w3[expert]), w2[expert])
            for expert, x in enumerate(parts)
        ]
        return torch.cat(outputs)


class RowAttention(VarlenAttention):
    """TorchTitan's attention over the documents of one row, for which only CUDA has a kernel, in bfloat16.

    TorchTitan requires FlashAttention 3 on Hopper and 4 on Blackwell, which are separate packages. If they are not
    installed, this falls back to torch's own FlashAttention 2.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """The same as TorchTitan's."""

    def __init__(self, config: Config) -> None:
        try:
            super().__init__(config)
        except (ImportError, RuntimeError) as error:  # TorchTitan's constructor raises at its very end
            _warn_once(str(error))


@cache
def _warn_once(reason: str) -> None:
    """Log the warning once rather than for every layer."""
    logger.warning("attention by torch's own FlashAttention 2: %s", reason)


def document_mask(document: Tensor) -> Tensor:
    """Return a mask, shape [B, 1, L, L], that is true for a token itself and earlier tokens of its document.

    Args:
        document: The document of each token, shape [B, L].
    """
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return torch.tril(same).unsqueeze(1)


class HalvesRoPE(CosSinRoPE):
    """Rotary embeddings over the halves of a head, as in checkpoints, with Llama 3's scaling.

    TorchTitan has that scaling only for `ComplexRoPE`, which rotates neighbouring dimensions: a checkpoint's rows would
    have to be permuted, which is impossible for shards that may end within a head.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """The same as for both of TorchTitan's classes."""

    def _precompute_cache(self) -> Tensor:
        if self.config.scaling != "llama":
            cache: Tensor = super()._precompute_cache()
            return cache
        rotations = ComplexRoPE._precompute_cache(self)  # it only uses the configuration
        return torch.cat([rotations.real, rotations.real, rotations.imag, rotations.imag], dim=-1)


@dataclass(kw_only=True, slots=True, frozen=True)
class LossTokens:
    """The targets of the last layer in a pass.

    Attributes:
        row: The row of the hidden state that predicts each loss token, shape [T].
        column: The column of that hidden state, shape [T].
        target: The loss tokens, shape [T].
        temperature: Divides the logits.
        chunk: The number of tokens whose logits are in memory at once.
        entropy_top_k: The number of most likely tokens whose entropy is computed; None: the whole vocabulary.
    """

    row: Tensor
    column: Tensor
    target: Tensor
    temperature: float
    chunk: int
    entropy_top_k: int | None = None


class TokenOutputs(NamedTuple):
    """The outputs of loss tokens, each float32 and of shape [T].

    Attributes:
        logprobs: Each token's log-probability under the distribution that the engine samples from; for a critic, the
            value of the state before the token.
        entropy: The entropy of that distribution, or of its most likely tokens, in nats; None for a critic.
    """

    logprobs: Tensor
    entropy: Tensor | None


class OutputLayer(Linear):
    """TorchTitan's output layer for loss tokens only; `loss_tokens` must be set to those of the next pass.

    It runs within the model's forward pass, so that FSDP gathers its weights once for all chunks. Each tensor-parallel
    rank has a part of the vocabulary, and ranks exchange only sums.
    """

    loss_tokens: LossTokens

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """The same as TorchTitan's."""

    def forward(self, input: Tensor) -> TokenOutputs:  # noqa: A002 - TorchTitan calls it so
        """Compute the outputs from hidden states, shape [B, L, D]."""
        loss_tokens, weight = self.loss_tokens, self.weight
        first, group = 0, None
        if isinstance(weight, DTensor):
            _, (first, _) = compute_local_shape_and_global_offset(
                weight.shape, weight.device_mesh, weight.placements
            )
            group, weight = weight.device_mesh.get_group(), weight.to_local()
        if isinstance(input, DTensor):  # each rank's gradient is that of its part of the vocabulary
            input = input.to_local(grad_placements=[Partial()])  # noqa: A001
        logprobs, entropy = token_logprobs(
            input[loss_tokens.row, loss_tokens.column],
            weight,
            loss_tokens.target,
            temperature=loss_tokens.temperature,
            chunk=loss_tokens.chunk,
            entropy_top_k=loss_tokens.entropy_top_k,
            first=first,
            group=group,
        )
        return TokenOutputs(logprobs, entropy)


class ValueHead(Linear):
    """A linear layer with one number per token in place of logits, replicated on tensor-parallel ranks."""

    loss_tokens: LossTokens

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """The same as TorchTitan's."""

    def forward(self, input: Tensor) -> TokenOutputs:  # noqa: A002 - TorchTitan calls it so
        """Compute the values from hidden states, shape [B, L, D]."""
        hidden = input.to_local() if isinstance(input, DTensor) else input
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        selected = hidden[self.loss_tokens.row, self.loss_tokens.column]
        return TokenOutputs((selected @ weight[0]).float(), None)
