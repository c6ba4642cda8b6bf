"""Fine-tuning: when it ends, the order of traces, and the weights it keeps."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.errors import ConfigError
from rl_bridge.loops.sft import SftConfig, SftResult, Validation, fine_tune
from rl_bridge.types import NO_VERSION, TrainSample


def trace(token: int) -> list[TrainSample]:
    """One row: a prompt of one token, an answer of two, the first of which tells traces apart."""
    return [
        TrainSample(
            tokens=[1, token, 2],
            loss_mask=[False, True, True],
            logprobs=[0.0, 0.0, 0.0],
            versions=[NO_VERSION] * 3,
            advantage=1.0,
            trajectory=0,
        )
    ]


class ScriptedLearner:
    """Has the validation losses that it is told, one a validation; remembers what it was asked."""

    def __init__(self, losses: Sequence[float] = ()) -> None:
        self._losses = list(losses)
        self.learned: list[list[int]] = []
        self.looked_at: list[TrainBatch] = []
        self.exported_after: list[int] = []

    def step(self, batch: TrainBatch) -> dict[str, float]:
        assert sorted(set(batch.trajectory.tolist())) == list(range(len(batch) // 2))
        assert (batch.advantages == 1.0).all()
        self.learned.append(sorted(int(token) for token in batch.target if token > 2))
        return {"loss/total": float(len(self.learned))}

    def logprobs(self, batch: TrainBatch) -> NDArray[np.float32]:
        self.looked_at.append(batch)
        loss = self._losses[len(self.looked_at) - 1] if self._losses else 1.0
        # Half of the tokens twice as bad: it is the mean that counts.
        return np.where(batch.target == 2, -loss * 4 / 3, -loss * 2 / 3).astype(np.float32)

    def export(self, folder: str | Path) -> None:
        self.exported_after.append(len(self.learned))


def run(learner: ScriptedLearner, traces: int = 4, **config: Any) -> tuple[SftResult, list[Validation]]:
    validations: list[Validation] = []
    result = fine_tune(
        learner,
        [trace(10 + number) for number in range(traces)],
        [trace(90), trace(91)],
        SftConfig(**{"batch_size": 2, "evaluate_every": 2, **config}),
        folder=Path("nowhere"),
        on_validation=validations.append,
    )
    return result, validations


@pytest.mark.parametrize(
    ("losses", "config", "settled", "updates", "exported"),
    [
        # As good as the best is no better.
        ([4.0, 3.0, 2.0, 2.5, 1.9, 2.0, 1.9, 2.1, 0.1], {"patience": 3}, True, range(0, 15, 2), [0, 2, 4, 8]),
        ([1.0, 2.0, 1.5, 0.1], {"patience": 2}, True, [0, 2, 4], [0]),  # the initial weights are the best
        ([4.0, 3.0, 2.0, 1.0], {"patience": 3, "max_updates": 5}, False, [0, 2, 4, 5], [0, 2, 4, 5]),
    ],
)
def test_it_ends_when_the_validation_loss_has_stopped_falling_and_keeps_the_best(
    losses: list[float], config: dict[str, int], settled: bool, updates: Sequence[int], exported: list[int]
) -> None:
    learner = ScriptedLearner(losses)
    result, validations = run(learner, **config)
    assert result.settled == settled
    assert list(result.validations) == validations
    assert [one.update for one in validations] == list(updates)
    assert [one.validation_loss for one in validations] == pytest.approx(losses[: len(validations)])
    assert [one.loss for one in validations] == [float(update) or None for update in updates]
    assert (result.kept.update, validations[0].seconds) == (exported[-1], 0.0)
    assert learner.exported_after == exported


def test_every_trace_comes_once_an_epoch_and_each_epoch_in_another_order() -> None:
    learner = ScriptedLearner()
    run(learner, traces=7, batch_size=3, max_updates=9, patience=None)
    epochs = [learner.learned[first : first + 3] for first in (0, 3, 6)]
    for epoch in epochs:
        assert sorted(token for batch in epoch for token in batch) == list(range(10, 17))
    assert epochs[0] != epochs[1] != epochs[2]
    again, other = ScriptedLearner(), ScriptedLearner()
    run(again, traces=7, batch_size=3, max_updates=9, patience=None)
    run(other, traces=7, batch_size=3, max_updates=9, patience=None, seed=1)
    assert again.learned == learner.learned != other.learned


@pytest.mark.parametrize("what", ["to train on", "to validate on"])
def test_a_trace_that_is_too_long_is_told_before_anything_is_learned(what: str) -> None:
    long = [replace(trace(10)[0], tokens=[1] * 9, loss_mask=[False] * 8 + [True])]
    learner = ScriptedLearner()
    with pytest.raises(
        ConfigError, match=rf"{what} of at most 8 tokens \(sft.max_length\), got 9 in the 2. of"
    ):
        fine_tune(
            learner,
            [trace(10), long if what == "to train on" else trace(11)],
            [trace(12), long if what == "to validate on" else trace(13)],
            SftConfig(max_length=8),
            folder=Path("nowhere"),
            on_validation=lambda _: None,
        )
    assert learner.learned == []
