"""Samples as arrays: sharing contexts, splitting and micro-batching change no gradient."""

import numpy as np
import pytest
from buffer_fixtures import sample
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge.buffer.batch import TrainBatch
from rl_bridge.types import TrainSample


def test_layout() -> None:
    batch = TrainBatch.from_samples(
        [
            sample([1, 2, 3, 4], [0, 0, 1, 1], trajectory=3, advantage=0.5, reward=2.0),
            sample([4, 2], [0, 1], trajectory=3, advantage=0.5, reward=2.0),
            sample([4, 3], [0, 1], trajectory=8, advantage=-1.0, reward=-1.0),
        ]
    )
    # A context ends before the last loss token, which predicts nothing; those that saw the same share one.
    assert (batch.tokens.tolist(), batch.lengths.tolist()) == ([1, 2, 3, 4], [3, 1])
    assert batch.context.tolist() == [0, 0, 1, 1]
    assert batch.position.tolist() == [1, 2, 0, 0]
    assert batch.target.tolist() == [3, 4, 2, 3]
    assert batch.old_logprobs.tolist() == pytest.approx([-1.2, -1.3, -1.1, -1.1])
    assert batch.advantages.tolist() == [0.5, 0.5, 0.5, -1.0]
    assert batch.trajectory.tolist() == [3, 3, 3, 8]
    assert batch.rewards.tolist() == [0.0, 0.0, 2.0, -1.0]  # at the last token of each trajectory
    assert len(batch) == 4


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "at least one loss token"),
        ([sample([1, 2], [0, 0])], "at least one loss token"),
        ([sample([1, 2], [1, 0])], "follow a prompt"),
    ],
)
def test_batch_without_a_loss_token_after_a_prompt_is_refused(
    samples: list[TrainSample], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TrainBatch.from_samples(samples)


@st.composite
def batches(draw: st.DrawFn) -> list[TrainSample]:
    """Rows over few tokens, so that many contexts coincide; some trajectories have several rows."""
    samples = []
    for number in range(draw(st.integers(1, 8))):
        for _ in range(draw(st.integers(1, 2))):
            mask = [0, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=4)), 1]
            tokens = draw(st.lists(st.integers(0, 1), min_size=len(mask), max_size=len(mask)))
            samples.append(
                sample(
                    tokens,
                    mask,
                    trajectory=number,
                    advantage=draw(st.sampled_from([-1.0, 0.25, 2.0])),
                    logprob=draw(st.sampled_from([-0.5, -1.5, -3.0])),
                )
            )
    return samples


def rows_of(batch: TrainBatch) -> list[tuple[object, ...]]:
    """Every loss token with all that belongs to it, however the batch lays it out."""
    assert batch.reference_logprobs is not None
    contexts = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])
    return sorted(
        (
            int(batch.trajectory[t]),
            tuple(contexts[batch.context[t]][: batch.position[t] + 1].tolist()),
            int(batch.target[t]),
            float(batch.old_logprobs[t]),
            float(batch.advantages[t]),
            float(batch.reference_logprobs[t]),
        )
        for t in range(len(batch))
    )


@settings(max_examples=30)
@given(batches(), st.integers(1, 10), st.integers(0, 3))
def test_updates_cover_every_trajectory_exactly_once(
    samples: list[TrainSample], parts: int, seed: int
) -> None:
    batch = TrainBatch.from_samples(samples)
    batch = batch.with_reference((-1.0 - 0.3 * (np.arange(len(batch)) % 4)).astype(np.float32))
    pieces = [batch.take(one) for one in batch.split_by_trajectory(parts, np.random.default_rng(seed))]
    for piece in pieces:
        assert batch.target[piece.index].tolist() == piece.target.tolist()
    owners = [trajectory for piece in pieces for trajectory in np.unique(piece.trajectory).tolist()]
    assert sorted(owners) == np.unique(batch.trajectory).tolist()
    assert sorted(row for piece in pieces for row in rows_of(piece)) == rows_of(batch)
    assert all(len(piece) for piece in pieces)
    sizes = [len(np.unique(piece.trajectory)) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1
