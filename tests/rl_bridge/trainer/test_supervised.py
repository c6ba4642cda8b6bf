"""Fine-tuning by the real trainer: its loss is the mean negative log-probability, and falls."""

from pathlib import Path

import numpy as np
import pytest
from train_samples import train_sample

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.loops.sft import SftConfig, begin_checkpoint, fine_tune, trainer_settings
from rl_bridge.types import TrainSample

pytestmark = pytest.mark.heavy


def row(number: int, trajectory: int = 0) -> list[TrainSample]:
    """A prompt that says which of four words comes next, twice; and an end."""
    word = 8 + number % 4
    return [
        train_sample(
            [4, number + 12, word, 5, word, 2], [0, 0, 1, 0, 1, 1], logprob=0.0, trajectory=trajectory
        )
    ]


def test_the_loss_is_minus_the_mean_log_probability_and_falls(tiny_policy: Path, tmp_path: Path) -> None:
    from rl_bridge.generator.replica import Checkpoint
    from rl_bridge.trainer.trainer import Trainer

    config = SftConfig(
        learning_rate=3e-3, batch_size=4, tokens_per_pass=32, max_length=32, max_updates=40, evaluate_every=10
    )
    learner = Trainer(trainer_settings(config, tmp_path, tiny_policy))
    # Traces of unequal length, so that a mean over tokens is no mean over traces.
    one = TrainBatch.from_samples([*row(0), train_sample([4, 9, 10], [0, 0, 1], trajectory=1)])
    before = -float(np.mean(learner.logprobs(one)))
    assert learner.step(one)["loss/total"] == pytest.approx(before, abs=1e-5)
    assert -float(np.mean(learner.logprobs(one))) < before
    # A look changes nothing: without any, the next update finds what it finds after two.
    unseen = Trainer(trainer_settings(config, tmp_path, tiny_policy))
    unseen.step(one)
    assert unseen.step(one)["loss/total"] == learner.step(one)["loss/total"]

    learner = Trainer(trainer_settings(config, tmp_path, tiny_policy))
    begin_checkpoint(tmp_path / "policy", tiny_policy)
    rows = [row(number) for number in range(8)]
    result = fine_tune(
        learner, rows[:4], rows[:4], config, folder=tmp_path / "policy", on_validation=lambda _: None
    )
    assert result.kept.validation_loss < 0.5 * before
    # What was kept is what that look saw.
    kept = Trainer(trainer_settings(config, tmp_path / "again", tmp_path / "policy"))
    seen = -float(
        np.mean(kept.logprobs(TrainBatch.from_samples([*row(0), *row(1, 1), *row(2, 2), *row(3, 3)])))
    )
    assert seen == pytest.approx(result.kept.validation_loss, abs=1e-5)
    Checkpoint(tiny_policy).require_same_shapes(Checkpoint(tmp_path / "policy").tensors())
