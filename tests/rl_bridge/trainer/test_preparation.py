"""What a batch is completed with before the first update, by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl_bridge.algorithms.policy_loss import LossSettings
from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.config import AlgorithmConfig
from rl_bridge.trainer.preparation import loss_settings, with_advantages
from rl_bridge.types import NO_VERSION, TrainSample


def sample(tokens: int, *, trajectory: int, group: int, reward: float, advantage: float) -> TrainSample:
    return TrainSample(
        tokens=[1] + [2] * tokens,
        loss_mask=[False] + [True] * tokens,
        logprobs=[0.0] + [-1.0] * tokens,
        versions=[NO_VERSION] + [0] * tokens,
        advantage=advantage,
        trajectory=trajectory,
        group=group,
        reward=reward,
    )


# Group 0: a trajectory of two rows, three tokens in all, and one of one token. Group 1: two of one token each.
BATCH = TrainBatch.from_samples(
    [
        sample(2, trajectory=0, group=0, reward=1.0, advantage=0.5),
        sample(1, trajectory=0, group=0, reward=1.0, advantage=0.5),
        sample(1, trajectory=1, group=0, reward=0.0, advantage=-0.5),
        sample(1, trajectory=2, group=1, reward=4.0, advantage=1.0),
        sample(1, trajectory=3, group=1, reward=2.0, advantage=-1.0),
    ]
)
# x = log(pi / pi_ref) of each token: 1, 1, -1, 2, 0, 0.
REFERENCE = np.array([-2, -2, 0, -3, -1, -1], dtype=np.float32)


def algorithm(**keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(keys)


def test_a_trajectory_earns_its_reward_with_its_last_token() -> None:
    assert BATCH.rewards.tolist() == [0.0, 0.0, 1.0, 0.0, 4.0, 2.0]
    assert BATCH.group.tolist() == [0, 0, 0, 0, 1, 1]
    rows = [sample(tokens, trajectory=7, group=0, reward=5.0, advantage=0.0) for tokens in (3, 2)]
    assert TrainBatch.from_samples(rows).rewards.tolist() == [0.0, 0.0, 0.0, 0.0, 5.0]


def test_what_is_known_already_stays() -> None:
    assert with_advantages(BATCH, algorithm()) is BATCH
    assert with_advantages(BATCH, algorithm(kl_in="reward")) is BATCH
    assert (
        with_advantages(BATCH.with_reference(REFERENCE), algorithm(kl_coef=0.5)).advantages
        is BATCH.advantages
    )


def test_the_divergence_in_the_reward_of_groups() -> None:
    batch = with_advantages(
        BATCH.with_reference(REFERENCE),
        algorithm(kl_coef=0.1, kl_in="reward", kl_estimator="k1", normalize_std=False),
    )
    # Group 0: 1 - 0.1 * (1 + 1 - 1) = 0.9 and 0 - 0.2: mean 0.35. Group 1: 4 and 2.
    assert batch.advantages.tolist() == pytest.approx([0.55, 0.55, 0.55, -0.55, 1.0, -1.0])
    normalised = with_advantages(
        BATCH.with_reference(REFERENCE), algorithm(kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    )
    assert normalised.advantages.tolist() == pytest.approx([1, 1, 1, -1, 1, -1], abs=1e-5)


def test_the_divergence_in_the_reward_needs_a_reference() -> None:
    with pytest.raises(ValueError, match=r"kl_coef is 0\.1"):
        with_advantages(BATCH, algorithm(kl_coef=0.1, kl_in="reward"))


VALUES = np.array([0.5, 0.0, 0.25, 1.0, 3.0, 3.0], dtype=np.float32)


def test_advantages_by_the_critic() -> None:
    plain = algorithm(name="ppo", gamma=1.0, gae_lambda=1.0, normalize_std=False)
    batch = with_advantages(BATCH, plain, values=VALUES)
    # The trajectory's reward less the value, token by token; the second row goes on where the first ended.
    assert batch.advantages.tolist() == pytest.approx([0.5, 1.0, 0.75, -1.0, 1.0, -1.0])
    assert batch.returns is not None
    assert batch.returns.tolist() == pytest.approx([1.0, 1.0, 1.0, 0.0, 4.0, 2.0])
    assert batch.values is not None
    assert batch.values.tolist() == VALUES.tolist()


def test_advantages_by_the_critic_are_whitened_over_the_batch() -> None:
    batch = with_advantages(BATCH, algorithm(name="ppo", gamma=1.0, gae_lambda=1.0), values=VALUES)
    # Mean 1.25 / 6 = 0.2083333, deviation sqrt((0.25 + 1 + 0.5625 + 1 + 1 + 1) / 6 - 0.0434028) = 0.8710227.
    assert batch.advantages.tolist() == pytest.approx(
        [0.334855, 0.908893, 0.621874, -1.387258, 0.908893, -1.387258], abs=1e-5
    )
    assert batch.returns is not None
    assert batch.returns.tolist() == pytest.approx([1.0, 1.0, 1.0, 0.0, 4.0, 2.0])


def test_the_divergence_in_the_reward_of_tokens() -> None:
    kl = algorithm(
        name="ppo",
        gamma=1.0,
        gae_lambda=1.0,
        normalize_std=False,
        kl_coef=0.1,
        kl_in="reward",
        kl_estimator="k1",
    )
    batch = with_advantages(BATCH.with_reference(REFERENCE), kl, values=np.zeros(6, dtype=np.float32))
    # Token rewards -0.1, -0.1, 1.1; -0.2; 4; 2; what is still to come at each.
    assert batch.advantages.tolist() == pytest.approx([0.9, 1.0, 1.1, -0.2, 4.0, 2.0])


def test_parts_take_everything_along() -> None:
    whole = replace(
        with_advantages(BATCH.with_reference(REFERENCE), algorithm(name="ppo"), values=VALUES),
        proximal_logprobs=np.arange(6, dtype=np.float32),
    )
    part = whole.take(np.array([4, 2]))
    for name in ("group", "rewards", "reference_logprobs", "proximal_logprobs", "values", "returns"):
        assert getattr(part, name).tolist() == getattr(whole, name)[[4, 2]].tolist()


def test_the_loss_at_a_point_of_the_run() -> None:
    keys: dict[str, Any] = {
        "objective": "clip",
        "clip_low": 0.1,
        "clip_high": 0.4,
        "dual_clip": 3.0,
        "kl_estimator": "k2",
        "correction": "icepop",
        "correction_cap": 1.5,
        "correction_low": 0.3,
        "correction_high": 4.0,
    }
    config = algorithm(**keys, kl_coef=0.5, entropy_coef=0.2, entropy_hold=0.5, entropy_final_factor=0.1)
    # Half of the way down from 0.2 to 0.02.
    found = loss_settings(config, progress=0.75)
    assert found.entropy_coef == pytest.approx(0.11)
    assert replace(found, entropy_coef=0.0) == LossSettings(**keys, kl_coef=0.5, entropy_coef=0.0)
    in_reward = config.model_copy(update={"kl_in": "reward"})
    assert loss_settings(in_reward, progress=0.0).kl_coef == 0.0
