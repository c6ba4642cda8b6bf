"""Log-probabilities of tokens from hidden states, without ever holding the logits of all tokens."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float,
    chunk: int,
    entropy_top_k: int | None = None,
    first: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log p(target) and H = -sum_v p_v log p_v, in nats, under softmax(hidden weight^T / temperature).

    With `entropy_top_k` H is that of the most likely tokens alone, whose probabilities are scaled to a sum of 1: the
    clamped entropy of H. Shen, "On Entropy Control in LLM-RL Algorithms", 2025. Their choice has no gradient.

    The backward pass recomputes the logits, chunk by chunk too. A chunk needs at most two float32 tensors of its tokens
    x vocabulary, and a third in the weight's type if that is narrower.

    Args:
        hidden: Hidden state that predicts each token, shape [T, D].
        weight: Weight of the output layer, shape [V, D]; with a `group` the rank's shard of the vocabulary.
        target: The tokens, shape [T].
        temperature: Sampling temperature, which divides the logits.
        chunk: Number of tokens whose logits exist at once.
        entropy_top_k: How many tokens H is computed over; None: the whole vocabulary.
        first: Token id of the weight's first row.
        group: The ranks that share the vocabulary. Each rank's gradient of `hidden` covers its shard: sum them.

    Returns:
        Log-probabilities and entropies, each float32 of shape [T].
    """
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target, temperature, chunk, entropy_top_k, first, group
    )
    return result


class _TokenLogprobs(torch.autograd.Function):
    """d log p(t) / dz_v = [v = t] - p_v and dH / dz_v = -p_v (log p_v + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: float,
        chunk: int,
        entropy_top_k: int | None,
        first: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        top_index, top_slope = (
            hidden.new_empty(len(hidden), entropy_top_k or 0, dtype=dtype)
            for dtype in (torch.int64, torch.float32)
        )
        logprobs, entropy, normaliser = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for rows in _iterate_chunks(len(hidden), chunk):
            logits = _compute_logits(hidden[rows], weight, temperature)
            max_logits = _reduce_over_ranks(logits.amax(-1), group, dist.ReduceOp.MAX)
            index, is_local = _local_index(target[rows].unsqueeze(-1), first, len(weight))
            target_logits, total, weighted = _reduce_over_ranks(
                _shard_sums(logits.sub_(max_logits.unsqueeze(-1)), index, is_local), group, dist.ReduceOp.SUM
            )
            if entropy_top_k is not None:
                top_logits, top_index[rows] = _select_top(logits, entropy_top_k, first, group)
            del logits  # before the next chunk's are allocated
            log_total = total.log()
            logprobs[rows], normaliser[rows] = target_logits - log_total, max_logits + log_total
            if entropy_top_k is None:
                entropy[rows] = log_total - weighted / total
            else:
                top_logprobs = torch.log_softmax(top_logits, dim=-1)
                entropy[rows] = -(top_logprobs.exp() * top_logprobs).sum(-1)
                top_slope[rows] = -top_logprobs.exp() * (top_logprobs + entropy[rows].unsqueeze(-1))
        ctx.save_for_backward(hidden, weight, target, normaliser, entropy, top_index, top_slope)
        ctx.temperature, ctx.chunk, ctx.first = temperature, chunk, first
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, target, normaliser, entropy, top_index, top_slope = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # A frozen layer needs no gradient, which would be as large as the layer.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in _iterate_chunks(len(hidden), ctx.chunk):
            grad_logits = _compute_logits(hidden[rows], weight, ctx.temperature).sub_(
                normaliser[rows].unsqueeze(-1)
            )
            grad_target = torch.zeros_like(normaliser[rows]) if grad_logprobs is None else grad_logprobs[rows]
            if grad_entropy is None or top_index.shape[-1]:
                grad_logits.exp_().mul_(-grad_target.unsqueeze(-1))
            else:
                powers = grad_logits.exp()
                grad_logits.add_(entropy[rows].unsqueeze(-1)).mul_(-grad_entropy[rows].unsqueeze(-1))
                grad_logits.sub_(grad_target.unsqueeze(-1)).mul_(powers)
                del powers
            index, is_local = _local_index(target[rows].unsqueeze(-1), ctx.first, len(weight))
            grad_logits.scatter_add_(-1, index, grad_target.unsqueeze(-1) * is_local)
            if grad_entropy is not None and top_index.shape[-1]:
                index, is_local = _local_index(top_index[rows], ctx.first, len(weight))
                grad_logits.scatter_add_(
                    -1, index, grad_entropy[rows].unsqueeze(-1) * top_slope[rows] * is_local
                )
            grad_cast = grad_logits.div_(ctx.temperature).to(weight.dtype)
            del grad_logits
            grad_hidden[rows] = grad_cast @ weight
            if grad_weight is None:
                pass
            elif weight.dtype == torch.float32:
                grad_weight.addmm_(grad_cast.T, hidden[rows])
            else:
                grad_weight += grad_cast.T @ hidden[rows]
            del grad_cast
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _iterate_chunks(count: int, chunk: int) -> Iterator[slice]:
    return (slice(first, first + chunk) for first in range(0, count, chunk))


def _compute_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Return logits, float32 of shape [chunk, the rank's shard of the vocabulary]."""
    return (hidden @ weight.T).float().div_(temperature)


def _shard_sums(logits: Tensor, index: Tensor, is_local: Tensor) -> Tensor:
    """Return z_t, sum_v e^z_v and sum_v e^z_v z_v over a rank's shard, shape [3, chunk]."""
    target_logits = torch.where(is_local, logits.gather(-1, index), 0.0).squeeze(-1)
    powers = logits.exp()
    total = powers.sum(-1)
    return torch.stack([target_logits, total, powers.mul_(logits).sum(-1)])


def _local_index(target: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the index of each target in a rank's shard and whether it is there, both of shape [chunk, targets]."""
    index = target - first
    is_local = (index >= 0) & (index < count)
    return torch.where(is_local, index, 0), is_local


def _select_top(
    logits: Tensor, count: int, first: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the largest logits over all ranks' shards and their token ids, each of shape [chunk, count]."""
    top, index = logits.topk(min(count, logits.shape[-1]), dim=-1)
    index = index + first
    if group is None:
        return top, index
    # Shards may differ by a row, so a rank of a tiny vocabulary fills up with what is never chosen.
    missing = (0, count - top.shape[-1])
    top, index = F.pad(top, missing, value=-math.inf).contiguous(), F.pad(index, missing).contiguous()
    tops, indices = (
        [torch.empty_like(part) for _ in range(dist.get_world_size(group))] for part in (top, index)
    )
    dist.all_gather(tops, top, group=group)
    dist.all_gather(indices, index, group=group)
    top, place = torch.cat(tops, dim=-1).topk(count, dim=-1)
    return top, torch.cat(indices, dim=-1).gather(-1, place)


def _reduce_over_ranks(values: Tensor, group: dist.ProcessGroup | None, operation: Any) -> Tensor:
    if group is not None:
        dist.all_reduce(values, op=operation, group=group)
    return values
