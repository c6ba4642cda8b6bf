"""A real trainer under every algorithm: ratios that move, sequences over several passes, a critic that learns."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from train_samples import train_sample
from trainer_ranks import alone, assert_close, batch, branching_batch, copied

from rl_bridge.algorithms.policy_loss import LossInputs
from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.config import PRESETS
from rl_bridge.errors import NonFiniteLossError
from rl_bridge.types import TrainSample

pytestmark = pytest.mark.heavy


Train = Callable[..., Any]


@pytest.fixture
def train(tiny_policy: Path, tmp_path: Path) -> Train:
    def make(algorithm: dict[str, Any], **options: Any) -> Any:
        return alone(tiny_policy, tmp_path, algorithm=algorithm, **options)

    return make


def on_policy(trainer: Any, one: TrainBatch) -> TrainBatch:
    return replace(one, old_logprobs=trainer.logprobs(one))


def gradients(model: Any) -> list[Tensor]:
    return [parameter.grad.full_tensor().clone() for parameter in model.module.parameters()]


def recorded_gradients(trainer: Any, one: TrainBatch) -> list[Tensor]:
    """The gradients of the one update, before they are applied."""
    found: list[Tensor] = []
    trainer._optimizer.step = lambda: found.extend(gradients(trainer._model))
    trainer.step(one)
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_ratios_move_and_some_are_clipped_under_every_preset(train: Train, name: str) -> None:
    algorithm = {"name": name, "entropy_coef": 0.01}
    trainer = train(algorithm, updates_per_iteration=6, learning_rate=5e-3)
    figures = trainer.step(on_policy(trainer, batch(1, rows=48)))
    assert all(np.isfinite(value) for value in figures.values())
    assert figures["loss/ratio_mean"] != pytest.approx(1.0, abs=1e-6)
    assert 0.0 < figures["loss/clip_fraction_low"] + figures["loss/clip_fraction_high"] < 1.0
    assert figures["mismatch/logprob_max"] < 1e-5
    # A random policy over some 40 words is nearly uniform.
    assert 3.0 < figures["policy/entropy"] < 4.5
    assert ("critic/loss" in figures) == (name == "ppo")


@pytest.mark.parametrize("budget", [4096, 64])
@pytest.mark.parametrize("name", PRESETS)
def test_shared_prefixes_change_no_update(train: Train, name: str, budget: int) -> None:
    one, gradients_of, tokens, figures = branching_batch(3), [], [], []
    for shares in (True, False):
        algorithm = {"name": name, "entropy_coef": 0.01}
        trainer = train(algorithm, share_prefixes=shares, tokens_per_pass=budget)
        figures.append(trainer.step(on_policy(trainer, one)))
        tokens.append(trainer._policy.passes.tokens)
        trainer = train(algorithm, share_prefixes=shares, tokens_per_pass=budget, max_grad_norm=1e9)
        gradients_of.append(recorded_gradients(trainer, on_policy(trainer, one)))
        figures[-1].pop("train/valid_token_share")
    assert tokens[0] < 0.6 * tokens[1]
    assert figures[0] == pytest.approx(figures[1], rel=1e-3, abs=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in gradients_of[1])
    for gradient, expected in zip(*gradients_of, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-5 * largest, rtol=0.0)


def test_ratios_of_sequences_that_several_passes_share(train: Train) -> None:
    """The gradient is that of exp(mean log rho) as autograd finds it with everything in one pass."""
    algorithm = {"name": "gspo", "clip_low": 0.05, "clip_high": 0.05}
    one = batch(2, rows=12, rows_a_trajectory=3)
    trajectories, index = np.unique(one.trajectory, return_inverse=True)
    advantages = np.array([1.0, 1.0, -1.0, -1.0], dtype=np.float32)
    log_ratios = np.array([0.0, 0.1, -0.1, 0.1], dtype=np.float32)  # the second and the third are clipped
    whole = train(algorithm, tokens_per_pass=4096, max_grad_norm=1e9)
    old = whole.logprobs(one) - log_ratios[index]
    one = replace(one, advantages=advantages[index], old_logprobs=old)
    parts = train(algorithm, tokens_per_pass=32, max_grad_norm=1e9)
    model = train(algorithm)._model
    with model.spmd():
        logprobs = model.outputs(model.pack(one)).logprobs
        loss, clipped = torch.zeros(()), 0
        for trajectory, advantage in zip(trajectories, advantages.tolist(), strict=True):
            of = torch.from_numpy(np.flatnonzero(one.trajectory == trajectory))
            ratio = torch.exp((logprobs[of] - torch.from_numpy(one.old_logprobs)[of]).mean())
            bounded = ratio.clamp(0.95, 1.05)
            clipped += bool(bounded * advantage < ratio * advantage)
            loss = loss - torch.minimum(ratio * advantage, bounded * advantage)
        (loss / len(trajectories)).backward()
    assert clipped == 2
    expected = gradients(model)
    for trainer in (whole, parts):
        for gradient, by_hand in zip(recorded_gradients(trainer, one), expected, strict=True):
            torch.testing.assert_close(gradient, by_hand, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("correction", ["truncated", "icepop", "decoupled"])
def test_ratios_are_against_what_the_trainer_computed_before_the_first_update(
    train: Train, correction: str
) -> None:
    trainer = train({"correction": correction, "correction_cap": 1.05, "correction_high": 1.05})
    one = on_policy(trainer, batch(3))
    # The engine had sampled with probabilities that are lower by a factor of exp(0.1).
    figures = trainer.step(replace(one, old_logprobs=one.old_logprobs - np.float32(0.1)))
    assert figures["loss/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert figures["mismatch/kl"] == pytest.approx(-0.1, abs=1e-4)
    assert figures["loss/correction_weight"] == pytest.approx(
        {"truncated": 1.05, "icepop": 0.0, "decoupled": 0.0}[correction], abs=1e-4
    )
    assert figures["loss/corrected_fraction"] == 1.0


def test_ratios_are_exactly_one_until_weights_change_in_half_precision_too(train: Train) -> None:
    trainer = train(
        {"name": "gspo", "correction": "truncated"},
        updates_per_iteration=3,
        tokens_per_pass=64,
        learning_rate=1e-30,
        dtype="bfloat16",
    )
    # Long enough that what else is in a pass rounds a row otherwise: with rows of 8 tokens it does not.
    figures = trainer.step(batch(8, rows=48, longest=30))
    assert figures["loss/ratio_mean"] == 1.0
    assert figures["loss/clip_fraction_low"] == figures["loss/clip_fraction_high"] == 0.0


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("updates", [1, 2])
def test_the_first_update_takes_old_logprobs_from_its_own_passes(
    train: Train, updates: int, ratio: str
) -> None:
    """The loss gets the same numbers, to the last bit, as from passes of their own, which are not made."""
    trainer = train(
        {"correction": "truncated", "ratio": ratio}, updates_per_iteration=updates, tokens_per_pass=64
    )
    one = batch(8, rows=48)
    passes = [len(update) for update in trainer._take_own_part(one).updates]
    assert len(passes) == updates
    assert passes[0] > 1
    expected = trainer.logprobs(one)
    seen: list[LossInputs] = []
    forwards: list[None] = []
    outputs, loss = trainer._model.outputs, trainer._policy._loss
    trainer._model.outputs = lambda *args, **options: (forwards.append(None), outputs(*args, **options))[1]
    trainer._policy._loss = lambda inputs, algorithm: (seen.append(inputs), loss(inputs, algorithm))[1]
    trainer.step(one)
    # With a gradient; of later updates before the first one; of later updates for the ratio of sequences.
    later = sum(passes[1:])
    assert len(forwards) == sum(passes) + later * (2 if ratio == "sequence" else 1)
    proximal = torch.cat(
        [inputs.proximal_logprobs for inputs in seen if inputs.proximal_logprobs is not None]
    )
    assert sorted(proximal.tolist()) == sorted(expected.tolist())
    for inputs in seen[: passes[0]]:
        assert inputs.proximal_logprobs is not None
        assert torch.equal(inputs.proximal_logprobs, inputs.logprobs)
        assert inputs.sequence_log_ratios is None or not inputs.sequence_log_ratios.any()


PPO = {"name": "ppo", "critic_learning_rate": 3e-3, "value_clip": None}


def test_the_critic_learns_what_states_are_worth(train: Train) -> None:
    trainer = train(PPO, learning_rate=1e-6)
    metrics = [trainer.step(batch(5)) for _ in range(15)]
    assert metrics[0]["critic/value_mean"] == 0.0
    assert metrics[0]["critic/explained_variance"] == 0.0
    assert metrics[-1]["critic/explained_variance"] > 0.5
    assert metrics[-1]["critic/loss"] < 0.5 * metrics[0]["critic/loss"]


def test_a_loss_of_the_critics_that_is_not_finite_changes_neither(train: Train) -> None:
    trainer = train(PPO)
    before, one = copied(trainer), batch(6)
    one.rewards[one.rewards != 0] *= np.float32(
        1e30
    )  # squares are beyond float32, whitened advantages are not
    with pytest.raises(NonFiniteLossError, match="in iteration 0"):
        trainer.step(one)
    assert_close(copied(trainer), before)
    # Nor is a gradient left: the next step is as if it had never been.
    assert trainer.step(batch(6)) == train(PPO).step(batch(6))


OWN = """
import torch
from rl_bridge.algorithms.policy_loss import policy_loss

