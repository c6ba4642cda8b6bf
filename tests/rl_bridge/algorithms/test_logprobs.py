"""Chunked log-probabilities and entropies equal log_softmax of all logits at once, gradients included."""

import math

import pytest
import torch
from torch import Tensor

from rl_bridge.algorithms.logprobs import token_logprobs

TOKENS, WIDTH, VOCABULARY, TEMPERATURE = 11, 6, 23, 0.7


def random_tensor(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = random_tensor(TOKENS, WIDTH, seed=1), random_tensor(VOCABULARY, WIDTH, seed=2)
    target = torch.arange(TOKENS) * 2 % VOCABULARY
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target


def plain(
    hidden: Tensor, weight: Tensor, target: Tensor, *, top_k: int = VOCABULARY
) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax((hidden @ weight.T).float() / TEMPERATURE, dim=-1)
    top = torch.log_softmax(logp.sort(dim=-1, descending=True).values[:, :top_k], dim=-1)
    return logp.gather(-1, target.unsqueeze(-1)).squeeze(-1), -(top.exp() * top).sum(-1)


def gradients(outputs: tuple[Tensor, Tensor], wrt: tuple[Tensor, Tensor], *, entropy: float) -> list[Tensor]:
    logprobs, entropies = outputs
    loss = (logprobs * random_tensor(TOKENS, seed=3)).sum()
    if entropy:
        loss = loss - entropy * (entropies * random_tensor(TOKENS, seed=4)).sum()
    return list(torch.autograd.grad(loss, wrt))


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize(
    ("entropy", "top_k"), [(0.0, None), (0.3, None), (0.0, 2), (0.3, 2), (0.3, VOCABULARY)]
)
def test_chunked_results_equal_unchunked_ones(chunk: int, entropy: float, top_k: int | None) -> None:
    hidden, weight, target = inputs()
    expected = plain(hidden, weight, target, top_k=top_k or VOCABULARY)
    found = token_logprobs(hidden, weight, target, temperature=TEMPERATURE, chunk=chunk, entropy_top_k=top_k)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    for ours, theirs in zip(
        gradients(found, (hidden, weight), entropy=entropy),
        gradients(expected, (hidden, weight), entropy=entropy),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-6)


def test_half_precision_is_summed_in_full() -> None:
    hidden, weight, target = inputs(torch.bfloat16)
    found = token_logprobs(hidden, weight, target, temperature=TEMPERATURE, chunk=2)
    assert {one.dtype for one in found} == {torch.float32}
    for ours, theirs in zip(found, plain(hidden, weight, target), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    exact = inputs(torch.bfloat16)
    exact = exact[0].detach().double().requires_grad_(), exact[1].detach().double().requires_grad_(), target
    by_hand = gradients(plain(*exact), exact[:2], entropy=0.3)
    for ours, theirs in zip(gradients(found, (hidden, weight), entropy=0.3), by_hand, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), theirs, atol=0.05, rtol=0.02)


def test_entropy_by_hand() -> None:
    distributions = torch.tensor([[0.5, 0.25, 0.25, 1e-30], [0.25, 0.25, 0.25, 0.25]])
    logprobs, entropy = token_logprobs(
        torch.eye(2), distributions.log().T.contiguous(), torch.tensor([1, 2]), temperature=1.0, chunk=8
    )
    assert logprobs.tolist() == pytest.approx([math.log(0.25)] * 2, abs=1e-6)
    # 0.5 ln 2 + 2 * 0.25 ln 4 = 1.5 ln 2; ln 4.
    assert entropy.tolist() == pytest.approx([1.0397208, 1.3862944], abs=1e-6)


def test_the_backward_pass_keeps_nothing_as_wide_as_the_vocabulary() -> None:
    hidden, weight, target = inputs()
    saved: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_logprobs(hidden, weight, target, temperature=TEMPERATURE, chunk=4)
    assert saved
    assert not any(VOCABULARY in shape for shape in saved if shape != weight.shape)
