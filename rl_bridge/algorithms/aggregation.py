"""From a loss per token to one number, as a weight per token.

Every aggregation in use is linear, so it is a weight per token, and the loss is the weighted sum. The
weights are computed once over a whole batch; micro-batches and data-parallel ranks then simply add up.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


def token_weights(
    sequences: NDArray[np.int64], *, aggregation: Aggregation, max_length: int
) -> NDArray[np.float32]:
    """The weight of each loss token in a batch.

    - `token_mean`: 1 / (tokens of the batch). DAPO, arXiv 2503.14476, section 3.3.
    - `sequence_mean`: 1 / (sequences x tokens of the own sequence). GRPO, arXiv 2402.03300, equation 3.
    - `fixed_length`: 1 / (sequences x max_length). Dr. GRPO, arXiv 2503.20783, section 3.2.

    Args:
        sequences: Which sequence (trajectory) each loss token belongs to, shape [T].
        aggregation: One of the above.
        max_length: The longest a sequence may become, in loss tokens; used by `fixed_length` alone.

    Returns:
        Shape [T].
    """
    if not sequences.size:
        return np.zeros(0, dtype=np.float32)
    _, index, counts = np.unique(sequences, return_inverse=True, return_counts=True)
    if aggregation == "token_mean":
        weights = np.full(sequences.size, 1.0 / sequences.size)
    elif aggregation == "sequence_mean":
        weights = 1.0 / (len(counts) * counts[index])
    else:
        weights = np.full(sequences.size, 1.0 / (len(counts) * max_length))
    return weights.astype(np.float32)
