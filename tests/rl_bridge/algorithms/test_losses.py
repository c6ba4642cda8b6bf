"""Ratios, clipping, corrections, regularizers, aggregation and their sum, against values worked out by hand."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rl_bridge.algorithms.policy_loss import (
    Aggregation,
    KlEstimator,
    LossInputs,
    cispo,
    clipped_surrogate,
    find_rejected,
    hold_then_anneal,
    kl_to_reference,
    policy_loss,
    sequence_means,
    token_weights,
)
from rl_bridge.config import AlgorithmConfig


def test_sequence_means_are_geometric_means() -> None:
    # Sequence 7: ratios 2 and 0.5 and 8, whose geometric mean is 2. Sequence 3: a ratio of 3.
    means = sequence_means(np.log(np.array([2.0, 3.0, 0.5, 8.0])).astype(np.float32), np.array([7, 3, 7, 7]))
    assert np.exp(means).tolist() == pytest.approx([2.0, 3.0, 2.0, 2.0], rel=1e-6)
    assert means.dtype == np.float32


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient", "clipped"),
    [
        # clip_low 0.2, clip_high 0.28: the ratio's bounds are 0.8 and 1.28.
        # min(1.5 * 2, 1.28 * 2) = 2.56: the upper bound holds.
        (2.0, 1.5, -2.56, 0.0, "high"),
        # min(0.5 * 2, 0.8 * 2) = 1: not clipped; the gradient is -ratio * advantage.
        (2.0, 0.5, -1.0, -1.0, ""),
        # min(1.5 * -2, 1.28 * -2) = -3: not clipped.
        (-2.0, 1.5, 3.0, 3.0, ""),
        # min(0.5 * -2, 0.8 * -2) = -1.6: the lower bound holds.
        (-2.0, 0.5, 1.6, 0.0, "low"),
        # Clip-higher: 25% up is still inside the upper bound of 28%, 25% down is outside of the lower one of 20%.
        (1.0, 1.25, -1.25, -1.25, ""),
        (-1.0, 0.75, 0.8, 0.0, "low"),
        # Inside of both bounds the clipped term equals the other, and the gradient counts once.
        (-1.0, 0.9, 0.9, 0.9, ""),
        (0.0, 2.0, 0.0, 0.0, ""),
    ],
)
def test_clipped_surrogate_by_hand(
    advantage: float, ratio: float, loss: float, gradient: float, clipped: str
) -> None:
    logprobs = torch.tensor([ratio]).log().requires_grad_()
    found = clipped_surrogate(logprobs.exp(), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28)
    found.loss.sum().backward()
    assert logprobs.grad is not None
    assert (found.loss.item(), logprobs.grad.item()) == pytest.approx((loss, gradient), abs=1e-6)
    assert (found.clipped_low.item(), found.clipped_high.item()) == (clipped == "low", clipped == "high")
    assert not found.dual_clipped.any()


def test_the_dual_clip_bounds_the_loss_of_a_bad_token_that_has_become_likely() -> None:
    # c = 3. A = -2 and rho = 5: the surrogate's loss is 10, the bound 6, and there is no gradient left.
    # A = -2 and rho = 2.5: 5 is below 6. A = 2 and rho = 5: the clip alone, -2.56.
    logprobs = torch.tensor([5.0, 2.5, 5.0]).log().requires_grad_()
    result = clipped_surrogate(
        logprobs.exp(), torch.tensor([-2.0, -2.0, 2.0]), clip_low=0.2, clip_high=0.28, dual_clip=3.0
    )
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([6.0, 5.0, -2.56], abs=1e-5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 5.0, 0.0], abs=1e-5)
    assert result.dual_clipped.tolist() == [True, False, False]


def test_cispo_by_hand() -> None:
    # log pi = -0.5 throughout; weights between 0.8 and 1.28. The gradient is -weight * A, whatever the bound did.
    #   rho 2, A 1: weight 1.28, loss 0.64       rho 2, A -1: weight 1.28, loss -0.64
    #   rho 0.5, A 2: weight 0.8, loss 0.8       rho 1.1, A 1: weight 1.1, loss 0.55
    #   rho 2, A 0: nothing, and it is not told as capped
    logprobs = torch.full((5,), -0.5, requires_grad=True)
    ratio = torch.exp(logprobs - (-0.5 - torch.tensor([2.0, 2.0, 0.5, 1.1, 2.0]).log()))
    result = cispo(logprobs, ratio, torch.tensor([1.0, -1.0, 2.0, 1.0, 0.0]), clip_low=0.2, clip_high=0.28)
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([0.64, -0.64, 0.8, 0.55, 0.0], abs=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.28, 1.28, -1.6, -1.1, 0.0], abs=1e-6)
    assert result.clipped_low.tolist() == [False, False, True, False, False]
    assert result.clipped_high.tolist() == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("estimator", "x", "value", "gradient"),
    [
        # x = ln 2: x itself, with a slope of 1; x^2 / 2 = 0.2402265, with a slope of x.
        ("k1", math.log(2), 0.6931472, 1.0),
        ("k2", math.log(2), 0.2402265, 0.6931472),
        # exp(-x) + x - 1 = 0.5 + 0.6931472 - 1; its slope 1 - exp(-x) = 0.5. At -ln 2: 2 - 0.6931472 - 1.
        ("k3", math.log(2), 0.1931472, 0.5),
        ("k3", -math.log(2), 0.3068528, -1.0),
        # Bounded for tokens that have become unlikely.
        ("k3", -2.6, 9.8637380, -12.4637380),  # e^2.6 = 13.4637380, less 3.6; slope 1 - e^2.6
        ("k3", -2.62, 10.0, 0.0),  # e^2.62 - 3.62 would be 10.1157
        ("k3", -200.0, 10.0, 0.0),  # e^200 is no float32
        ("k3", -math.inf, 10.0, 0.0),
        ("k3", math.nan, math.nan, 0.0),  # a broken number is not hidden
        ("k3", 200.0, 199.0, 1.0),  # the other side stays as it is: it is what pulls a policy back
    ],
)
def test_estimators(estimator: KlEstimator, x: float, value: float, gradient: float) -> None:
    logprobs = torch.tensor([x], requires_grad=True)
    kl = kl_to_reference(logprobs, torch.tensor([0.0]), estimator)
    kl.sum().backward()
    assert kl.item() == pytest.approx(value, rel=1e-6, nan_ok=True)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient, rel=1e-6, nan_ok=True)


def test_annealing() -> None:
    def at(progress: float, hold: float) -> float:
        return hold_then_anneal(progress, value=0.2, hold=hold, final_factor=0.1)

    # Held, half of the way down from 0.2 to 0.02, and no further.
    assert [at(progress, 0.5) for progress in (0.5, 0.75, 1.0, 1.5)] == pytest.approx([0.2, 0.11, 0.02, 0.02])
    assert (at(0.1, 0.0), at(1.0, 1.0)) == pytest.approx((0.182, 0.2))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 4] * 4),
        # Two sequences: 1 / (2 * 3) and 1 / (2 * 1).
        ("sequence_mean", [1 / 6, 1 / 6, 1 / 2, 1 / 6]),
        ("fixed_length", [1 / 16] * 4),  # 1 / (2 sequences * 8), however many tokens there are
    ],
)
def test_weights_of_tokens_by_hand(aggregation: Aggregation, expected: list[float]) -> None:
    """Three tokens of trajectory 4, one of trajectory 9."""
    weights = token_weights(np.array([4, 4, 9, 4]), aggregation=aggregation, max_length=8)
    assert weights.tolist() == pytest.approx(expected)
    assert token_weights(np.zeros(0, np.int64), aggregation=aggregation, max_length=8).shape == (0,)


# Two tokens over a vocabulary of two.
#   first:  p = (0.5, 0.5), target 0, old p 0.25, so the ratio is 2; advantage 1; clipped at 1.28: loss -1.28
#           H = ln 2 = 0.6931472; reference p 0.25, x = ln 2, k3 = 0.1931472
#   second: p = (0.8, 0.2), target 1, old p 0.2, ratio 1; advantage -0.5: loss 0.5
#           H = 0.8 * 0.2231436 + 0.2 * 1.6094379 = 0.5004024; reference p 0.2, k3 = 0
# Weights 0.25 and 0.75.
INPUTS = LossInputs(
    logprobs=torch.tensor([0.5, 0.2]).log(),
    entropy=torch.tensor([0.6931472, 0.5004024]),
    old_logprobs=torch.tensor([0.25, 0.2]).log(),
    advantages=torch.tensor([1.0, -0.5]),
    reference_logprobs=torch.tensor([0.25, 0.2]).log(),
)
WEIGHTS = torch.tensor([0.25, 0.75])
PLAIN = AlgorithmConfig(clip_high=0.28)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 0.25 * -1.28 + 0.75 * 0.5
        ({}, 0.055),
        # 0.25 * (-1.28 - 0.0693147) + 0.75 * (0.5 - 0.0500402) = 0.055 - 0.0173287 - 0.0375302
        ({"entropy_coef": 0.1}, 0.0001411),
        # 0.055 + 0.25 * 0.5 * 0.1931472
        ({"kl_coef": 0.5}, 0.0791434),
        # The first token's upper bound at 3: 0.25 * -2 + 0.375
        ({"clip_high": 2.0}, -0.125),
        # 0.5 * 0.6931472^2 = 0.2402265: 0.055 + 0.25 * 0.5 * 0.2402265
        ({"kl_coef": 0.5, "kl_estimator": "k2"}, 0.0850283),
        # -1.28 * 1 * ln 0.5 = 0.8872284 and -1 * -0.5 * ln 0.2 = -0.8047190: 0.2218071 - 0.6035392
        ({"objective": "cispo"}, -0.3817321),
        # ln 2 = 0.6931472 and 0.5 ln 0.2: 0.1732868 - 0.6035392
        ({"objective": "reinforce"}, -0.4302524),
    ],
)
def test_policy_loss_by_hand(changes: dict[str, Any], expected: float) -> None:
    loss, _ = policy_loss(INPUTS, PLAIN.model_copy(update=changes))
    assert (WEIGHTS @ loss).item() == pytest.approx(expected, abs=1e-6)


def test_metrics_by_hand() -> None:
    _, metrics = policy_loss(INPUTS, PLAIN.model_copy(update={"dual_clip": 1.2}))
    assert {name: pytest.approx(value.tolist(), abs=1e-6) for name, value in metrics.items()} == {
        "loss/ratio_mean": [2.0, 1.0],
        "loss/clip_fraction_low": [0.0, 0.0],
        "loss/clip_fraction_high": [1.0, 0.0],
        "loss/dual_clip_fraction": [0.0, 0.0],
        "policy/kl_to_reference": [0.1931472, 0.0],
    }
    assert not any(value.requires_grad for value in metrics.values())
    least = policy_loss(replace(INPUTS, reference_logprobs=None), PLAIN)[1]
    assert metrics.keys() - least.keys() == {"policy/kl_to_reference"}


# The first token had p 0.4 before the first update, the second 0.1: ratios 1.25 and 2, and pi_old / mu 1.6 and 0.5.
PROXIMAL = torch.tensor([0.4, 0.1]).log()


@pytest.mark.parametrize(
    ("changes", "expected", "weights", "bounded"),
    [
        # Surrogates against pi_old: min(1.25, 1.28) = 1.25: loss -1.25; ratio 2, A -0.5: loss 1.
        # 0.25 * 1.6 * -1.25 + 0.75 * 0.5 * 1
        ({"correction": "decoupled"}, -0.125, [1.6, 0.5], [0.0, 0.0]),
        # 0.25 * 1.5 * -1.25 + 0.375
        ({"correction": "truncated", "correction_cap": 1.5}, -0.09375, [1.5, 0.5], [1.0, 0.0]),
        # Without the first token, whose weight is above 1.5.
        ({"correction": "decoupled", "correction_high": 1.5}, 0.375, [0.0, 0.5], [1.0, 0.0]),
        # The second token is outside of [0.6, 5]: 0.25 * 1.6 * -1.25. The first is outside of [0.4, 1.5].
        ({"correction": "icepop", "correction_low": 0.6}, -0.5, [1.6, 0.0], [0.0, 1.0]),
        (
            {"correction": "icepop", "correction_low": 0.4, "correction_high": 1.5},
            0.375,
            [0.0, 0.5],
            [1.0, 0.0],
        ),
        # The second token's loss is no more than -c A: 0.25 * 1.6 * -1.25 + 0.75 * 0.5 * 0.6
        ({"correction": "decoupled", "dual_clip": 1.2}, -0.275, [1.6, 0.5], [0.0, 0.0]),
        # Neither entropy nor divergence is weighed: -0.125 - 0.0173287 - 0.0375302 + 0.0241434
        (
            {"correction": "decoupled", "entropy_coef": 0.1, "kl_coef": 0.5},
            -0.1557155,
            [1.6, 0.5],
            [0.0, 0.0],
        ),
    ],
)
def test_corrections_by_hand(
    changes: dict[str, Any], expected: float, weights: list[float], bounded: list[float]
) -> None:
    loss, metrics = policy_loss(replace(INPUTS, proximal_logprobs=PROXIMAL), PLAIN.model_copy(update=changes))
    assert (WEIGHTS @ loss).item() == pytest.approx(expected, abs=1e-6)
    assert metrics["loss/ratio_mean"].tolist() == pytest.approx([1.25, 2.0])
    assert metrics["loss/correction_weight"].tolist() == pytest.approx(weights)
    assert metrics["loss/corrected_fraction"].tolist() == bounded


def test_missing_proximal_or_reference_logprobs_are_refused() -> None:
    with pytest.raises(ValueError, match="correction is 'icepop'"):
        policy_loss(INPUTS, PLAIN.model_copy(update={"correction": "icepop"}))
    with pytest.raises(ValueError, match=r"kl_coef is 0\.5"):
        policy_loss(replace(INPUTS, reference_logprobs=None), PLAIN.model_copy(update={"kl_coef": 0.5}))


def test_ratios_of_sequences_by_hand() -> None:
    # Both tokens are one sequence: ratios 2 and 1, the geometric mean sqrt(2), above 1.28 and so clipped for A = 1;
    # for A = -0.5: 0.7071068. 0.25 * -1.28 + 0.75 * 0.7071068
    halved = torch.full((2,), 0.5 * math.log(2.0))
    loss, metrics = policy_loss(replace(INPUTS, sequence_log_ratios=halved), PLAIN)
    assert metrics["loss/ratio_mean"].tolist() == pytest.approx([2**0.5] * 2)
    assert (WEIGHTS @ loss).item() == pytest.approx(0.2103301, abs=1e-6)


EXTREMES = [-1e4, -90.0, -15.0, -1.0, 0.0]


@pytest.mark.parametrize("objective", ["clip", "cispo", "reinforce"])
@pytest.mark.parametrize("correction", ["none", "truncated", "icepop", "decoupled"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_loss_and_gradient_are_finite_however_far_apart_the_policies_are(
    objective: str, correction: str, dual_clip: float | None
) -> None:
    """All combinations of log-probabilities; the engine's may also say that a token was impossible."""
    combinations = itertools.product(
        EXTREMES, [*EXTREMES, -math.inf], EXTREMES, [-2.0, 0.0, 2.0], [-1e4, 1e4]
    )
    own, old, other, advantages, log_ratios = torch.tensor(list(combinations)).unbind(1)
    for sequence_log_ratios in (None, log_ratios):
        for estimator in ("k1", "k2", "k3"):
            logprobs = own.clone().requires_grad_()
            inputs = LossInputs(
                logprobs=logprobs,
                entropy=torch.zeros_like(own),
                old_logprobs=old,
                advantages=advantages,
                reference_logprobs=other,
                proximal_logprobs=None if correction == "none" else other,
                sequence_log_ratios=sequence_log_ratios,
            )
            keys = {"objective": objective, "correction": correction, "dual_clip": dual_clip, "kl_coef": 0.1}
            loss, metrics = policy_loss(inputs, PLAIN.model_copy(update={**keys, "kl_estimator": estimator}))
            loss.sum().backward()
            assert logprobs.grad is not None
            for values in (loss, logprobs.grad, *metrics.values()):
                assert torch.isfinite(values).all()


