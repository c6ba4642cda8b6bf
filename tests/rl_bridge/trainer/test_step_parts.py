"""Parts of a training step, by hand: advantages, loss settings, passes over parts of a batch, metrics."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from train_samples import train_sample
from trainer_ranks import batch, branching_batch, settings

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.config import AlgorithmConfig
from rl_bridge.config.trainer import Checkpointing
from rl_bridge.errors import ConfigError, TrainingError
from rl_bridge.planning import ModelSize, with_checkpointing
from rl_bridge.titan.architecture import read_architecture
from rl_bridge.trainer.metrics import LossMetrics, StepMeter, peak_flops
from rl_bridge.trainer.passes import Passes, rank_batches
from rl_bridge.trainer.policy import loss_settings, with_advantages
from rl_bridge.trainer.weights import Offload, Readers
from tests.rl_bridge.planning.published_models import QWEN3_8B

# Group 0: a trajectory of two rows, three tokens in all, and one of one token. Group 1: two of one token each.
BATCH = TrainBatch.from_samples(
    [
        train_sample([1, 2, 2], [0, 1, 1], trajectory=0, group=0, reward=1.0, advantage=0.5),
        train_sample([1, 2], [0, 1], trajectory=0, group=0, reward=1.0, advantage=0.5),
        train_sample([1, 2], [0, 1], trajectory=1, group=0, reward=0.0, advantage=-0.5),
        train_sample([1, 2], [0, 1], trajectory=2, group=1, reward=4.0, advantage=1.0),
        train_sample([1, 2], [0, 1], trajectory=3, group=1, reward=2.0, advantage=-1.0),
    ]
)
# x = log(pi / pi_ref) of each token: 1, 1, -1, 2, 0, 0.
REFERENCE = np.array([-2, -2, 0, -3, -1, -1], dtype=np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the config.json of a published model, and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return tmp_path


def algorithm(**keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(keys)


def advantages_of(batch: TrainBatch, algorithm: AlgorithmConfig, **options: Any) -> TrainBatch:
    def gather(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        whole = np.zeros(batch.total)
        whole[batch.index] = numbers
        return whole

    return with_advantages(batch, algorithm, **options, gather_values=gather)


def test_the_divergence_in_the_reward_of_groups() -> None:
    keys: dict[str, Any] = {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    whole, plain = BATCH.with_reference(REFERENCE), algorithm(**keys, normalize_std=False)
    # Group 0: 1 - 0.1 * (1 + 1 - 1) = 0.9 and 0 - 0.2: mean 0.35. Group 1: 4 and 2.
    expected = [0.55, 0.55, 0.55, -0.55, 1.0, -1.0]
    assert advantages_of(whole, plain).advantages.tolist() == pytest.approx(expected)
    backwards = advantages_of(whole.take(np.arange(6)[::-1].copy()), plain)  # as a rank may have them
    assert backwards.advantages.tolist() == pytest.approx(expected[::-1])
    normalised = advantages_of(whole, algorithm(**keys)).advantages
    assert normalised.tolist() == pytest.approx([1, 1, 1, -1, 1, -1], abs=1e-5)


VALUES = np.array([0.5, 0.0, 0.25, 1.0, 3.0, 3.0], dtype=np.float32)


CRITIC: dict[str, Any] = {"name": "ppo", "gamma": 1.0, "gae_lambda": 1.0, "normalize_std": False}


def test_advantages_by_the_critic() -> None:
    batch = advantages_of(BATCH, algorithm(**CRITIC), values=VALUES)
    # The trajectory's reward less the value, token by token; the second row goes on where the first ended.
    assert batch.advantages.tolist() == pytest.approx([0.5, 1.0, 0.75, -1.0, 1.0, -1.0])
    assert batch.returns is not None
    assert batch.returns.tolist() == pytest.approx([1.0, 1.0, 1.0, 0.0, 4.0, 2.0])
    assert batch.values is not None
    assert batch.values.tolist() == VALUES.tolist()


def test_the_divergence_in_the_reward_of_tokens() -> None:
    kl = algorithm(**CRITIC, kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    batch = advantages_of(BATCH.with_reference(REFERENCE), kl, values=np.zeros(6, dtype=np.float32))
    # Token rewards -0.1, -0.1, 1.1; -0.2; 4; 2; what is still to come at each.
    assert batch.advantages.tolist() == pytest.approx([0.9, 1.0, 1.1, -0.2, 4.0, 2.0])


def test_the_loss_at_a_point_of_the_run() -> None:
    config = algorithm(
        objective="clip", kl_coef=0.5, entropy_coef=0.2, entropy_hold=0.5, entropy_final_factor=0.1
    )
    # Half of the way down from 0.2 to 0.02.
    found = loss_settings(config, progress=0.75)
    assert found.entropy_coef == pytest.approx(0.11)
    assert found.model_copy(update={"entropy_coef": 0.2}) == config
    in_reward = config.model_copy(update={"kl_in": "reward"})
    assert loss_settings(in_reward, progress=0.0).kl_coef == 0.0


class Table:
    """Stands for a model of several data-parallel ranks, of which this is one: a number for each token's target."""

    def __init__(self) -> None:
        self.numbers = torch.arange(40, dtype=torch.float32, requires_grad=True)
        self.passes: list[int] = []

    def spmd(self) -> Any:
        return contextlib.nullcontext()

    def idle(self) -> Tensor:
        self.passes.append(0)
        return self.numbers.sum() * 0.0

    def sum_over_data(self, values: Tensor) -> Tensor:
        return values

    def train_flops(self, part: TrainBatch) -> float:
        return 10.0 * len(part)

    def of(self, part: TrainBatch) -> Tensor:
        self.passes.append(int(part.computed.sum()))
        return self.numbers[torch.from_numpy(part.target)]


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize(("budget", "accumulation"), [(32, 1), (64, 3), (100_000, 1)])
def test_ranks_and_passes_add_up_to_the_whole(
    model: Path, ranks: int, budget: int, accumulation: int
) -> None:
    one = batch(0, rows_a_trajectory=3)
    options: dict[str, Any] = {
        "algorithm": {"aggregation": "token_mean"},
        "tokens_per_pass": budget,
        "gradient_accumulation_steps": accumulation,
        "updates_per_iteration": 2,
    }
    parts = rank_batches(one, settings(model, folder=model, **options), version=4, ranks=ranks)
    values, gradient, total = np.zeros(len(one)), torch.zeros(40), 0.0
    made: list[list[int]] = []
    flops = 0.0
    for mine in parts:
        table = Table()
        own = Passes(table)  # type: ignore[arg-type]
        values += own.gather_values(mine.batch, own.evaluate(mine, table.of))
        made.append(table.passes.copy())
        for update in range(2):

            def loss(part: TrainBatch, table: Table = table) -> Tensor:
                return (table.of(part) * torch.from_numpy(part.advantages)).sum()

            total += own.backward(mine, update, loss)
        assert own.tokens == sum(table.passes[len(made[-1]) :])  # of passes with a gradient alone
        flops += own.flops
        assert table.numbers.grad is not None
        gradient += table.numbers.grad
    assert flops == 10.0 * len(one)
    assert len({len(passes) for passes in made}) == 1, "a rank would wait for the others"
    assert len(made[0]) >= 2 * accumulation
    assert all(tokens <= budget for passes in made for tokens in passes)
    assert values.tolist() == one.target.tolist()
    advantages = torch.from_numpy(one.advantages)
    expected = torch.zeros(40).index_add(0, torch.from_numpy(one.target), advantages)
    torch.testing.assert_close(gradient, expected)
    assert total == pytest.approx(float((advantages * torch.from_numpy(one.target)).sum()), rel=1e-5)
    # A trajectory is in one update, and its tokens weigh what they weigh in that.
    assert sum(parts[0].sizes) == len(one)
    of_update = [
        set(np.concatenate([mine.batch.trajectory[np.concatenate(mine.updates[update])] for mine in parts]))
        for update in range(2)
    ]
    assert not of_update[0] & of_update[1]
    for mine in parts:
        for update, passes in enumerate(mine.updates):
            assert mine.batch.weights is not None
            assert mine.batch.weights[np.concatenate(passes)] == pytest.approx(1 / parts[0].sizes[update])


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("budget", [40, 64, 100_000])
def test_passes_with_shared_prefixes_keep_their_budget_and_divide_the_work(
    model: Path, ranks: int, budget: int
) -> None:
    one = branching_batch(1, trajectories=64)
    parts = rank_batches(one, settings(model, folder=model, tokens_per_pass=budget), version=0, ranks=ranks)
    passes = [[mine.batch.take(tokens) for tokens in mine.updates[0] if len(tokens)] for mine in parts]
    computed = [[int(of_pass.computed.sum()) for of_pass in own] for own in passes]
    assert max(map(max, computed)) <= budget
    indices = np.concatenate([of_pass.index for own in passes for of_pass in own])
    assert sorted(indices.tolist()) == list(range(len(one)))
    whole = int(replace(one, shares_prefixes=True).computed.sum())
    assert whole < 0.4 * one.lengths.sum()
    assert whole <= sum(map(sum, computed)) < 0.75 * one.lengths.sum()  # other passes compute prompts again
    if ranks == 1 and budget == 100_000:
        assert computed == [[whole]]
    if budget == 100_000:
        sums = [sum(own) for own in computed]
        assert max(sums) <= 1.4 * np.mean(sums)


