"""A trainer of two real ranks equals one of a single rank, and never waits for a dead rank."""

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from trainer_ranks import (
    WAIT_S,
    Ranks,
    alone,
    assert_close,
    batch,
    branching_batch,
    copied,
    join_published,
    ranks,
    settings,
)

from rl_bridge.config import LoraConfig
from rl_bridge.errors import ConfigError, NonFiniteLossError, RankLostError
from rl_bridge.trainer.passes import rank_batches
from rl_bridge.trainer.settings import TrainerSettings
from tests.rl_bridge.titan.tiny_checkpoints import make_checkpoint

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

SPREADS: list[dict[str, Any]] = [{}, {"parallel": {"tp": 2}}]
SPREAD_NAMES = ["fsdp", "tensor parallel"]


@pytest.mark.parametrize("spread", SPREADS, ids=SPREAD_NAMES)
@pytest.mark.parametrize(
    ("algorithm", "tokens_per_pass"),
    [
        ({"entropy_coef": 0.1, "aggregation": "sequence_mean"}, 4096),
        (
            {"entropy_coef": 0.4, "entropy_top_k": 5},
            4096,
        ),  # which may be in either rank's part of the vocabulary
        ({"name": "gspo", "clip_low": 0.2, "clip_high": 0.2}, 32),  # sequences that are spread over ranks
        ({"name": "ppo", "correction": "truncated"}, 32),  # a critic, and recomputed log-probabilities
    ],
    ids=["grpo", "clamped entropy", "gspo", "ppo"],
)
def test_two_ranks_learn_what_one_learns(
    pair: Ranks,
    policy: Path,
    tmp_path: Path,
    spread: dict[str, Any],
    algorithm: dict[str, Any],
    tokens_per_pass: int,
) -> None:
    options: dict[str, Any] = {
        "updates_per_iteration": 2,
        "max_grad_norm": 0.05,
        "tokens_per_pass": tokens_per_pass,
        "tokens_per_chunk": 7,
        "algorithm": algorithm,
    }
    one = alone(policy, tmp_path, **options)
    first = copied(one)
    pair.build(settings(policy, folder=tmp_path, **spread, **options))
    for number in range(3):
        some = batch(number, rows=18, rows_a_trajectory=3)
        expected, told = one.step(some), pair.call("step", some)
        assert told[0] == told[1]
        # Rows are padded to what can be shared, and share out differently.
        assert 0.5 < told[0].pop("train/valid_token_share") <= 1.0
        expected.pop("train/valid_token_share")
        assert told[0] == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert expected["train/grad_norm"] > 0.05, "there was nothing to clip"
    for state in pair.call("hf_state_dict"):
        assert_close(state, one.hf_state_dict(), atol=5e-5)
    assert max(float((first[name] - tensor).abs().max()) for name, tensor in copied(one).items()) > 1e-3


@pytest.mark.parametrize("spread", SPREADS, ids=SPREAD_NAMES)
def test_two_ranks_with_shared_prefixes_learn_what_one_learns_without(
    pair: Ranks, policy: Path, tmp_path: Path, spread: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"algorithm": "ppo", "tokens_per_pass": 48, "updates_per_iteration": 2}
    one = alone(policy, tmp_path, share_prefixes=False, **options)
    pair.build(settings(policy, folder=tmp_path, **spread, **options))
    for number in range(2):
        some = branching_batch(number)
        expected, told = one.step(some), pair.call("step", some)
        assert told[0] == told[1]
        expected.pop("train/valid_token_share"), told[0].pop("train/valid_token_share")
        assert told[0] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    for state in pair.call("hf_state_dict"):
        assert_close(state, one.hf_state_dict(), atol=5e-5)


def _require_own_parts(four: Ranks, options: TrainerSettings) -> None:
    """The first rank alone divides a batch, and all ranks raise its error; siblings in a layer have one part."""
    parts = four.call("receive", batch(0))
    assert sum(len(part.batch) for part in parts[::2]) == len(batch(0))
    for part, expected in zip(parts, rank_batches(batch(0), options, version=0, ranks=4), strict=True):
        assert part.sizes == expected.sizes
        assert part.batch.tokens.tolist() == expected.batch.tokens.tolist()
        assert part.batch.index.tolist() == expected.batch.index.tolist()
    four.ask("receive", ConfigError("a row is too long"))
    assert [str(answer) for answer in four.answers()] == ["a row is too long"] * 4


