"""Figures of a step, by hand."""

from typing import Any

import pytest
import torch

from rl_bridge.config import AlgorithmConfig
from rl_bridge.trainer.figures import FigureAccumulator, figures_of, shown_figures

ALWAYS = {
    "loss/ratio_mean",
    "loss/clip_fraction_low",
    "loss/clip_fraction_high",
    "policy/entropy",
    "mismatch/kl",
    "train/valid_token_share",
}


def per_token(*ratio: float, **others: list[float]) -> dict[str, torch.Tensor]:
    zeros = [0.0] * len(ratio)
    names = {"ratio": list(ratio), "logprob_difference": zeros, **others}
    return {name: torch.tensor(values) for name, values in names.items()}


def logged(accumulator: FigureAccumulator, shown: frozenset[str]) -> dict[str, float]:
    return figures_of(accumulator.sums, accumulator.largest, shown=shown)


def test_means_over_passes_of_unequal_size() -> None:
    accumulator = FigureAccumulator()
    accumulator.add(
        per_token(
            1.0, 2.0, 3.0, clipped_low=[1, 0, 0], entropy=[0.5, 0.5, 2.0], logprob_difference=[0.2, -0.4, 1.0]
        ),
        fresh=torch.tensor([True, True, False]),
    )
    accumulator.add(per_token(6.0, clipped_high=[1], logprob_difference=[0.3]), fresh=torch.tensor([True]))
    accumulator.add(per_token(3.0, 3.0, entropy=[0.75, 0.75], logprob_difference=[7.0, 7.0]), fresh=None)
    accumulator.add_rows(valid=3, padded=4)
    accumulator.add_rows(valid=3, padded=8)
    assert logged(accumulator, shown_figures(AlgorithmConfig(), with_reference=False)) == {
        "loss/ratio_mean": 3.0,
        "loss/clip_fraction_low": pytest.approx(1 / 6),
        "loss/clip_fraction_high": pytest.approx(1 / 6),
        "policy/entropy": 0.75,
        "mismatch/logprob_max": pytest.approx(0.4),
        "mismatch/logprob_mean": pytest.approx(0.3),
        # The mean of log mu - log pi before the first update, over tokens of any age: -(0.2 - 0.4 + 1 + 0.3) / 4.
        "mismatch/kl": pytest.approx(-0.275),
        "train/valid_token_share": 0.5,
    }


@pytest.mark.parametrize(
    ("algorithm", "with_reference", "more"),
    [
        ({}, False, set()),
        ({"kl_coef": 0.1}, True, {"policy/kl_to_reference"}),
        ({"dual_clip": 3.0}, False, {"loss/dual_clip_fraction"}),
        ({"correction": "decoupled"}, False, {"loss/correction_weight", "loss/corrected_fraction"}),
    ],
)
def test_what_is_told_beside_what_always_is(
    algorithm: dict[str, Any], with_reference: bool, more: set[str]
) -> None:
    accumulator = FigureAccumulator()
    parts = {"kl": [0.5], "dual_clipped": [1.0], "correction": [1.5], "corrected": [1.0]}
    accumulator.add(per_token(1.0, **parts), fresh=torch.tensor([False]))
    shown = shown_figures(AlgorithmConfig.model_validate(algorithm), with_reference=with_reference)
    found = logged(accumulator, shown)
    assert set(found) == ALWAYS | more
    assert [found[name] for name in sorted(more)] == [
        {"policy/kl_to_reference": 0.5, "loss/correction_weight": 1.5}.get(name, 1.0) for name in sorted(more)
    ]
