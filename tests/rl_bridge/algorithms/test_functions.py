"""Functions named by a configuration: those of the documentation run, and invalid ones are refused."""

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rl_bridge.algorithms.functions import load_advantage, load_group_filter, load_loss
from rl_bridge.algorithms.policy_loss import LossInputs, policy_loss
from rl_bridge.config import AlgorithmConfig, Config
from rl_bridge.errors import ConfigError, TrainingError
from rl_bridge.rollout.groups import make_group_filter
from rl_bridge.types import Ending, Group, Trajectory

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
EXAMPLE = PAGE.split("## Functions of your own\n")[1].split("```python\n")[1].split("```")[0]
PLAIN = AlgorithmConfig()


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The documentation's functions as the module `mine`."""
    module = ModuleType("mine")
    exec(EXAMPLE, module.__dict__)
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def inputs(count: int = 3) -> LossInputs:
    logprobs = -torch.arange(1.0, count + 1).requires_grad_()
    zeros = torch.zeros(count)
    return LossInputs(logprobs=logprobs, entropy=zeros, old_logprobs=zeros - 2.5, advantages=zeros + 1.0)


def test_the_documented_loss_wraps_the_one_that_is_built_in() -> None:
    ours, metrics = load_loss("mine:loss")(inputs(), PLAIN)
    plain, plain_metrics = load_loss(PLAIN.loss)(inputs(), PLAIN)
    assert torch.equal(plain, policy_loss(inputs(), PLAIN)[0])
    # Ratios exp(1.5), exp(0.5), exp(-0.5): the first is beyond exp(1).
    assert ours.tolist() == pytest.approx([0.5 * plain[0].item(), *plain[1:].tolist()])
    assert metrics["loss/far_fraction"].tolist() == [1.0, 0.0, 0.0]
    assert metrics.keys() - plain_metrics.keys() == {"loss/far_fraction"}


def test_the_documented_advantage_and_filter() -> None:
    found = load_advantage("mine:advantage")([3.0, 0.0, 0.0], normalize_std=True)
    assert list(found) == [3.0, -1.5, -1.5]
    assert list(load_advantage("mine:advantage")([2.0], normalize_std=False)) == [0.0]
    config = Config.model_validate(
        {
            "rollout": {"batch_size": 8, "group_size": 2},
            "data": {"source": "prompts.jsonl"},
            "reward": {"function": "package.rewards.right"},
            "algorithm": {"group_filter": "mine:group_filter", "max_refills": 3},
        }
    )
    chosen = make_group_filter(config)
    assert chosen.refills == 12
    assert chosen.function is not None
    group = Group(seed=0, trajectories=[Trajectory(seed=0, ending=Ending.COMPLETED, reward=0.0)] * 2)
    assert chosen.function(group, [0.0, -1.0]) == "nobody solved it"
    assert chosen.function(group, [1.0, 1.0]) == "rewards without variance"
    assert chosen.function(group, [1.0, 0.0]) is None


async def slow(inputs: LossInputs, settings: AlgorithmConfig) -> Any:
    return inputs


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda inputs, _: (inputs.logprobs.sum(), {}), r"the loss of shape \[2\].* got \[\]"),
        (lambda inputs, _: inputs.logprobs, r"a pair \(loss of each token, metrics by name\), got Tensor"),
        (lambda inputs, _: (inputs.advantages, {}), "a loss with gradient, got one without"),
        (
            lambda inputs, _: (inputs.logprobs, {"mine": inputs.logprobs.mean()}),
            r"mine of shape \[2\].* got \[\]",
        ),
        (lambda inputs, _: (inputs.logprobs * math.nan, {}), r"finite losses .* got \[nan, nan\]"),
        (lambda inputs, _: {}["entropy_bonus"], "KeyError: 'entropy_bonus'"),
        (lambda inputs: inputs, r"a function of \(inputs: LossInputs, algorithm: AlgorithmConfig\)"),
        (slow, "a plain function, got a coroutine function"),
        (3, "a plain function, got int"),
    ],
)
def test_invalid_loss_function_is_refused_when_loaded(
    function: object, message: str, module: ModuleType
) -> None:
    module.own = function  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=rf"^algorithm\.loss=mine:own:?.* {message}"):
        load_loss("mine:own")


def test_loss_of_another_shape_is_refused_later_too(module: ModuleType) -> None:
    module.own = lambda inputs, _: (inputs.logprobs[:2], {})  # type: ignore[attr-defined]
    loss = load_loss("mine:own")
    with pytest.raises(TrainingError, match=r"mine:own: .* of shape \[3\].* got \[2\]"):
        loss(inputs(), PLAIN)


@pytest.mark.parametrize(
    ("given", "got"), [([0.0], r"\[0\.0\]"), ([math.inf] * 2, r"\[inf, inf\]"), (None, "None")]
)
def test_invalid_advantages_are_refused(given: object, got: str, module: ModuleType) -> None:
    module.own = lambda rewards, *, normalize_std: given  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match=rf"^algorithm\.advantage=mine:own: .* got {got}"):
        load_advantage("mine:own")([1.0, 0.0], normalize_std=True)


def test_invalid_refusal_reason_of_a_filter_is_refused(module: ModuleType) -> None:
    module.own = lambda group, rewards: True  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match=r"a reason in words, or None .* got True"):
        load_group_filter("mine:own")(Group(seed=0), [1.0])
    with pytest.raises(ConfigError, match="has no 'group_filte'; did you mean 'group_filter'"):
        load_group_filter("mine:group_filte")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss": "mine.loss"}, "loss"),
        ({"advantage": "groups"}, "advantage"),
        ({"group_filter": "mine"}, "group_filter"),
        ({"name": "dapo", "group_filter": "mine:group_filter"}, r"dynamic_sampling=false"),
    ],
)
def test_invalid_functions_are_refused_by_the_configuration(keys: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig.model_validate(keys)
