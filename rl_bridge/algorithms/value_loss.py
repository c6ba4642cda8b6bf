"""How far a critic is off."""

import torch
from torch import Tensor


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float | None) -> Tensor:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2; without c the first alone.

    The clip is of the implementation that came with arXiv 1707.06347: a value does not go on moving away from what it
    was when the advantages were computed.

    Args:
        values: With gradient, shape [T].
        returns: What they should be, shape [T].
        old_values: What they were before the iteration's first update, shape [T].
        clip: c.

    Returns:
        Shape [T].
    """
    loss = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns).square())
    return 0.5 * loss
