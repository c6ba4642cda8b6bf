"""The loss put together, against a sum worked out by hand, option by option."""

from dataclasses import replace

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
    ],
    ids=["plain", "entropy", "kl", "entropy and kl", "clip_high"],
)
def test_by_hand(changes: dict[str, float], expected: float) -> None:
    loss, _ = policy_loss(INPUTS, replace(PLAIN, **changes))
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_figures_by_hand() -> None:
    _, figures = policy_loss(INPUTS, PLAIN)
    assert {name: pytest.approx(value.tolist(), abs=1e-6) for name, value in figures.items()} == {
        "ratio": [2.0, 1.0],
        "clipped_low": [0.0, 0.0],
        "clipped_high": [1.0, 0.0],
        "entropy": [0.6931472, 0.5004024],
        "logprob_difference": [0.6931472, 0.0],
        "kl": [0.1931472, 0.0],
    }
    assert not any(value.requires_grad for value in figures.values())


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


def replace_reference(reference: torch.Tensor | None) -> LossInputs:
    return replace(INPUTS, reference_logprobs=reference)
