"""The clipped surrogate on each side of each bound, its gradient, and what it reports as clipped."""

import math

import pytest
import torch

from rl_bridge.algorithms.surrogate import clipped_surrogate

# clip_low 0.2, clip_high 0.28: the ratio's bounds are 0.8 and 1.28.
#
# advantage, ratio, loss, d loss / d logprob, clipped low, clipped high
CASES = {
    # min(1.5 * 2, 1.28 * 2) = 2.56: the upper bound holds.
    "good and likelier than the bound": (2.0, 1.5, -2.56, 0.0, False, True),
    # min(0.5 * 2, 0.8 * 2) = 1: not clipped; the gradient is -ratio * advantage.
    "good and less likely": (2.0, 0.5, -1.0, -1.0, False, False),
    # min(1.5 * -2, 1.28 * -2) = -3: not clipped.
    "bad and likelier": (-2.0, 1.5, 3.0, 3.0, False, False),
    # min(0.5 * -2, 0.8 * -2) = -1.6: the lower bound holds.
    "bad and less likely than the bound": (-2.0, 0.5, 1.6, 0.0, True, False),
    # Clip-higher: 25% up is still inside the upper bound of 28% ...
    "good, 25% up": (1.0, 1.25, -1.25, -1.25, False, False),
    # ... while 25% down is outside of the lower bound of 20%.
    "bad, 25% down": (-1.0, 0.75, 0.8, 0.0, True, False),
    # Inside of both bounds the clipped term equals the other, and the gradient counts once.
    "good, inside": (1.0, 1.1, -1.1, -1.1, False, False),
    "bad, inside": (-1.0, 0.9, 0.9, 0.9, False, False),
    "on policy": (3.0, 1.0, -3.0, -3.0, False, False),
    "no advantage": (0.0, 2.0, 0.0, 0.0, False, False),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_by_hand(case: tuple[float, float, float, float, bool, bool]) -> None:
    advantage, ratio, loss, gradient, clipped_low, clipped_high = case
    old = torch.tensor([-1.25])
    logprobs = (old + math.log(ratio)).requires_grad_()
    result = clipped_surrogate(logprobs, old, torch.tensor([advantage]), clip_low=0.2, clip_high=0.28)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert result.ratio.item() == pytest.approx(ratio, abs=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert (result.clipped_low.item(), result.clipped_high.item()) == (clipped_low, clipped_high)


def test_the_ratio_is_against_the_old_policy_not_against_itself() -> None:
    # Log-probabilities -0.5 now and -0.7 then: exp(0.2) = 1.2214028.
    result = clipped_surrogate(
        torch.tensor([-0.5]), torch.tensor([-0.7]), torch.tensor([1.0]), clip_low=0.2, clip_high=0.28
    )
    assert result.ratio.item() == pytest.approx(1.2214028, abs=1e-6)


def test_tokens_do_not_touch_each_other() -> None:
    advantages = torch.tensor([case[0] for case in CASES.values()])
    ratios = torch.tensor([case[1] for case in CASES.values()])
    result = clipped_surrogate(
        ratios.log(), torch.zeros(len(CASES)), advantages, clip_low=0.2, clip_high=0.28
    )
    assert result.loss.tolist() == pytest.approx([case[2] for case in CASES.values()], abs=1e-6)