def test_where_nothing_is_shared_or_the_model_cannot_rows_are_separate(model: Path) -> None:
    one = branching_batch(1)
    apart = replace(one, tokens=np.arange(len(one.tokens), dtype=np.int32))

    def shares(some: TrainBatch, **keys: Any) -> bool:
        (mine,) = rank_batches(some, settings(model, folder=model, **keys), version=0, ranks=1)
        return mine.batch.shares_prefixes

    assert shares(one)
    assert not shares(apart)
    assert not shares(one, share_prefixes=False)
    assert not shares(one, compile=True)
    assert not shares(one, dtype="bfloat16")


def test_a_trajectory_weighs_as_much_in_an_update_however_many_rows_it_has(model: Path) -> None:
    made = settings(model, folder=model, algorithm={"aggregation": "sequence_mean"})
    (mine,) = rank_batches(BATCH, made, version=0, ranks=1)
    assert mine.batch.weights is not None
    assert mine.batch.weights.tolist() == pytest.approx([1 / 12] * 3 + [1 / 4] * 3)


def test_updates_are_drawn_by_seed_and_version(model: Path) -> None:
    """So that a run that goes back draws what it drew before; tensor-parallel ranks have the same part."""
    one, options = batch(0), settings(model, folder=model, updates_per_iteration=2, parallel={"tp": 2})

    def first(version: int) -> list[int]:
        parts = rank_batches(one, options, version=version, ranks=2)
        assert parts[0] is parts[1]
        return np.unique(parts[0].batch.trajectory[np.concatenate(parts[0].updates[0])]).tolist()

    assert first(3) == first(3)
    assert first(3) != first(4)


