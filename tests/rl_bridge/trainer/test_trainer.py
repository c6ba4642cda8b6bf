"""A real trainer on a tiny checkpoint: it learns, clips, and resumes to the last bit."""

import gzip
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from missing import missing
from torch import Tensor
from trainer_ranks import alone, assert_close, batch, copied, settings

from rl_bridge.errors import TrainingError

pytestmark = pytest.mark.heavy

MakeTrainer = Callable[..., Any]


@pytest.fixture
def make_trainer(tiny_policy: Path, tmp_path: Path) -> Iterator[MakeTrainer]:
    made: list[Any] = []

    def make(*, folder: Path = tmp_path, **options: Any) -> Any:
        made.append(alone(tiny_policy, folder, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_ratio_and_mismatch_are_of_the_policy_that_sampled_each_token(
    make_trainer: MakeTrainer, tiny_policy: Path, tmp_path: Path
) -> None:
    from rl_bridge.trainer.reference import Reference

    first, figures_of = batch(1), lambda one: make_trainer(temperature=0.7).step(one)
    told = Reference(settings(tiny_policy, folder=tmp_path, temperature=0.7)).logprobs(first)
    # Off by 0.1 throughout, the ratio is exp(0.1) and the mismatch 0.1.
    figures = figures_of(replace(first, old_logprobs=told - np.float32(0.1)))
    assert figures["loss/ratio_mean"] == pytest.approx(1.1051709, abs=1e-4)
    assert figures["mismatch/logprob_max"] == pytest.approx(0.1, abs=1e-4)
    assert figures["mismatch/kl"] == pytest.approx(-0.1, abs=1e-4)
    # Engine and trainer are compared on tokens of the same weights.
    stale = np.arange(len(first)) % 3 == 0
    old_logprobs = np.where(stale, told - 1.0, told).astype(np.float32)
    versions = np.where(stale, -1, 0).astype(np.int64)
    figures = figures_of(replace(first, old_logprobs=old_logprobs, versions=versions))
    assert figures["mismatch/logprob_max"] < 1e-5
    assert figures["loss/ratio_mean"] > 1.3  # which is of all tokens, like the divergence
    assert figures["mismatch/kl"] == pytest.approx(-stale.mean(), abs=1e-4)


def gradient_norm(trainer: Any) -> list[float]:
    """Records the norm of the gradients as the optimizer meets them."""
    norms: list[float] = []
    original = trainer._optimizer.step

    def step(*arguments: Any, **options: Any) -> Any:
        gradients = [p.grad for p in trainer._model.module.parameters() if p.grad is not None]
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
        norms.append(float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in whole]))))
        return original(*arguments, **options)

    trainer._optimizer.step = step
    return norms


def test_gradients_are_really_clipped(make_trainer: MakeTrainer) -> None:
    free, tight = make_trainer(max_grad_norm=1e6), make_trainer(max_grad_norm=0.01)
    free_norms, tight_norms = gradient_norm(free), gradient_norm(tight)
    told_free, told_tight = (trainer.step(batch(3))["train/grad_norm"] for trainer in (free, tight))
    assert told_free > 0.05, "there was nothing to clip"
    assert free_norms == pytest.approx([told_free], rel=1e-4)
    assert tight_norms == pytest.approx([0.01], rel=1e-3)
    assert told_tight == pytest.approx(told_free, rel=1e-5)  # the norm before the clipping


