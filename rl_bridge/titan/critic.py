"""A critic: the body of a policy with one number a token in place of logits."""

from pathlib import Path

import torch
from torch import Tensor

from rl_bridge.buffer.batch import PackedRows, TrainBatch
from rl_bridge.titan.model import ONE_RANK, Parallelism, TitanDecoder


class CriticModel(TitanDecoder):
    """Says what return is to be expected, token by token.

    Its body begins with a checkpoint's weights. Its last layer, the value head, begins with those of a reward model
    (`score.weight`, as transformers writes models for classification with one label), where the checkpoint is one, and
    else with zeros: every value is then 0 until it has been trained.

    Args:
        path: As for `TitanDecoder`, like all that follows; the checkpoint may be the policy's own.
        dtype: What the forward pass computes in.
        max_length: The longest row, in tokens.
        device: Where it computes.
        spread: Over the process group.
        trainable: False keeps no gradients.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str,
        max_length: int,
        device: torch.device,
        spread: Parallelism = ONE_RANK,
        trainable: bool = True,
    ) -> None:
        super().__init__(
            path,
            dtype=dtype,
            max_length=max_length,
            trainable=trainable,
            device=device,
            spread=spread,
            outputs=1,
        )

    def values(
        self, tokens: Tensor, *, positions: Tensor | None = None, document: Tensor | None = None
    ) -> Tensor:
        """The value of having come to each token and to none behind it, shape [B, L]. See `outputs`."""
        return self.outputs(tokens, positions=positions, document=document).squeeze(-1)


def token_values(critic: CriticModel, batch: TrainBatch) -> Tensor:
    """The value of the state in which each loss token was chosen: of what came before it.

    Args:
        critic: Its `spmd` context has to be entered, as for log-probabilities.
        batch: Its contexts go through the model in one pass; take micro-batches of larger ones.

    Returns:
        float32, shape [T].
    """
    return rows_values(critic, batch.packed(multiple_of=critic.row_multiple))


def rows_values(critic: CriticModel, rows: PackedRows) -> Tensor:
    """The same for contexts that have been laid out in rows already."""
    return critic.outputs_before(rows).squeeze(-1)