def test_a_correction_weighs_no_token_without_bound_by_default() -> None:
    far = replace(INPUTS, proximal_logprobs=INPUTS.old_logprobs + torch.tensor([60.0, 0.0]))
    for correction, weight in {"truncated": 2.0, "icepop": 0.0, "decoupled": 0.0}.items():
        _, metrics = policy_loss(far, AlgorithmConfig.model_validate({"correction": correction}))
        assert metrics["loss/correction_weight"].tolist() == [weight, 1.0]


def test_a_bad_token_that_has_become_likely_is_bounded_by_default() -> None:
    far = replace(INPUTS, old_logprobs=INPUTS.logprobs - 10.0, advantages=torch.tensor([-1.0, -0.5]))
    loss, metrics = policy_loss(far, AlgorithmConfig())
    assert loss.tolist() == pytest.approx([3.0, 1.5])
    assert metrics["loss/dual_clip_fraction"].tolist() == [1.0, 1.0]


def test_divergence_that_is_only_logged_may_be_infinite() -> None:
    # What the reference has ruled out.
    far = replace(INPUTS, reference_logprobs=torch.tensor([-math.inf, 0.0]))
    loss, metrics = policy_loss(far, PLAIN)
    assert metrics["policy/kl_to_reference"][0] == math.inf
    assert (WEIGHTS @ loss).item() == pytest.approx(0.055, abs=1e-6)


def test_sequences_far_from_what_was_sampled_are_rejected_whatever_their_length() -> None:
    # Means 0.1, -0.3 and 0.2; the products of the ratios would be far from 1 for the long one alone.
    log_ratios = np.array([0.3, -0.1, -0.3, *[0.2] * 50], dtype=np.float32)
    sequences = np.array([4, 4, 2, *[9] * 50])
    assert find_rejected(log_ratios, sequences, 0.25).tolist() == [False, False, True, *[False] * 50]
    assert find_rejected(log_ratios, sequences, 0.15).tolist() == [False, False, True, *[True] * 50]
    assert not find_rejected(log_ratios, sequences, 0.31).any()
