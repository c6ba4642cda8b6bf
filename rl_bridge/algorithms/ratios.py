"""How much likelier a token, or a whole sequence, has become."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def sequence_means(values: NDArray[np.float32], sequences: NDArray[np.int64]) -> NDArray[np.float32]:
    """The mean over its own sequence, at each token.

    Of log-ratios it is the logarithm of GSPO's sequence ratio s = (pi(y) / pi_old(y))^(1 / |y|), arXiv 2507.18071,
    equation 7: the geometric mean of the token ratios.

    Args:
        values: Shape [T].
        sequences: Which sequence (trajectory) each token belongs to, shape [T].

    Returns:
        Shape [T].
    """
    _, index, counts = np.unique(sequences, return_inverse=True, return_counts=True)
    sums = np.bincount(index, weights=values, minlength=len(counts))
    means: NDArray[np.float32] = (sums / counts)[index].astype(np.float32)
    return means


def sequence_ratios(logprobs: Tensor, sequence_log_ratios: Tensor) -> Tensor:
    """The sequence's ratio at each of its tokens, with the sequence's gradient once it is summed over the tokens.

    stop(s) pi / stop(pi): GSPO-token, arXiv 2507.18071, equation 14, whose value and gradient are those of the sequence
    ratio where the tokens share an advantage. So tokens of one sequence may be in different passes, on different ranks.

    Args:
        logprobs: Under the policy being trained, with gradient, shape [T].
        sequence_log_ratios: From `sequence_means`, under the same weights, shape [T].
    """
    return torch.exp(sequence_log_ratios + logprobs - logprobs.detach())