LEARNERS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"entropy_coef": 0.1}},
    "gspo": {"algorithm": {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2}},
    "ppo": {"algorithm": {"name": "ppo", "correction": "truncated"}},
    "lora": {
        "lora": LoraConfig(rank=4, targets=("q_proj", "k_proj", "v_proj", "o_proj"), push="merged"),
    },
}
DENSE: list[dict[str, int]] = [{"tp": 2}, {"hsdp": 2}, {"hsdp": 2, "tp": 2}]
MIXTURES: list[dict[str, int]] = [{}, {"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 4}, {"hsdp": 2, "ep": 2}]
# One of each is enough to notice a change; all of them are the proof.
IN_CI = [("qwen3-tied", {"hsdp": 2, "tp": 2}, "ppo"), ("qwen3-moe", {"ep": 2, "tp": 2}, "grpo")]


def _meshes(dense: list[dict[str, int]], mixtures: list[dict[str, int]]) -> list[Any]:
    meshes = [("qwen3-tied", one) for one in dense] + [("qwen3-moe", one) for one in mixtures]
    return [
        pytest.param(
            name,
            mesh,
            learner,
            id=f"{name}, {' '.join(f'{key} {degree}' for key, degree in mesh.items())}, {learner}",
            marks=() if (name, mesh, learner) in IN_CI else pytest.mark.soak,
        )
        for name, mesh in meshes
        for learner in LEARNERS
    ]


@pytest.mark.parametrize(("name", "mesh", "learner"), _meshes(DENSE, MIXTURES))
def test_a_mesh_of_four_learns_what_one_rank_learns(
    four: Ranks, tmp_path: Path, name: str, mesh: dict[str, int], learner: str
) -> None:
    _require_same_steps(four, tmp_path, name, mesh, learner)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(tmp_path_factory.mktemp("eight"), 8) as made:
        yield made


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "mesh", "learner"), _meshes([{"hsdp": 2, "tp": 2}], [{"ep": 4, "tp": 2}, {"hsdp": 2, "ep": 4}])
)
def test_a_mesh_of_eight_learns_what_one_rank_learns(
    eight: Ranks, tmp_path: Path, name: str, mesh: dict[str, int], learner: str
) -> None:
    # A vocabulary of 33 is refused with tp 2 and fsdp 4.
    _require_same_steps(eight, tmp_path, name, mesh, learner, words=35 if mesh == {"ep": 4, "tp": 2} else 33)


