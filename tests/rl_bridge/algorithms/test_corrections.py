"""Weights against the engine's mismatch, by hand."""

import pytest
import torch

from rl_bridge.algorithms.corrections import (
    Correction,
    correction_weights,
    decoupled_weights,
    icepop_weights,
    truncated_weights,
)

# pi_old / mu: 0.4, 0.5, 1, 3, 5, 6.
LOG_RATIOS = torch.tensor([0.4, 0.5, 1.0, 3.0, 5.0, 6.0]).log()


def test_truncated() -> None:
    assert truncated_weights(LOG_RATIOS, cap=2.0).tolist() == pytest.approx([0.4, 0.5, 1.0, 2.0, 2.0, 2.0])


def test_icepop() -> None:
    # Within [0.45, 5.5] the ratio itself, nothing outside.
    assert icepop_weights(LOG_RATIOS, low=0.45, high=5.5).tolist() == pytest.approx(
        [0.0, 0.5, 1.0, 3.0, 5.0, 0.0]
    )


def test_decoupled() -> None:
    assert decoupled_weights(LOG_RATIOS).tolist() == pytest.approx([0.4, 0.5, 1.0, 3.0, 5.0, 6.0])


@pytest.mark.parametrize(
    ("correction", "weights", "bounded"),
    [
        ("none", [1.0] * 6, [False] * 6),
        ("decoupled", [0.4, 0.5, 1.0, 3.0, 5.0, 6.0], [False] * 6),
        ("truncated", [0.4, 0.5, 1.0, 3.0, 4.0, 4.0], [False, False, False, False, True, True]),
        ("icepop", [0.0, 0.0, 1.0, 3.0, 5.0, 0.0], [True, True, False, False, False, True]),
    ],
)
def test_by_name(correction: Correction, weights: list[float], bounded: list[bool]) -> None:
    found, changed = correction_weights(
        LOG_RATIOS.clone().requires_grad_(), correction, cap=4.0, low=0.7, high=5.5
    )
    assert found.tolist() == pytest.approx(weights)
    assert changed.tolist() == bounded
    assert not found.requires_grad
