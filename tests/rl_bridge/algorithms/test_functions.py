"""Functions named by a configuration: those of the documentation run, and invalid ones are refused."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge.algorithms.functions import load_advantage, load_group_filter, load_loss
from rl_bridge.algorithms.policy_loss import LossInputs, policy_loss
from rl_bridge.config import AlgorithmConfig, Config
from rl_bridge.errors import ConfigError, TrainingError
from rl_bridge.rollout.groups import make_group_filter
from rl_bridge.types import Group

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
EXAMPLE = PAGE.split("## Functions of your own\n")[1].split("```python\n")[1].split("```")[0]
WRONG = """
import math
import torch

def of_a_sum(inputs, settings):
    return inputs.logprobs.sum(), {}

def alone(inputs, settings):
    return inputs.logprobs

def without_gradient(inputs, settings):
    return inputs.advantages, {}

def of_a_metric(inputs, settings):
    return inputs.logprobs, {"mine": inputs.logprobs.mean()}

def no_number(inputs, settings):
    return inputs.logprobs * math.nan, {}

def at_first(inputs, settings):
    return inputs.logprobs[:2], {}

def raising(inputs, settings):
    raise KeyError("entropy_bonus")

def one_argument(inputs):
    return inputs

async def slow(inputs, settings):
    return inputs

def too_few(rewards, *, normalize_std):
    return rewards[1:]

def infinite(rewards, *, normalize_std):
    return [math.inf] * len(rewards)

def none_at_all(rewards, *, normalize_std):
    return None

def yes(group, rewards):
    return True

THREE = 3
"""
PLAIN = AlgorithmConfig()


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mine.py").write_text(EXAMPLE)
    (tmp_path / "wrong_functions.py").write_text(WRONG)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("mine", "wrong_functions"):
        sys.modules.pop(name, None)


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
    group = Group(seed=0)
    assert chosen.function(group, [0.0, -1.0]) == "nobody solved it"
    assert chosen.function(group, [1.0, 1.0]) == "rewards without variance"
    assert chosen.function(group, [1.0, 0.0]) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("of_a_sum", r"the loss of shape \[2\].* got \[\]"),
        ("alone", r"a pair \(loss of each token, metrics by name\), got Tensor"),
        ("without_gradient", "a loss with gradient, got one without"),
        ("of_a_metric", r"mine of shape \[2\].* got \[\]"),
        ("no_number", r"finite losses .* got \[nan, nan\]"),
        ("raising", "KeyError: 'entropy_bonus'"),
        ("one_argument", r"a function of \(inputs: LossInputs, algorithm: AlgorithmConfig\)"),
        ("slow", "a plain function, got a coroutine function"),
        ("THREE", "a plain function, got int"),
    ],
)
def test_invalid_loss_function_is_refused_when_loaded(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^algorithm\.loss=wrong_functions:{name}:?.* {message}"):
        load_loss(f"wrong_functions:{name}")


def test_loss_of_another_shape_is_refused_later_too() -> None:
    loss = load_loss("wrong_functions:at_first")
    with pytest.raises(TrainingError, match=r"wrong_functions:at_first: .* of shape \[3\].* got \[2\]"):
        loss(inputs(), PLAIN)


@pytest.mark.parametrize(
    ("name", "got"), [("too_few", r"\[0\.0\]"), ("infinite", r"\[inf, inf\]"), ("none_at_all", "None")]
)
def test_invalid_advantages_are_refused(name: str, got: str) -> None:
    advantage = load_advantage(f"wrong_functions:{name}")
    with pytest.raises(TrainingError, match=rf"^algorithm\.advantage=.*:{name}: .* got {got}"):
        advantage([1.0, 0.0], normalize_std=True)


def test_invalid_refusal_reason_of_a_filter_is_refused() -> None:
    chosen: Any = load_group_filter("wrong_functions:yes")
    with pytest.raises(TrainingError, match=r"expected a reason in words, or None .* got True"):
        chosen(None, [1.0])
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
