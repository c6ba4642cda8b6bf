"""Log-probabilities of tokens from hidden states, without ever holding the logits of all tokens."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float,
    chunk: int,
    first: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log p(target) and H = -sum_v p_v log p_v, in nats, under softmax(hidden weight^T / temperature).

    The backward pass recomputes the logits, chunk by chunk too. A chunk needs at most two float32 tensors of its tokens
    x vocabulary, and a third in the weight's type if that is narrower.

    Args:
        hidden: Hidden state that predicts each token, shape [T, D].
        weight: Weight of the output layer, shape [V, D]; with a `group` the rank's shard of the vocabulary.
        target: The tokens, shape [T].
        temperature: Sampling temperature, which divides the logits.
        chunk: Number of tokens whose logits exist at once.
        first: Token id of the weight's first row.
        group: The ranks that share the vocabulary. Each rank's gradient of `hidden` covers its shard: sum them.

    Returns:
        Log-probabilities and entropies, each float32 of shape [T].
    """
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target, temperature, chunk, first, group
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
        first: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, normaliser = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for rows in _parts(len(hidden), chunk):
            logits = _logits(hidden[rows], weight, temperature)
            top = _over_ranks(logits.amax(-1), group, dist.ReduceOp.MAX)
            place, own = _local(target[rows], first, len(weight))
            chosen, total, weighted = _over_ranks(
                _sums(logits.sub_(top.unsqueeze(-1)), place, own), group, dist.ReduceOp.SUM
            )
            del logits  # before the next chunk's are allocated
            log_total = total.log()
            logprobs[rows], normaliser[rows] = chosen - log_total, top + log_total
            entropy[rows] = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, target, normaliser, entropy)
        ctx.temperature, ctx.chunk, ctx.first = temperature, chunk, first
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, target, normaliser, entropy = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        # A frozen layer needs no gradient, which would be as large as the layer.
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in _parts(len(hidden), ctx.chunk):
            of_logits = _logits(hidden[rows], weight, ctx.temperature).sub_(normaliser[rows].unsqueeze(-1))
            chosen = torch.zeros_like(normaliser[rows]) if of_logprobs is None else of_logprobs[rows]
            if of_entropy is None:
                of_logits.exp_().mul_(-chosen.unsqueeze(-1))
            else:
                powers = of_logits.exp()
                of_logits.add_(entropy[rows].unsqueeze(-1)).mul_(-of_entropy[rows].unsqueeze(-1))
                of_logits.sub_(chosen.unsqueeze(-1)).mul_(powers)
                del powers
            place, own = _local(target[rows], ctx.first, len(weight))
            of_logits.scatter_add_(-1, place, (chosen * own).unsqueeze(-1))
            narrow = of_logits.div_(ctx.temperature).to(weight.dtype)
            del of_logits
            of_hidden[rows] = narrow @ weight
            if of_weight is None:
                pass
            elif weight.dtype == torch.float32:
                of_weight.addmm_(narrow.T, hidden[rows])
            else:
                of_weight += narrow.T @ hidden[rows]
            del narrow
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return of_hidden, of_weight, None, None, None, None, None


def _parts(count: int, chunk: int) -> Iterator[slice]:
    return (slice(first, first + chunk) for first in range(0, count, chunk))


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Return logits, float32 of shape [chunk, the rank's shard of the vocabulary]."""
    return (hidden @ weight.T).float().div_(temperature)


def _sums(logits: Tensor, place: Tensor, own: Tensor) -> Tensor:
    """Return z_t, sum_v e^z_v and sum_v e^z_v z_v over a rank's shard, shape [3, chunk]."""
    chosen = torch.where(own, logits.gather(-1, place).squeeze(-1), 0.0)
    powers = logits.exp()
    total = powers.sum(-1)
    return torch.stack([chosen, total, powers.mul_(logits).sum(-1)])


def _local(target: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the index of each target in a rank's shard, shape [chunk, 1], and whether it is there, shape [chunk]."""
    place = target - first
    own = (place >= 0) & (place < count)
    return torch.where(own, place, 0).unsqueeze(-1), own


def _over_ranks(values: Tensor, group: dist.ProcessGroup | None, operation: Any) -> Tensor:
    if group is not None:
        dist.all_reduce(values, op=operation, group=group)
    return values
