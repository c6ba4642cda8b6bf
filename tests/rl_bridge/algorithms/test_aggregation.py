"""Each aggregation on sequences of unequal length."""

import numpy as np
import pytest

from rl_bridge.algorithms.aggregation import token_weights

# Three tokens of trajectory 4, one of trajectory 9. Losses 1, 2, 3 and 10.
SEQUENCES = np.array([4, 4, 9, 4])
LOSSES = np.array([1.0, 2.0, 10.0, 3.0])


def test_token_mean() -> None:
    weights = token_weights(SEQUENCES, aggregation="token_mean", max_length=8)
    assert weights.tolist() == [0.25, 0.25, 0.25, 0.25]
    assert weights @ LOSSES == pytest.approx(4.0)  # 16 / 4


def test_sequence_mean() -> None:
    weights = token_weights(SEQUENCES, aggregation="sequence_mean", max_length=8)
    # Two sequences: 1 / (2 * 3) and 1 / (2 * 1).
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 2, 1 / 6])
    assert weights @ LOSSES == pytest.approx(6.0)  # the mean of 2 and 10


def test_fixed_length() -> None:
    weights = token_weights(SEQUENCES, aggregation="fixed_length", max_length=8)
    assert weights.tolist() == [1 / 16] * 4  # 1 / (2 sequences * 8), however many tokens there are
    assert weights @ LOSSES == pytest.approx(1.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_nothing_weighs_nothing(aggregation: str) -> None:
    empty = np.zeros(0, dtype=np.int64)
    weights = token_weights(empty, aggregation=aggregation, max_length=8)  # type: ignore[arg-type]
    assert weights.shape == (0,)
    assert weights.dtype == np.float32