def test_passes_of_any_size_give_the_same_step(make_trainer: MakeTrainer) -> None:
    gradients: list[list[Tensor]] = []
    metrics: list[dict[str, float]] = []
    for tokens in (4096, 32):
        trainer = make_trainer(algorithm={"entropy_coef": 0.1}, tokens_per_pass=tokens)
        parameters = list(trainer._model.module.parameters())
        trainer._optimizer.step = lambda own=parameters: gradients.append([one.grad.clone() for one in own])
        metrics.append(trainer.step(batch(6)))
        assert 0.5 < metrics[-1].pop("train/valid_token_share") <= 1.0
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_learning_rate_warms_up_and_decays_and_entropy_bonus_is_held_then_annealed(
    make_trainer: MakeTrainer,
) -> None:
    schedule = {"iterations": 10, "warmup_updates": 2, "decay_fraction": 0.5, "final_lr_factor": 0.1}
    entropy = {"entropy_coef": 0.2, "entropy_hold": 0.5, "entropy_final_factor": 0.1}
    trainer = make_trainer(learning_rate=1e-3, algorithm=entropy, **schedule)
    figures = [trainer.step(batch(7)) for _ in range(10)]
    # Half of the way down from 0.2 to 0.02 would be at 7.5 iterations.
    bonus = [one["train/entropy_coef"] for one in figures]
    assert bonus == pytest.approx([0.2] * 6 + [0.164, 0.128, 0.092, 0.056])
    rates = [one["train/learning_rate"] for one in figures]
    assert rates[0] < rates[2] == pytest.approx(1e-3)
    assert rates[4] == pytest.approx(1e-3)
    assert all(later < earlier for earlier, later in pairwise(rates[5:]))
    assert 1e-4 <= rates[9] < 4e-4