def twice(inputs, settings):
    loss, metrics = policy_loss(inputs, settings)
    return 2.0 * loss, {**metrics, "mine/advantage": inputs.advantages}

def later_no_number(inputs, settings):
    loss, metrics = policy_loss(inputs, settings)
    return torch.where(torch.arange(len(loss)) > 1, torch.nan, loss), metrics

def first_alone(rewards, *, normalize_std):
    return [1.0] + [0.0] * (len(rewards) - 1)
"""


def test_functions_of_ones_own_in_the_trainer(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trainer_with(**algorithm: Any) -> Any:
        return train(algorithm, tokens_per_pass=64)

    (tmp_path / "own_algorithm.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    one = batch(0)
    figures, doubled = trainer_with().step(one), trainer_with(loss="own_algorithm:twice").step(one)
    assert doubled["loss/total"] == pytest.approx(2 * figures["loss/total"], rel=1e-6)
    assert doubled["train/grad_norm"] == pytest.approx(2 * figures["train/grad_norm"], rel=1e-5)
    assert doubled["mine/advantage"] == pytest.approx(one.advantages.mean(), abs=1e-6)
    assert doubled.keys() - figures.keys() == {"mine/advantage"}

    with pytest.raises(
        NonFiniteLossError, match=r"got loss nan .* of algorithm\.loss=own_algorithm:later_no_number"
    ):
        trainer_with(loss="own_algorithm:later_no_number").step(one)

    trainer = trainer_with(advantage="own_algorithm:first_alone", kl_coef=0.1, kl_in="reward")
    assert trainer._critic is None
    prepared = trainer._prepare(trainer._take_own_part(one.with_reference(one.old_logprobs))).batch
    first = np.isin(prepared.trajectory, np.unique(prepared.trajectory)[::4])
    assert prepared.advantages.tolist() == first.astype(np.float32).tolist()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_rejected_trajectory_is_as_if_it_were_not_there(
    policy: Path, tmp_path: Path, aggregation: str
) -> None:
    def rows(*, far: bool) -> list[TrainSample]:
        samples = []
        for number in range(6):
            tokens = [3 + number, 4, 5, 6 + number, 7][: 3 + number % 3]
            is_far = number in (1, 4)
            if is_far and not far:
                continue
            # The tiny policy gives each of its 30 or so words about the same probability.
            logprob = -9.0 if is_far else -3.5
            advantage = 1.0 - 0.4 * number
            mask = [0, *[1] * (len(tokens) - 1)]
            samples.append(
                train_sample(
                    tokens, mask, logprob=logprob, advantage=advantage, trajectory=number, group=number // 3
                )
            )
        return samples

    def step(folder: str, samples: list[TrainSample], **keys: Any) -> tuple[dict[str, float], Any]:
        trainer = alone(
            policy,
            tmp_path / folder,
            algorithm={"aggregation": aggregation, "objective": "reinforce", **keys},
        )
        return trainer.step(TrainBatch.from_samples(samples)), trainer

    told, rejecting = step("rejecting", rows(far=True), sequence_rejection=2.0)
    expected, without = step("without", rows(far=False))
    assert told["loss/rejected_share"] == pytest.approx(1 / 3)
    assert "loss/rejected_share" not in expected
    for name in ("loss/total", "train/grad_norm"):
        assert told[name] == pytest.approx(expected[name], rel=1e-4)
    assert_close(rejecting.hf_state_dict(), without.hf_state_dict(), atol=5e-5)