def _require_same_steps(
    many: Ranks, tmp_path: Path, name: str, mesh: dict[str, int], learner: str, *, words: int = 33
) -> None:
    """With words that no two ranks divide: the same losses, gradient norms and weights, also when resumed."""
    policy = make_checkpoint(
        tmp_path / "policy", name, num_hidden_layers=2, hidden_size=32, head_dim=16, vocab_size=words
    )
    options = {
        "updates_per_iteration": 2,
        "tokens_per_pass": 64,
        "learning_rate": 2e-4,  # AdamW enlarges what the sums of small gradients are rounded by
        **LEARNERS[learner],
    }
    one = alone(policy, tmp_path / "one", **options)
    spread = settings(policy, folder=tmp_path / "many", parallel=mesh, **options)
    many.build(spread)

    def step(number: int, *trainers: Any) -> None:
        expected, *found = (trainer.step(batch(number)) for trainer in (one, *trainers))
        for metrics in [*found, *many.call("step", batch(number))]:
            for metric in ("loss/total", "train/grad_norm"):
                assert metrics[metric] == pytest.approx(expected[metric], rel=1e-5, abs=1e-5)

    for number in range(2):
        step(number)
    for state in (many.call("hf_state_dict")[-1], join_published(many, 2)):
        assert_close(state, one.hf_state_dict(), atol=1e-5)
    many.call("save", 2)
    resumed = alone(policy, tmp_path / "many", **options)
    assert resumed.resume().version == 2
    many.build(spread)
    many.call("resume")
    step(2, resumed)
    for state in (resumed.hf_state_dict(), many.call("hf_state_dict")[0]):
        assert_close(state, one.hf_state_dict(), atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3-tied", pytest.param("qwen3", marks=pytest.mark.soak)])
def test_four_ranks_share_a_vocabulary_that_they_do_not_divide(
    four: Ranks, tmp_path: Path, name: str
) -> None:
    """33 words over two tensor-parallel ranks are 17 and 16, of which FSDP gives each rank 9, 8, 8 and 8."""
    policy = make_checkpoint(
        tmp_path / name, name, num_hidden_layers=2, hidden_size=32, head_dim=16, vocab_size=33
    )
    critic: dict[str, Any] = {"algorithm": "ppo"}
    one = alone(policy, tmp_path / "one", **critic)
    options = settings(policy, folder=tmp_path / "four", parallel={"tp": 2}, **critic)
    four.build(options)
    _require_own_parts(four, options)
    for number in range(3):
        expected, told = one.step(batch(number)), four.call("step", batch(number))[0]
        expected.pop("train/valid_token_share"), told.pop("train/valid_token_share")
        assert told == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert_close(four.call("hf_state_dict")[0], one.hf_state_dict(), atol=5e-5)
    assert_close(join_published(four, 3), one.hf_state_dict(), atol=5e-5)
    four.call("export", tmp_path)
    assert_close(load_file(tmp_path / "model.safetensors"), one.hf_state_dict(), atol=5e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_batch_that_is_smaller_than_the_group(pair: Ranks, policy: Path, tmp_path: Path, rows: int) -> None:
    """A rank without a share of the batch still takes part in what all do together."""
    one = alone(policy, tmp_path)
    pair.build(settings(policy, folder=tmp_path))
    expected, told = one.step(batch(4, rows=rows)), pair.call("step", batch(4, rows=rows))
    assert told[0] == told[1]
    expected.pop("train/valid_token_share"), told[0].pop("train/valid_token_share")
    assert told[0] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert_close(pair.call("hf_state_dict")[0], one.hf_state_dict(), atol=2e-5)


def test_non_finite_loss_on_one_rank_stops_all(pair: Ranks, policy: Path, tmp_path: Path) -> None:
    pair.build(settings(policy, folder=tmp_path))
    before = pair.call("hf_state_dict")[0]
    bad = batch(4)
    bad.advantages[0] = float("nan")  # of one trajectory, so one rank has it
    pair.ask("step", bad)
    assert all(isinstance(answer, NonFiniteLossError) for answer in pair.answers())
    assert_close(pair.call("hf_state_dict")[0], before, atol=0.0)
    pair.call("step", batch(5))


def test_invalid_rank_layout_is_refused(pair: Ranks, policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got 1 x any x 3 and 2;"):
        pair.build(settings(policy, folder=tmp_path, parallel={"tp": 3}))


@pytest.mark.soak
def test_a_rank_that_dies_ends_the_others_waits(policy: Path, tmp_path: Path) -> None:
    with ranks(tmp_path, 2) as two:
        two.build(settings(policy, folder=tmp_path))
        two.call("step", batch(0))
        two.ask("step", batch(1, rows=20_000))
        time.sleep(0.3)
        two.kill(1)
        killed = time.monotonic()
        [answer] = two.answers(0)
        assert isinstance(answer, RankLostError), answer
        assert time.monotonic() - killed < 60.0
        assert "in iteration 1, one is gone" in str(answer)
        # Nor is what cannot be loaded without it taken for damaged.
        answer = two.ask_one(0, "resume")
        assert isinstance(answer, RankLostError), answer
        answer = two.ask_one(0, "build", settings(policy, folder=tmp_path))
        assert isinstance(answer, RankLostError), answer


def test_no_group_of_ranks_waits_longer_than_configured(pair: Ranks, policy: Path, tmp_path: Path) -> None:
    pair.build(settings(policy, folder=tmp_path, parallel={"tp": 2}, timeout_s=1234.0))
    # That of all ranks, those of each mesh; and those that wait for what is written and for the reference, as long as
    # that may take.
    *waits, written, received = pair.call("waits")[1]
    assert len(waits) > 1
    assert set(waits) == {timedelta(seconds=WAIT_S)}
    assert written == received == timedelta(seconds=1234.0)


@pytest.mark.soak
@pytest.mark.parametrize("spread", SPREADS, ids=SPREAD_NAMES)
def test_a_rank_that_hangs_is_waited_for_no_longer_than_configured(
    policy: Path, tmp_path: Path, spread: dict[str, Any]
) -> None:
    with ranks(tmp_path, 2, timeout_s=30.0) as two:
        two.build(settings(policy, folder=tmp_path, **spread))
        two.call("step", batch(0))
        two.stop(1)
        two.ask("step", batch(1))
        stopped = time.monotonic()
        [answer] = two.answers(0)
        assert isinstance(answer, RankLostError), answer
        assert 29.0 < time.monotonic() - stopped < WAIT_S


@pytest.mark.soak
def test_an_export_may_take_longer_than_a_collective(policy: Path, tmp_path: Path) -> None:
    """Rank 0 writes, the other waits for it."""
    with ranks(tmp_path, 2, timeout_s=20.0) as two:
        two.build(settings(policy, folder=tmp_path))
        two.ask_one(0, "write slowly", 30.0)
        assert two.call("export", tmp_path) == [None, None]
        two.call("step", batch(0))
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.soak
def test_rank_without_siblings_fails(policy: Path, tmp_path: Path) -> None:
    with ranks(tmp_path, 2, timeout_s=5.0) as two:
        two.kill(1)
        answer = two.ask_one(0, "build", settings(policy, folder=tmp_path))
        assert isinstance(answer, RankLostError), answer
        assert "when the ranks met" in str(answer)