def test_a_resumed_run_is_the_run_that_was_never_interrupted(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    entropy = {"entropy_coef": 0.1, "entropy_hold": 0.2, "entropy_final_factor": 0.0}
    options = {
        "updates_per_iteration": 3,
        "warmup_updates": 4,
        "decay_fraction": 0.5,
        "algorithm": {"name": "ppo", "critic_learning_rate": 3e-3, "value_clip": None, **entropy},
        "iterations": 6,
    }
    straight = make_trainer(folder=tmp_path / "straight", **options)
    expected = [straight.step(batch(number)) for number in range(6)]
    first = make_trainer(folder=tmp_path / "interrupted", **options)
    for number in range(2):
        first.step(batch(number))
    first.save(2)
    first.step(batch(2))
    first.close()
    resumed = make_trainer(folder=tmp_path / "interrupted", **options)
    assert resumed.resume().version == 2
    # The numbers, to the last bit: optimizer, schedule, shuffling and annealing went on where they were.
    assert [resumed.step(batch(number)) for number in range(2, 6)] == expected[2:]
    assert_close(copied(resumed), copied(straight))


def test_weights_and_moments_that_were_offloaded_are_the_same_afterwards(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    stays, goes = (make_trainer(folder=tmp_path / name, algorithm="ppo") for name in ("stays", "goes"))
    for number in range(3):
        assert goes.step(batch(number)) == stays.step(batch(number))
        held = [tensor for learner in goes._learners for tensor in learner.tensors()]
        for _ in range(2):
            goes.offload()
        local = [tensor.to_local() for tensor in held if hasattr(tensor, "to_local")]
        assert {tensor.untyped_storage().nbytes() for tensor in local} == {0}
        for _ in range(2):
            goes.onload()
        assert_close(copied(goes), copied(stays))
    # Of policy and critic, with Adam's three.
    assert len(held) == 2 * 4 * len(list(goes._model.module.parameters()))


def test_a_resumed_run_goes_by_its_own_configuration(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    algorithm = {"name": "ppo", "critic_learning_rate": 1e-2}
    first = make_trainer(folder=tmp_path, algorithm=algorithm)
    first.step(batch(0))
    first.save(1)
    first.close()
    changed = {"learning_rate": 1e-4, "weight_decay": 0.5, "betas": (0.5, 0.6)}
    resumed = make_trainer(folder=tmp_path, algorithm=algorithm | {"critic_learning_rate": 2e-3}, **changed)
    assert resumed.resume().version == 1
    for optimization, rate in ((resumed._optimizer, 1e-4), (resumed._critic.optimization, 2e-3)):
        (optimizer,) = optimization._optimizer
        (group,) = optimizer.param_groups
        assert (group["lr"], group["betas"], group["weight_decay"]) == (rate, (0.5, 0.6), 0.5)
    assert resumed.step(batch(1))["train/learning_rate"] == 1e-4


def test_the_schedule_of_a_resumed_run_goes_by_iterations(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    schedule = {"iterations": 6, "warmup_updates": 0, "decay_fraction": 0.5, "final_lr_factor": 0.1}
    first = make_trainer(folder=tmp_path, updates_per_iteration=4, **schedule)
    straight = make_trainer(updates_per_iteration=1, **schedule)
    for number in range(5):
        first.step(batch(number))
        straight.step(batch(number))
    first.save(5)
    first.close()
    resumed = make_trainer(folder=tmp_path, updates_per_iteration=1, **schedule)
    assert resumed.resume().version == 5
    rate = resumed.step(batch(5))["train/learning_rate"]
    # Where a run would be that had trained all of them with as many updates.
    assert rate == straight.step(batch(5))["train/learning_rate"]
    assert 1e-4 < rate < 1e-3


def test_activation_checkpointing_is_of_policy_and_critic_and_changes_nothing_else(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    kept, anew = (make_trainer(algorithm="ppo", activation_checkpointing=one) for one in ("none", "full"))
    for model in (anew._model, anew._critic._model):
        assert all(isinstance(layer, CheckpointWrapper) for layer in model.module.layers.values())
    assert anew.step(batch(0)) == pytest.approx(kept.step(batch(0)), rel=1e-6)
    anew.save(1)
    # What one has written the other goes on from.
    resumed = make_trainer(algorithm="ppo")
    assert resumed.resume().version == 1
    assert resumed.step(batch(1)) == pytest.approx(kept.step(batch(1)), rel=1e-5)


def test_memory_that_is_too_small_ends_the_run_and_is_told_with_the_cure(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> float:
        raise torch.OutOfMemoryError("none left")

    trainer = make_trainer()
    assert trainer.checkpointing == "none"
    monkeypatch.setattr(trainer._policy, "accumulate", fails)
    with pytest.raises(TrainingError, match=r"activation_checkpointing none; resume with full.*none left"):
        trainer.step(batch(0))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_compiled_trainer_learns_what_another_learns(make_trainer: MakeTrainer) -> None:
    """With the C++ compiler, policy and critic; passes of all lengths, and of other numbers of rows."""
    if shutil.which("g++") is None:
        missing("needs a C++ compiler: install g++")
    options: dict[str, Any] = {"algorithm": "ppo", "tokens_per_pass": 40, "updates_per_iteration": 2}
    plain, compiled = (make_trainer(compile=one, **options) for one in (False, True))
    for number in range(3):
        some = batch(number, rows=18 + number)
        expected, compiled_metrics = plain.step(some), compiled.step(some)
        assert compiled_metrics.pop("train/valid_token_share") < expected.pop("train/valid_token_share")
        assert compiled_metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert_close(copied(compiled), copied(plain), atol=5e-5)


def test_an_export_in_several_files_is_loaded_by_transformers(
    make_trainer: MakeTrainer, tiny_policy: Path, tmp_path: Path
) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    from rl_bridge.generator.replica import Checkpoint
    from rl_bridge.loops.sft import begin_checkpoint

    trainer, folder, dtype = make_trainer(dtype="bfloat16"), tmp_path / "export", torch.bfloat16
    begin_checkpoint(folder, tiny_policy)
    trainer.export(folder)  # in one file, which the next one replaces
    trainer.step(batch(0))
    largest = max(tensor.numel() for tensor in copied(trainer).values()) * dtype.itemsize
    trainer.export(folder, max_file_bytes=largest)
    files = sorted(path.name for path in folder.glob("*.safetensors*"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files) - 1:05d}.safetensors"
    assert files[-1] == "model.safetensors.index.json"
    for file in files[:-1]:
        with safe_open(folder / file, "pt") as opened:
            tensors = [opened.get_tensor(key) for key in opened.keys()]  # noqa: SIM118 - it is no dict
        assert {tensor.dtype for tensor in tensors} == {dtype}
        assert sum(tensor.nbytes for tensor in tensors) <= largest
    loaded = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype).state_dict()
    for key, tensor in copied(trainer).items():
        assert torch.equal(loaded[key], tensor.to(dtype)), key
    Checkpoint(tiny_policy).require_same_shapes(Checkpoint(folder).tensors())
    # And back to one file: of those before none is left that an engine could take for a part.
    trainer.export(folder)
    assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]


def test_every_second_step_is_traced(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(profile_interval=2)
    for number in range(3):
        trainer.step(batch(number))
    (file,) = (tmp_path / "profiles").iterdir()
    assert file.name == "step-2-rank-0.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names
