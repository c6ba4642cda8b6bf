"""What `algorithm.*` names by dotted paths: a loss, advantages, a filter of groups; built-in ones too.

They are called the same way whoever wrote them, so that one may call another and change what comes of it.
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
    """`algorithm.loss`: the loss of each token, in the trainer, pass by pass."""

    def __call__(
        self, inputs: LossInputs, algorithm: AlgorithmConfig, /
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Say what each token costs.

        A pass has a part of the batch, and a trajectory's tokens may be in several: what a token costs may depend on
        what is known of it alone. The trainer sums the costs, each times the weight that `algorithm.aggregation` gives
        its token, over all passes and ranks.

        Args:
            inputs: What is known of T loss tokens, each of shape [T].
            algorithm: `algorithm.*` where the run stands: `entropy_coef` is what is left of it, and `kl_coef` 0 where
                the divergence is in the reward.

        Returns:
            The loss of each token, with gradient, to be minimised, shape [T]; and metrics without gradient, by the
            names that the log uses, each of shape [T], of which the mean over all tokens is logged.
        """


class AdvantageFunction(Protocol):
    """`algorithm.advantage`: how good siblings were, beside each other. In the controller, in a thread.

    With `algorithm.kl_in=reward` the trainer calls it, once it knows the divergence that rewards are lowered by.
    """

    def __call__(self, rewards: Sequence[float], /, *, normalize_std: bool) -> Sequence[float]:
        """Say how good each was.

        Args:
            rewards: Of a group's siblings, the penalty of length taken off, shape [G]; G may be smaller than
                `rollout.group_size`, where siblings were lost.
            normalize_std: `algorithm.normalize_std`.

        Returns:
            One a sibling, which all of its tokens share, shape [G].
        """


class FilterFunction(Protocol):
    """`algorithm.group_filter`: which groups are trained. In the controller, on its event loop: it must not block."""

    def __call__(self, group: Group, rewards: Sequence[float], /) -> str | None:
        """Say why a group is not worth training.

        It is asked while a step has refills left (`algorithm.max_refills`), and should depend on nothing but its
        arguments: a run with `deterministic` is repeated otherwise.

        Args:
            group: Finished.
            rewards: What its siblings are trained with, the penalty of length taken off, shape [G].

        Returns:
            The reason, which `groups.jsonl` shows; None where the group is trained.
        """


LOSS, ADVANTAGE, GROUP_FILTER = "algorithm.loss", "algorithm.advantage", "algorithm.group_filter"


def load_loss(path: str) -> LossFunction:
    """Import a loss, and call it once with two made-up tokens; its results are checked.

    ConfigError where there is none, it cannot be called so, or what it gives is no loss.
    """
    function = resolve_function(
        path, key=LOSS, signature="(inputs: LossInputs, algorithm: AlgorithmConfig)", args=(None, None)
    )

    def checked(inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
        given = _call(function, LOSS, path, inputs, algorithm)
        fault = _fault_of_loss(given, len(inputs.logprobs))
        if fault is not None:
            raise TrainingError(f"{LOSS}={path}: {fault}")
        loss, metrics = given
        return loss, metrics

    try:
        loss, _ = checked(_made_up(), AlgorithmConfig())
    except TrainingError as error:
        raise ConfigError(str(error)) from error
    if not bool(torch.isfinite(loss).all()):
        raise ConfigError(
            f"{LOSS}={path}: expected finite losses of two ordinary tokens, got {loss.tolist()}"
        )
    return checked


def load_advantage(path: str) -> AdvantageFunction:
    """Import what makes advantages of a group's rewards; its results are checked."""
    function = resolve_function(
        path, key=ADVANTAGE, signature="(rewards, *, normalize_std)", args=([0.0],), normalize_std=True
    )

    def checked(rewards: Sequence[float], *, normalize_std: bool) -> Sequence[float]:
        given = _call(function, ADVANTAGE, path, rewards, normalize_std=normalize_std)
        try:
            advantages = [float(value) for value in given]
        except (TypeError, ValueError):
            advantages = []
        if len(advantages) != len(rewards) or not all(map(math.isfinite, advantages)):
            raise TrainingError(
                f"{ADVANTAGE}={path}: expected {len(rewards)} finite advantages, one a reward, got {given!r:.200} for "
                f"{list(rewards)!r:.200}"
            )
        return advantages

    return checked


def load_group_filter(path: str) -> FilterFunction:
    """Import what refuses groups; its results are checked."""
    function = resolve_function(
        path, key=GROUP_FILTER, signature="(group: Group, rewards)", args=(None, [0.0])
    )

    def checked(group: Group, rewards: Sequence[float]) -> str | None:
        given = _call(function, GROUP_FILTER, path, group, rewards)
        if given is not None and not (isinstance(given, str) and given):
            raise TrainingError(
                f"{GROUP_FILTER}={path}: expected a reason in words, or None for a group that is trained, "
                f"got {given!r:.200}"
            )
        return given

    return checked


def _call(function: Callable[..., Any], key: str, path: str, *args: Any, **named: Any) -> Any:
    try:
        return function(*args, **named)
    except Exception as error:
        raise TrainingError(f"{key}={path} raised {type(error).__name__}: {error}") from error


def _fault_of_loss(given: object, tokens: int) -> str | None:
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)):
        return f"expected a pair (loss of each token, metrics by name), got {type(given).__name__}"
    for name, value in [("the loss", given[0]), *given[1].items()]:
        if not isinstance(value, Tensor):
            return f"expected {name} as a tensor of shape [{tokens}], got {type(value).__name__}"
        if value.shape != (tokens,):
            return (
                f"expected {name} of shape [{tokens}], one number a token, got {list(value.shape)}; sums and means are "
                "the trainer's (algorithm.aggregation)"
            )
    if not given[0].requires_grad:
        return "expected a loss with gradient, got one without; it has to depend on inputs.logprobs"
    return None


def _made_up() -> LossInputs:
    """Of two tokens, with everything that a loss may be given."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    before = torch.tensor([-1.1, -1.9])
    return LossInputs(
        logprobs=logprobs,
        entropy=torch.tensor([0.5, 0.7], requires_grad=True),
        old_logprobs=before,
        advantages=torch.tensor([1.0, -1.0]),
        reference_logprobs=before,
        proximal_logprobs=before,
    )
