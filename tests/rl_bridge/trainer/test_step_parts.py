"""What a step is made of, by hand: advantages and loss settings, passes over parts of a batch, figures."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from trainer_ranks import batch, settings

from rl_bridge.algorithms.policy_loss import LossSettings
from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.config import AlgorithmConfig
from rl_bridge.trainer.figures import FigureAccumulator, figures_of, shown_figures
from rl_bridge.trainer.passes import Passes
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


class Table:
    """Stands for a model of several data-parallel ranks, of which this is one: a number for each token's target."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.data_rank, self.data_ranks = rank, ranks
        self.numbers = torch.arange(40, dtype=torch.float32, requires_grad=True)
        self.rows: list[int] = []
        self.idled = 0

    @contextlib.contextmanager
    def spmd(self) -> Any:
        yield

    def idle(self) -> Tensor:
        self.idled += 1
        return self.numbers.sum() * 0.0

    def sum_over_data(self, values: Tensor) -> Tensor:
        return values

    def of(self, micro: TrainBatch) -> Tensor:
        self.rows.append(len(micro.packed().tokens))
        return self.numbers[torch.from_numpy(micro.target)]


def passes(table: Table, folder: Path, **options: Any) -> Passes:
    accumulation = options.pop("accumulation", 1)
    return Passes(
        table,  # type: ignore[arg-type]
        replace(settings(folder, folder=folder, **options), gradient_accumulation_steps=accumulation),
    )


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 3, 4096])
def test_ranks_add_up_to_the_whole(tmp_path: Path, ranks: int, rows: int) -> None:
    one = batch(0)
    weights = torch.linspace(0.0, 1.0, len(one))
    values, gradient, total = np.zeros(len(one), dtype=np.float32), torch.zeros(40), 0.0
    made = set()
    for rank in range(ranks):
        table = Table(rank, ranks)
        own = passes(table, tmp_path, micro_batch_size=rows)

        def loss(micro: TrainBatch, chosen: NDArray[np.int64], table: Table = table) -> Tensor:
            return (table.of(micro) * weights[torch.from_numpy(chosen)]).sum()

        values += own.evaluate(one, table.of)
        assert all(number <= rows for number in table.rows)
        made.add(len(table.rows) + table.idled)
        total += own.backward(one, loss)
        assert table.numbers.grad is not None
        gradient += table.numbers.grad
    assert len(made) == 1, "a rank would wait for the others"
    assert values.tolist() == one.target.tolist()
    expected = torch.zeros(40).index_add(0, torch.from_numpy(one.target), weights)
    torch.testing.assert_close(gradient, expected)
    assert total == pytest.approx(float((weights * torch.from_numpy(one.target)).sum()), rel=1e-5)


def test_accumulation_asks_for_more_passes(tmp_path: Path) -> None:
    made = []
    for accumulation in (1, 4):
        table = Table(0, 1)
        passes(table, tmp_path, micro_batch_size=4096, accumulation=accumulation).evaluate(batch(1), table.of)
        made.append(len(table.rows))
    assert made[0] == 1
    assert 4 <= made[1] <= 5


ALWAYS = {
    "loss/ratio_mean",
    "loss/clip_fraction_low",
    "loss/clip_fraction_high",
    "policy/entropy",
    "mismatch/kl",
    "train/valid_token_share",
}


def per_token(*ratio: float, **others: list[float]) -> dict[str, torch.Tensor]:
    zeros = [0.0] * len(ratio)
    names = {"ratio": list(ratio), "logprob_difference": zeros, **others}
    return {name: torch.tensor(values) for name, values in names.items()}


def logged(accumulator: FigureAccumulator, shown: frozenset[str]) -> dict[str, float]:
    return figures_of(accumulator.sums, accumulator.largest, shown=shown)


def test_means_over_passes_of_unequal_size() -> None:
    accumulator = FigureAccumulator()
    accumulator.add(
        per_token(
            1.0, 2.0, 3.0, clipped_low=[1, 0, 0], entropy=[0.5, 0.5, 2.0], logprob_difference=[0.2, -0.4, 1.0]
        ),
        fresh=torch.tensor([True, True, False]),
    )
    accumulator.add(per_token(6.0, clipped_high=[1], logprob_difference=[0.3]), fresh=torch.tensor([True]))
    accumulator.add(per_token(3.0, 3.0, entropy=[0.75, 0.75], logprob_difference=[7.0, 7.0]), fresh=None)
    accumulator.add_rows(valid=3, padded=4)
    accumulator.add_rows(valid=3, padded=8)
    assert logged(accumulator, shown_figures(AlgorithmConfig(), with_reference=False)) == {
        "loss/ratio_mean": 3.0,
        "loss/clip_fraction_low": pytest.approx(1 / 6),
        "loss/clip_fraction_high": pytest.approx(1 / 6),
        "policy/entropy": 0.75,
        "mismatch/logprob_max": pytest.approx(0.4),
        "mismatch/logprob_mean": pytest.approx(0.3),
        # The mean of log mu - log pi before the first update, over tokens of any age: -(0.2 - 0.4 + 1 + 0.3) / 4.
        "mismatch/kl": pytest.approx(-0.275),
        "train/valid_token_share": 0.5,
    }


@pytest.mark.parametrize(
    ("algorithm", "with_reference", "more"),
    [
        ({}, False, set()),
        ({"kl_coef": 0.1}, True, {"policy/kl_to_reference"}),
        ({"dual_clip": 3.0}, False, {"loss/dual_clip_fraction"}),
        ({"correction": "decoupled"}, False, {"loss/correction_weight", "loss/corrected_fraction"}),
    ],
)
def test_what_is_told_beside_what_always_is(
    algorithm: dict[str, Any], with_reference: bool, more: set[str]
) -> None:
    accumulator = FigureAccumulator()
    parts = {"kl": [0.5], "dual_clipped": [1.0], "correction": [1.5], "corrected": [1.0]}
    accumulator.add(per_token(1.0, **parts), fresh=torch.tensor([False]))
    shown = shown_figures(AlgorithmConfig.model_validate(algorithm), with_reference=with_reference)
    found = logged(accumulator, shown)
    assert set(found) == ALWAYS | more
    assert [found[name] for name in sorted(more)] == [
        {"policy/kl_to_reference": 0.5, "loss/correction_weight": 1.5}.get(name, 1.0) for name in sorted(more)
    ]
