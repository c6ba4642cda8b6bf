"""The objectives on each side of each bound, their gradients, and what they report as clipped."""

import math

import pytest
import torch

from rl_bridge.algorithms.surrogate import clipped_surrogate, likelihood, weighted_likelihood

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
@pytest.mark.parametrize("dual_clip", [None, 1.5], ids=["", "dual clip that does not hold"])
def test_by_hand(case: tuple[float, float, float, float, bool, bool], dual_clip: float | None) -> None:
    advantage, ratio, loss, gradient, clipped_low, clipped_high = case
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    result = clipped_surrogate(
        logprobs.exp(), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28, dual_clip=dual_clip
    )
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert (result.clipped_low.item(), result.clipped_high.item()) == (clipped_low, clipped_high)
    assert not result.dual_clipped.item()


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


def test_tokens_do_not_touch_each_other() -> None:
    advantages = torch.tensor([case[0] for case in CASES.values()])
    ratios = torch.tensor([case[1] for case in CASES.values()])
    result = clipped_surrogate(ratios, advantages, clip_low=0.2, clip_high=0.28)
    assert result.loss.tolist() == pytest.approx([case[2] for case in CASES.values()], abs=1e-6)


def test_cispo_by_hand() -> None:
    # log pi = -0.5 throughout; weights between 0.8 and 1.28. The gradient is -weight * A, whatever the bound did.
    #   rho 2, A 1: weight 1.28, loss 0.64       rho 2, A -1: weight 1.28, loss -0.64
    #   rho 0.5, A 2: weight 0.8, loss 0.8       rho 1.1, A 1: weight 1.1, loss 0.55
    #   rho 2, A 0: nothing, and it is not told as capped
    logprobs = torch.full((5,), -0.5, requires_grad=True)
    ratio = torch.exp(logprobs - (-0.5 - torch.tensor([2.0, 2.0, 0.5, 1.1, 2.0]).log()))
    result = weighted_likelihood(
        logprobs, ratio, torch.tensor([1.0, -1.0, 2.0, 1.0, 0.0]), clip_low=0.2, clip_high=0.28
    )
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([0.64, -0.64, 0.8, 0.55, 0.0], abs=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.28, 1.28, -1.6, -1.1, 0.0], abs=1e-6)
    assert result.clipped_low.tolist() == [False, False, True, False, False]
    assert result.clipped_high.tolist() == [True, True, False, False, False]


def test_a_lower_bound_of_one_is_none() -> None:
    logprobs = torch.tensor([-9.0], requires_grad=True)
    result = weighted_likelihood(
        logprobs, torch.tensor([1e-6]), torch.tensor([1.0]), clip_low=1.0, clip_high=0.28
    )
    # 1e-6 * 9
    assert result.loss.item() == pytest.approx(9e-6)
    assert not result.clipped_low.item()


def test_the_likelihood_is_supervised_fine_tuning_where_all_advantages_are_one() -> None:
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    result = likelihood(logprobs, torch.tensor([1.0, -3.0]))
    result.loss.sum().backward()
    assert result.loss.tolist() == [0.5, -6.0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 3.0]
    assert not any(flags.any() for flags in result[1:])
