"""Entropy, KL and annealing against values worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.algorithms.regularizers import (
    KlEstimator,
    categorical_entropy,
    held_then_annealed,
    kl_to_reference,
)

ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3")


def test_entropy() -> None:
    distributions = torch.tensor([[0.5, 0.25, 0.25, 1e-30], [0.25, 0.25, 0.25, 0.25]])
    # 0.5 ln 2 + 2 * 0.25 ln 4 = 1.5 ln 2 = 1.0397208; ln 4 = 1.3862944.
    assert categorical_entropy(distributions.log()).tolist() == pytest.approx(
        [1.0397208, 1.3862944], abs=1e-6
    )


def test_the_gradient_of_entropy_pulls_towards_uniform() -> None:
    logits = torch.tensor([[2.0, 0.0]], requires_grad=True)
    categorical_entropy(torch.log_softmax(logits, -1)).sum().backward()
    assert logits.grad is not None
    # dH/dz_i = -p_i (ln p_i + H), with p = (0.8807971, 0.1192029) and H = 0.3653338:
    # -0.8807971 * (-0.1269280 + 0.3653338) = -0.2099872.
    assert logits.grad.tolist()[0] == pytest.approx([-0.2099872, 0.2099872], abs=1e-5)


@pytest.mark.parametrize(
    ("x", "value", "gradient"),
    [
        # exp(-x) + x - 1 at x = ln 2: 0.5 + 0.6931472 - 1; its slope 1 - exp(-x) = 0.5.
        (math.log(2), 0.1931472, 0.5),
        # At x = -ln 2: 2 - 0.6931472 - 1; slope 1 - 2.
        (-math.log(2), 0.3068528, -1.0),
        (0.0, 0.0, 0.0),
    ],
)
def test_k3(x: float, value: float, gradient: float) -> None:
    reference = torch.tensor([-2.0])
    logprobs = (reference + x).requires_grad_()
    kl = kl_to_reference(logprobs, reference)
    kl.sum().backward()
    assert kl.item() == pytest.approx(value, abs=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(
    ("x", "value", "gradient"),
    [
        (-2.6, 9.8637380, -12.4637380),  # e^2.6 = 13.4637380, less 3.6; slope 1 - e^2.6
        (-2.62, 10.0, 0.0),  # e^2.62 - 3.62 would be 10.1157
        (-25.0, 10.0, 0.0),
        (-200.0, 10.0, 0.0),  # e^200 is no float32
        (-math.inf, 10.0, 0.0),
        (200.0, 199.0, 1.0),  # the other side stays as it is: it is what pulls a policy back
    ],
)
def test_k3_of_a_token_that_has_become_unlikely_is_bounded(x: float, value: float, gradient: float) -> None:
    logprobs = torch.tensor([x], requires_grad=True)
    kl = kl_to_reference(logprobs, torch.tensor([0.0]))
    (0.04 * kl).sum().backward()
    assert kl.item() == pytest.approx(value, rel=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.04 * gradient, rel=1e-6)


def test_k3_hides_no_broken_number() -> None:
    assert kl_to_reference(torch.tensor([math.nan]), torch.tensor([0.0])).isnan().item()


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    # x = ln 2: x itself, with a slope of 1; x^2 / 2 = 0.2402265, with a slope of x.
    [("k1", 0.6931472, 1.0), ("k2", 0.2402265, 0.6931472), ("k3", 0.1931472, 0.5)],
)
def test_estimators(estimator: KlEstimator, value: float, gradient: float) -> None:
    reference = torch.tensor([-2.0])
    logprobs = (reference + math.log(2)).requires_grad_()
    kl = kl_to_reference(logprobs, reference, estimator)
    kl.sum().backward()
    assert kl.item() == pytest.approx(value, abs=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_k1_is_the_kl_in_expectation_too_and_k2_is_not() -> None:
    policy, reference = torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5])
    estimates = {
        estimator: (policy * kl_to_reference(policy.log(), reference.log(), estimator)).sum().item()
        for estimator in ESTIMATORS
    }
    # k2: 0.75 * 0.5 * 0.4054651^2 + 0.25 * 0.5 * 0.6931472^2 = 0.0616508 + 0.0600566.
    assert estimates == pytest.approx({"k1": 0.1308120, "k2": 0.1217074, "k3": 0.1308120}, abs=1e-6)


def test_k3_is_the_kl_in_expectation_under_the_policy() -> None:
    policy, reference = torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5])
    estimate = (policy * kl_to_reference(policy.log(), reference.log())).sum().item()
    # 0.75 ln 1.5 + 0.25 ln 0.5 = 0.3040988 - 0.1732868. The KL the other way round would be 0.1438410.
    assert estimate == pytest.approx(0.1308120, abs=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_in_a_loss_in_expectation(estimator: KlEstimator) -> None:
    logits = torch.tensor([1.0, 0.0, -0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.7, 0.1], dtype=torch.float64), -1)

    def gradient(of: torch.Tensor) -> list[float]:
        (found,) = torch.autograd.grad(of, logits)
        result: list[float] = found.tolist()
        return result

    def logprobs() -> torch.Tensor:
        return torch.log_softmax(logits, -1)

    # Tokens come from the policy, whose probabilities of having been sampled have no gradient.
    sampled = (logprobs().exp().detach() * kl_to_reference(logprobs(), reference, estimator)).sum()
    expected = {
        "k1": [0.0, 0.0, 0.0],
        "k2": gradient((logprobs().exp() * (logprobs() - reference)).sum()),
        "k3": gradient((reference.exp() * (reference - logprobs())).sum()),
    }
    assert gradient(sampled) == pytest.approx(expected[estimator], abs=1e-12)


@given(st.floats(-5, 5), st.floats(-5, 5))
def test_k3_is_never_negative(policy: float, reference: float) -> None:
    value = kl_to_reference(
        torch.tensor([policy], dtype=torch.float64), torch.tensor([reference], dtype=torch.float64)
    )
    assert value.item() >= -1e-15


@pytest.mark.parametrize(
    ("progress", "hold", "expected"),
    [
        (0.0, 0.5, 0.2),
        (0.5, 0.5, 0.2),
        # Half of the way down from 0.2 to 0.02.
        (0.75, 0.5, 0.11),
        (1.0, 0.5, 0.02),
        (1.5, 0.5, 0.02),
        # No hold: a tenth of the way down.
        (0.1, 0.0, 0.182),
        # Held throughout.
        (1.0, 1.0, 0.2),
    ],
)
def test_annealing(progress: float, hold: float, expected: float) -> None:
    assert held_then_annealed(progress, value=0.2, hold=hold, final_factor=0.1) == pytest.approx(expected)


def test_annealing_to_all_of_it_does_nothing() -> None:
    assert held_then_annealed(0.9, value=0.3, hold=0.0, final_factor=1.0) == pytest.approx(0.3)