def test_ranks_wait_little_for_each_other_with_rows_of_very_unequal_length(model: Path) -> None:
    """Attention over a row grows with its square: passes of as many tokens differ by as much as half."""
    ranks, longest = 8, 32_768
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(np.log(longest / 8), 1.0, 32 * ranks)).clip(2, longest).astype(int)
    samples = [
        train_sample([number, *[1] * length], [0] * length + [1], trajectory=number)
        for number, length in enumerate(lengths.tolist())
    ]
    samples += [
        replace(sample, trajectory=len(samples)) for sample in samples[:64]
    ]  # siblings share contexts
    made = settings(model, folder=model, tokens_per_pass=longest)
    parts = rank_batches(TrainBatch.from_samples(samples), made, version=0, ranks=ranks)
    architecture = read_architecture(model)
    work = np.zeros((ranks, len(parts[0].updates[0])))
    for rank, mine in enumerate(parts):
        for number, tokens in enumerate(mine.updates[0]):
            of_pass = mine.batch.take(tokens)
            work[rank, number] = architecture.train_flops(of_pass.lengths.tolist(), len(of_pass))
    # FSDP gathers weights in every pass, so each lasts as long as on the rank with the most work.
    idle = 1.0 - work.sum() / (ranks * work.max(axis=0).sum())
    assert idle < 0.07


