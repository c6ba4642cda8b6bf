"""Documents in rows: each whole, none over another. Documents in passes: within the budget, ranks alike."""

import numpy as np
import pytest
from buffer_fixtures import sample
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rl_bridge.buffer.batch import NO_DOCUMENT, PAD_TOKEN, TrainBatch, divide_documents, pack
from rl_bridge.errors import ConfigError

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=40).map(
    lambda one: np.asarray(one, dtype=np.int64)
)


@settings(max_examples=30)
@given(LENGTHS)
def test_documents_lie_beside_each_other(lengths: NDArray[np.int64]) -> None:
    (rows, offsets, count), length = pack(lengths), lengths.max()
    grid = np.zeros((count, length), dtype=np.int64)
    for tokens, row, offset in zip(lengths, rows, offsets, strict=True):
        assert offset + tokens <= length
        grid[row, offset : offset + tokens] += 1
    assert grid.max() == 1
    assert grid.sum() == lengths.sum()
    # Two rows that would go into one are never left apart.
    fullest = np.sort(grid.sum(axis=1))
    assert fullest[0] > 0
    assert len(fullest) < 2 or fullest[0] + fullest[1] > length


@settings(max_examples=30)
@given(LENGTHS, st.integers(1, 5), st.integers(12, 60), st.integers(1, 3))
def test_passes_keep_their_budget_and_ranks_make_as_many(
    lengths: NDArray[np.int64], ranks: int, budget: int, least: int
) -> None:
    costs = np.square(lengths.astype(np.float64))
    shares = divide_documents(lengths, costs=costs, ranks=ranks, budget=budget, min_passes=least)
    assert len(shares) == ranks
    (passes,) = {len(share) for share in shares}
    assert passes >= least
    assert all(lengths[documents].sum() <= budget for share in shares for documents in share)
    dealt = np.concatenate([documents for share in shares for documents in share])
    assert sorted(dealt.tolist()) == list(range(len(lengths)))


@pytest.mark.parametrize("ranks", [2, 8])
def test_mixed_lengths_are_shared_within_five_percent(ranks: int) -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        lengths = np.exp(random.uniform(np.log(1024), np.log(16_384), 12 * ranks)).astype(np.int64)
        shares = divide_documents(lengths, costs=lengths.astype(np.float64), ranks=ranks, budget=16_384)
        sums = [sum(int(lengths[documents].sum()) for documents in share) for share in shares]
        assert max(sums) - min(sums) <= 0.05 * np.mean(sums)
        # No more passes than a budget that is three quarters full would take.
        assert len(shares[0]) <= -(-lengths.sum() // (0.75 * 16_384 * ranks))


def test_documents_that_do_not_fit_take_another_pass_or_are_refused() -> None:
    three, costs = np.array([7, 7, 7]), np.ones(3)
    (passes,) = divide_documents(three, costs=costs, ranks=1, budget=12)  # two would hold them by their sum
    assert [one.tolist() for one in passes] == [[0], [1], [2]]
    with pytest.raises(ConfigError, match=r"9 tokens is longer .* 8; raise trainer\.tokens_per_pass"):
        divide_documents(np.array([3, 9]), costs=np.ones(2), ranks=1, budget=8)


def batch_of(rows: list[list[int]]) -> TrainBatch:
    return TrainBatch.from_samples(
        [sample([*tokens, 9], [0] * len(tokens) + [1], trajectory=n) for n, tokens in enumerate(rows)]
    )


def test_layout_of_a_pass() -> None:
    batch = batch_of([[1, 2], [3, 4, 5, 6], [7]])
    rows, none = batch.pack_rows(multiple_of=3), NO_DOCUMENT
    assert rows.tokens.tolist() == [
        [3, 4, 5, 6, PAD_TOKEN, PAD_TOKEN],
        [1, 2, 7, PAD_TOKEN, PAD_TOKEN, PAD_TOKEN],
    ]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 0, 0], [0, 1, 0, 0, 0, 0]]
    assert rows.document.tolist() == [[1, 1, 1, 1, none, none], [0, 0, 2, none, none, none]]
    # What predicts a loss token is at the token before it.
    assert list(zip(rows.row.tolist(), rows.column.tolist(), strict=True)) == [(1, 1), (0, 3), (1, 2)]
    assert not rows.one_a_row
    assert batch_of([[1, 2], [3, 4]]).pack_rows().one_a_row
    one = batch.pack_rows(in_one_row=True, multiple_of=4)
    assert one.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, PAD_TOKEN]]
    assert one.positions.tolist() == [[0, 1, 0, 1, 2, 3, 0, 0]]  # attention by document begins one at each 0
    assert (one.row.tolist(), one.column.tolist(), one.target.tolist()) == ([0, 0, 0], [1, 5, 6], [9, 9, 9])
