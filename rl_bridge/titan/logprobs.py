"""Log-probabilities of loss tokens under a model."""

import torch
from torch import Tensor

from rl_bridge.buffer.batch import PackedRows, TrainBatch
from rl_bridge.titan.model import TitanModel


def log_distributions(model: TitanModel, batch: TrainBatch, *, temperature: float) -> Tensor:
    """The normalised log-probabilities over the vocabulary at every loss token.

    Logits are divided by the sampling temperature, so that the result is the distribution that the
    engine sampled from.

    Args:
        model: The policy or the reference.
        batch: Its contexts go through the model in one pass; take micro-batches of larger ones.
        temperature: Of the sampling.

    Returns:
        float32, shape [T, V].
    """
    return rows_log_distributions(
        model, batch.packed(multiple_of=model.row_multiple), temperature=temperature
    )


def rows_log_distributions(model: TitanModel, rows: PackedRows, *, temperature: float) -> Tensor:
    """The same for contexts that have been laid out in rows already."""
    return torch.log_softmax(model.outputs_before(rows) / temperature, dim=-1)