def test_means_over_passes_of_unequal_size() -> None:
    metrics = LossMetrics()
    first = {"loss/ratio_mean": torch.tensor([1.0, 2.0, 3.0]), "mine": torch.tensor([0.5, 0.5, 2.0])}
    metrics.add(first)
    metrics.add_mismatch(torch.tensor([0.2, -0.4, 1.0]), fresh=torch.tensor([True, True, False]))
    metrics.add({"loss/ratio_mean": torch.tensor([6.0]), "mine": torch.tensor([0.0])})
    metrics.add_mismatch(torch.tensor([0.3]), fresh=torch.tensor([True]))
    metrics.add({"loss/ratio_mean": torch.tensor([3.0, 3.0]), "mine": torch.tensor([0.75, 0.75])})
    metrics.add_rows(valid=3, padded=4)
    metrics.add_rows(valid=3, padded=8)
    assert metrics.reduce(lambda sums: sums, lambda largest: largest) == {
        "loss/ratio_mean": 3.0,
        "mine": 0.75,
        "mismatch/logprob_max": pytest.approx(0.4),
        "mismatch/logprob_mean": pytest.approx(0.3),
        # Upper edges of classes, 20 to a power of ten: 10^-0.5 is above 0.3; and no more than the largest.
        "mismatch/logprob_p50": pytest.approx(10**-0.5),
        "mismatch/logprob_p99": pytest.approx(0.4),
        "mismatch/logprob_p999": pytest.approx(0.4),
        # The mean of log mu - log pi before the first update, over tokens of any age: -(0.2 - 0.4 + 1 + 0.3) / 4.
        "mismatch/kl": pytest.approx(-0.275),
        "train/valid_token_share": 0.5,
    }
    # Where no token is of the trainer's weights, nothing is told of the engine alone.
    stale = LossMetrics()
    stale.add_mismatch(torch.tensor([0.5]), fresh=torch.tensor([False]))
    told = stale.reduce(lambda sums: sums, lambda largest: largest)
    assert {name: value for name, value in told.items() if "mismatch" in name} == {"mismatch/kl": -0.5}


def test_percentiles_of_the_mismatch_are_bounds_of_the_true_ones_over_all_ranks() -> None:
    ranks = [LossMetrics(), LossMetrics()]
    random = np.random.default_rng(0)
    differences = [10.0 ** random.uniform(-12.0, 3.0, size=size) for size in (500, 3000)]
    for rank, own in zip(ranks, differences, strict=True):
        for part in np.array_split(own, 3):
            rank.add_mismatch(-torch.from_numpy(part), fresh=torch.ones(len(part), dtype=torch.bool))
    sums: list[Tensor] = []
    ranks[1].reduce(lambda own: sums.append(own) or own, lambda largest: largest)
    largest = torch.tensor([max(map(np.max, differences))])
    told = ranks[0].reduce(lambda own: own + sums[0], lambda _: largest)
    values = np.concatenate(differences)
    for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
        exact = np.quantile(values, share, method="inverted_cdf")
        assert exact <= told[f"mismatch/logprob_{name}"] * (1 + 1e-9)
        # Beyond 100 nats there are no classes.
        assert told[f"mismatch/logprob_{name}"] <= (1.1221 * exact if exact < 80.0 else float(largest))


@pytest.mark.heavy
def test_peaks_are_those_of_known_cards_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # without lspci, which tells of the machine's own cards
    assert peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA GeForce RTX 9999") is None  # which TorchTitan takes for an A100


