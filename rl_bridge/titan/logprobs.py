"""Log-probabilities of loss tokens under a model."""

import torch
from torch import Tensor

from rl_bridge.buffer.batch import TrainBatch
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
    tokens = torch.from_numpy(batch.contexts).long().to(model.device)
    logits = model.logits(tokens)
    context = torch.from_numpy(batch.context).to(model.device)
    position = torch.from_numpy(batch.position).to(model.device)
    return torch.log_softmax(logits[context, position].float() / temperature, dim=-1)
