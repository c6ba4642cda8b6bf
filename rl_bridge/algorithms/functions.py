"""Functions that `algorithm.*` names by dotted paths, built-in or custom: a loss, advantages, a group filter.

Built-in and custom functions have the same signatures, so that one may wrap another.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rl_bridge.algorithms.policy_loss import LossInputs
from rl_bridge.config import AlgorithmConfig, resolve_function
from rl_bridge.errors import ConfigError, TrainingError
from rl_bridge.types import Group


class LossFunction(Protocol):
    """`algorithm.loss`: the loss of each token. Runs in the trainer, once for each pass that makes a gradient."""

    def __call__(
        self, inputs: LossInputs, algorithm: AlgorithmConfig, /
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of each token.

        A pass has a part of the batch, and a trajectory's tokens may be spread over several: a token's loss may depend
        only on its own inputs. The trainer sums the losses over all passes and ranks, each times the weight of its
        token (`algorithm.aggregation`).

        Args:
            inputs: Inputs for T loss tokens, each of shape [T].
            algorithm: `algorithm.*` at this point of the run: `entropy_coef` is annealed, and `kl_coef` is 0 if the
                divergence is in the reward.

        Returns:
            The loss of each token, with gradient, to be minimised, shape [T]; and metrics without gradient, by their
            names in the log, each of shape [T]; their means over all tokens are logged.
        """


class AdvantageFunction(Protocol):
    """`algorithm.advantage`: the advantages of siblings. Runs in the controller, on its event loop: it must not block.

    With `algorithm.kl_in=reward` it runs in the trainer, after the divergence was subtracted from the rewards.
    """

    def __call__(self, rewards: Sequence[float], /, *, normalize_std: bool) -> Sequence[float]:
        """Return the advantage of each sibling.

        Args:
            rewards: Rewards of a group's siblings, less the overlong penalty, shape [G]; G is smaller than
                `rollout.group_size` if siblings were lost.
            normalize_std: `algorithm.normalize_std`.

        Returns:
            An advantage for each sibling, shared by all its tokens, shape [G].
        """


class FilterFunction(Protocol):
    """`algorithm.group_filter`: rejects groups. Runs in the controller, on its event loop: it must not block."""

    def __call__(self, group: Group, rewards: Sequence[float], /) -> str | None:
        """Return why a group is not worth training, if so.

        Called while a step has refills left (`algorithm.max_refills`). It should depend only on its arguments, or runs
        with `deterministic` are not repeatable.

        Args:
            group: The finished group.
            rewards: Its siblings' own rewards, without the overlong penalty, shape [G].

        Returns:
            The reason, for `groups.jsonl`; None to train the group.
        """


LOSS, ADVANTAGE, GROUP_FILTER = "algorithm.loss", "algorithm.advantage", "algorithm.group_filter"


def load_loss(path: str) -> LossFunction:
    """Import a loss and try it on two made-up tokens; the returned function checks each result.

    ConfigError if it is not found, has another signature, or does not return a loss.
    """
    function = resolve_function(
        path, key=LOSS, signature="(inputs: LossInputs, algorithm: AlgorithmConfig)", args=(None, None)
    )

    def call_checked(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
        result = _call(function, LOSS, path, inputs, algorithm)
        fault = _find_loss_fault(result, len(inputs.logprobs))
        if fault is not None:
            raise TrainingError(f"{LOSS}={path}: {fault}")
        loss, metrics = result
        return loss, metrics

    try:
        loss, _ = call_checked(_make_example_inputs(), AlgorithmConfig())
    except TrainingError as error:
        raise ConfigError(str(error)) from error
    if not bool(torch.isfinite(loss).all()):
        raise ConfigError(
            f"{LOSS}={path}: expected finite losses of two ordinary tokens, got {loss.tolist()}"
        )
    return call_checked


def load_advantage(path: str) -> AdvantageFunction:
    """Import an advantage function; the returned function checks each result."""
    function = resolve_function(
        path, key=ADVANTAGE, signature="(rewards, *, normalize_std)", args=([0.0],), normalize_std=True
    )

    def call_checked(rewards: Sequence[float], *, normalize_std: bool) -> Sequence[float]:
        result = _call(function, ADVANTAGE, path, rewards, normalize_std=normalize_std)
        try:
            advantages = [float(value) for value in result]
        except (TypeError, ValueError):
            advantages = []
        if len(advantages) != len(rewards) or not all(map(math.isfinite, advantages)):
            raise TrainingError(
                f"{ADVANTAGE}={path}: expected {len(rewards)} finite advantages, one a reward, got {result!r:.200} for "
                f"{list(rewards)!r:.200}"
            )
        return advantages

    return call_checked


def load_group_filter(path: str) -> FilterFunction:
    """Import a group filter; the returned function checks each result."""
    function = resolve_function(
        path, key=GROUP_FILTER, signature="(group: Group, rewards)", args=(None, [0.0])
    )

    def call_checked(group: Group, rewards: Sequence[float]) -> str | None:
        result = _call(function, GROUP_FILTER, path, group, rewards)
        if result is not None and not (isinstance(result, str) and result):
            raise TrainingError(
                f"{GROUP_FILTER}={path}: expected a reason in words, or None for a group that is trained, "
                f"got {result!r:.200}"
            )
        return result

    return call_checked


def _call(function: Callable[..., Any], key: str, path: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise TrainingError(f"{key}={path} raised {type(error).__name__}: {error}") from error


def _find_loss_fault(result: object, tokens: int) -> str | None:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        return f"expected a pair (loss of each token, metrics by name), got {type(result).__name__}"
    for name, value in [("the loss", result[0]), *result[1].items()]:
        if not isinstance(value, Tensor):
            return f"expected {name} as a tensor of shape [{tokens}], got {type(value).__name__}"
        if value.shape != (tokens,):
            return (
                f"expected {name} of shape [{tokens}], one number a token, got {list(value.shape)}; sums and means are "
                "the trainer's (algorithm.aggregation)"
            )
    if not result[0].requires_grad:
        return "expected a loss with gradient, got one without; it has to depend on inputs.logprobs"
    return None


def _make_example_inputs() -> LossInputs:
    """Return inputs for two made-up tokens, with every optional input set but sequence ratios."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    old_logprobs = torch.tensor([-1.1, -1.9])
    return LossInputs(
        logprobs=logprobs,
        entropy=torch.tensor([0.5, 0.7], requires_grad=True),
        old_logprobs=old_logprobs,
        advantages=torch.tensor([1.0, -1.0]),
        reference_logprobs=old_logprobs,
        proximal_logprobs=old_logprobs,
    )