@pytest.mark.heavy
def test_a_step_is_measured_by_its_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on a card of a known peak, the other one of which took longer and more memory."""

    def other_rank(values: Tensor, op: object) -> None:
        values.copy_(torch.maximum(values, torch.tensor([2.0, 5e9, 7e9], dtype=torch.float64)))

    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_reduce", other_rank)
    reset: list[None] = []
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: reset.append(None))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    for memory in ("allocated", "reserved"):
        monkeypatch.setattr(f"torch.cuda.max_memory_{memory}", lambda: 6e9)
    meter = StepMeter(torch.device("cuda"))
    meter.begin()
    meter.begin()
    assert len(reset) == 2, "each step has a peak of its own"
    assert meter.metrics(tokens=1000, flops=4e14) == {
        "train/tokens_per_s": 500.0,
        "train/tokens_per_s_per_rank": 250.0,
        "train/flops_per_token": 4e11,
        "train/mfu": pytest.approx(4e14 / 2.0 / (2 * 989e12)),
        "memory/allocated_gb": 6.0,
        "memory/reserved_gb": 7.0,
    }


@pytest.mark.parametrize(
    ("configured", "needed", "gigabytes", "kind", "reason"),
    [
        ("auto", {"none": 80, "selective": 50, "full": 10}, 100, "selective", "50.0 of the 100.0 GB"),
        ("auto", {}, None, "none", "none"),
        ("selective", {"none": 110, "selective": 90, "full": 10}, 100, "selective", "90.0 of the 100.0 GB"),
    ],
)
def test_trainer_computes_as_little_anew_as_its_gpu_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    configured: Checkpointing,
    needed: dict[str, int],
    gigabytes: int | None,
    kind: Checkpointing,
    reason: str,
) -> None:
    made = settings(tmp_path, folder=tmp_path)
    made = replace(made, config=with_checkpointing(made.config, configured))
    in_bytes = {key: value * 10**9 for key, value in needed.items()}
    monkeypatch.setattr(ModelSize, "of_folder", lambda _: None)
    monkeypatch.setattr("rl_bridge.trainer.settings.bytes_by_checkpointing", lambda *_: in_bytes)
    found, words = made.resolve_checkpointing(gigabytes and gigabytes * 10**9)
    assert found == replace(made, config=with_checkpointing(made.config, kind))
    assert words.startswith(kind)
    assert reason in words
    if gigabytes:
        with pytest.raises(ConfigError, match=r"fits on its GPUs, got .* of the 1\.0 GB of a GPU"):
            made.resolve_checkpointing(10**9)


def test_an_update_waits_for_all_who_read_the_weights() -> None:
    readers = Readers()
    assert readers.wait_until_none(0.0) == 0.0
    with readers:
        with readers:
            pass
        with pytest.raises(TrainingError, match="still being read"):
            readers.wait_until_none(0.0)


def test_copies_take_what_they_hold_and_stay_from_one_time_to_the_next() -> None:
    """Of PyTorch's page-locked memory each would have been a power of two."""
    tensors, offload = [torch.arange(1000.0), torch.ones(7), torch.zeros(0)], Offload()
    for size in ([64 + 4032 + 64], [64 + 4032 + 64, 64 + 64], [64 + 4032 + 64, 64 + 64]):
        offload.release(tensors)
        assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
        assert [segment.nbytes for segment in offload._segments] == size
        offload.restore()
        if len(tensors) == 3:
            tensors.append(torch.full((5,), 2.0))  # an optimizer's moments come later
    assert tensors[0].tolist() == list(range(1000))
    assert [tensor.tolist() for tensor in tensors[1:]] == [[1.0] * 7, [], [2.0] * 5]


def test_reload_waits_for_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who died in its turn has left its lock; its memory is there a little later."""
    monkeypatch.setattr("rl_bridge.trainer.weights.MEMORY_POLL_INTERVAL_S", 0.001)
    tensors, offload = [torch.arange(3.0), torch.ones(2)], Offload()
    refusals, resize = [torch.OutOfMemoryError("none yet")] * 3, torch.UntypedStorage.resize_

    def short_of_memory(storage: torch.UntypedStorage, size: int) -> Any:
        if size and refusals:
            raise refusals.pop()
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", short_of_memory)
    offload.release(tensors)
    offload.restore()
    assert [tensor.tolist() for tensor in tensors] == [[0.0, 1.0, 2.0], [1.0, 1.0]]
    assert not refusals
    offload.release(tensors)
    monkeypatch.setattr("rl_bridge.trainer.weights.MEMORY_TIMEOUT_S", 0.0)
    refusals.extend([torch.OutOfMemoryError("none at all")] * 9)
    with pytest.raises(torch.OutOfMemoryError, match="none at all"):
        offload.restore()
    refusals.clear()
    offload.restore()  # who ran out of memory may come again
    assert tensors[1].tolist() == [1.0, 1.0]
