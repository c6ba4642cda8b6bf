"""The loss put together, against a sum worked out by hand, option by option."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_bridge.algorithms.policy_loss import LossInputs, LossSettings, policy_loss

# Two tokens over a vocabulary of two.
#   first:  p = (0.5, 0.5), target 0, old p 0.25, so the ratio is 2; advantage 1; clipped at 1.28: loss -1.28
#           H = ln 2 = 0.6931472; reference p 0.25, x = ln 2, k3 = 0.1931472
#   second: p = (0.8, 0.2), target 1, old p 0.2, ratio 1; advantage -0.5: loss 0.5
#           H = 0.8 * 0.2231436 + 0.2 * 1.6094379 = 0.5004024; reference p 0.2, k3 = 0
# Weights 0.25 and 0.75.
INPUTS = LossInputs(
    log_distribution=torch.tensor([[0.5, 0.5], [0.8, 0.2]]).log(),
    targets=torch.tensor([0, 1]),
    old_logprobs=torch.tensor([0.25, 0.2]).log(),
    advantages=torch.tensor([1.0, -0.5]),
    weights=torch.tensor([0.25, 0.75]),
    reference_logprobs=torch.tensor([0.25, 0.2]).log(),
)
PLAIN = LossSettings(clip_low=0.2, clip_high=0.28, entropy_coef=0.0, kl_coef=0.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 0.25 * -1.28 + 0.75 * 0.5
        ({}, 0.055),
        # 0.25 * (-1.28 - 0.0693147) + 0.75 * (0.5 - 0.0500402) = 0.055 - 0.0173287 - 0.0375302
        ({"entropy_coef": 0.1}, 0.0001411),
        # 0.055 + 0.25 * 0.5 * 0.1931472
        ({"kl_coef": 0.5}, 0.0791434),
        # All of it: 0.0001411 + 0.0241434
        ({"entropy_coef": 0.1, "kl_coef": 0.5}, 0.0242845),
        # The first token's upper bound at 3: 0.25 * -2 + 0.375
        ({"clip_high": 2.0}, -0.125),
        # x = ln 2 and 0: 0.055 + 0.25 * 0.5 * 0.6931472
        ({"kl_coef": 0.5, "kl_estimator": "k1"}, 0.1416434),
        # 0.5 * 0.6931472^2 = 0.2402265: 0.055 + 0.25 * 0.5 * 0.2402265
        ({"kl_coef": 0.5, "kl_estimator": "k2"}, 0.0850283),
        # -1.28 * 1 * ln 0.5 = 0.8872284 and -1 * -0.5 * ln 0.2 = -0.8047190: 0.2218071 - 0.6035392
        ({"objective": "cispo"}, -0.3817321),
        # ln 2 = 0.6931472 and 0.5 ln 0.2: 0.1732868 - 0.6035392
        ({"objective": "reinforce"}, -0.4302524),
        # The bad token at -c A = 0.5 * 1.2 = 0.6, which 0.5 is below: as without.
        ({"dual_clip": 1.2}, 0.055),
    ],
    ids=[
        "plain",
        "entropy",
        "kl",
        "entropy and kl",
        "clip_high",
        "k1",
        "k2",
        "cispo",
        "reinforce",
        "dual_clip",
    ],
)
def test_by_hand(changes: dict[str, Any], expected: float) -> None:
    loss, _ = policy_loss(INPUTS, replace(PLAIN, **changes))
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_figures_by_hand() -> None:
    _, figures = policy_loss(INPUTS, PLAIN)
    assert {name: pytest.approx(value.tolist(), abs=1e-6) for name, value in figures.items()} == {
        "ratio": [2.0, 1.0],
        "clipped_low": [0.0, 0.0],
        "clipped_high": [1.0, 0.0],
        "dual_clipped": [0.0, 0.0],
        "entropy": [0.6931472, 0.5004024],
        "logprob_difference": [0.6931472, 0.0],
        "kl": [0.1931472, 0.0],
    }
    assert not any(value.requires_grad for value in figures.values())


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
        # The second token is outside of [0.6, 5]: 0.25 * 1.6 * -1.25
        ({"correction": "icepop", "correction_low": 0.6}, -0.5, [1.6, 0.0], [0.0, 1.0]),
        # Neither entropy nor divergence is weighed: -0.125 - 0.0173287 - 0.0375302 + 0.0241434
        (
            {"correction": "decoupled", "entropy_coef": 0.1, "kl_coef": 0.5},
            -0.1557155,
            [1.6, 0.5],
            [0.0, 0.0],
        ),
    ],
    ids=["decoupled", "truncated", "icepop", "with entropy and kl"],
)
def test_corrections_by_hand(
    changes: dict[str, Any], expected: float, weights: list[float], bounded: list[float]
) -> None:
    loss, figures = policy_loss(replace(INPUTS, proximal_logprobs=PROXIMAL), replace(PLAIN, **changes))
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert figures["ratio"].tolist() == pytest.approx([1.25, 2.0])
    assert figures["correction"].tolist() == pytest.approx(weights)
    assert figures["corrected"].tolist() == bounded
    # The mismatch is told of the engine's probabilities, whatever the ratio is against.
    assert figures["logprob_difference"].tolist() == pytest.approx([0.6931472, 0.0], abs=1e-6)


def test_a_correction_without_proximal_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match="correction is 'icepop'"):
        policy_loss(INPUTS, replace(PLAIN, correction="icepop"))


def test_ratios_of_sequences_by_hand() -> None:
    # Both tokens are one sequence: ratios 2 and 1, the geometric mean sqrt(2), above 1.28 and so clipped for A = 1;
    # for A = -0.5: 0.7071068. 0.25 * -1.28 + 0.75 * 0.7071068
    halved = torch.full((2,), 0.5 * math.log(2.0))
    loss, figures = policy_loss(replace(INPUTS, sequence_log_ratios=halved), PLAIN)
    assert figures["ratio"].tolist() == pytest.approx([2**0.5] * 2)
    assert loss.item() == pytest.approx(0.2103301, abs=1e-6)


def test_without_a_reference_there_is_no_kl() -> None:
    loss, figures = policy_loss(replace_reference(None), PLAIN)
    assert "kl" not in figures
    assert loss.item() == pytest.approx(0.055, abs=1e-6)


def test_a_kl_coefficient_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kl_coef is 0\.5"):
        policy_loss(replace_reference(None), replace(PLAIN, kl_coef=0.5))


def test_the_gradient_reaches_the_logits() -> None:
    logits = torch.zeros(2, 2, requires_grad=True)
    inputs = replace_reference(None)
    inputs.log_distribution = torch.log_softmax(logits, -1)
    inputs.old_logprobs = torch.tensor([0.5, 0.5]).log()
    loss, _ = policy_loss(inputs, PLAIN)
    loss.backward()
    # On policy d loss / d logit = -w A (onehot - p): -0.25 (1 - 0.5) = -0.125; 0.375 (1 - 0.5) = 0.1875.
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx([-0.125, 0.125, -0.1875, 0.1875], abs=1e-6)


@pytest.mark.parametrize(("entropy_coef", "kept"), [(0.0, 0), (0.1, 1)])
def test_an_entropy_that_is_only_told_keeps_no_distribution_for_the_backward_pass(
    entropy_coef: float, kept: int
) -> None:
    inputs = replace_reference(None)
    inputs.log_distribution = torch.log_softmax(torch.zeros(2, 7, requires_grad=True), -1)
    saved: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (2, 7) and tensor.data_ptr() != inputs.log_distribution.data_ptr():
            saved.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _, figures = policy_loss(inputs, replace(PLAIN, entropy_coef=entropy_coef))
    assert len(saved) == kept
    assert figures["entropy"].tolist() == pytest.approx([math.log(7)] * 2)


def test_a_divergence_that_is_only_told_may_be_infinite() -> None:
    far = replace_reference(torch.tensor([-math.inf, 0.0]))  # what the reference has ruled out
    loss, figures = policy_loss(far, PLAIN)
    assert figures["kl"][0] == math.inf
    assert loss.item() == pytest.approx(0.055, abs=1e-6)


def replace_reference(reference: torch.Tensor | None) -> LossInputs:
    return replace(INPUTS, reference_logprobs=reference)
