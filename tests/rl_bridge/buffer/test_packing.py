"""Documents in rows: each whole, none over another, few rows; parts that pack as they were planned."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rl_bridge.buffer.batch import NO_DOCUMENT, NO_ROOM, PAD, Packing, TrainBatch, pack
from rl_bridge.types import NO_VERSION, TrainSample

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=40).map(
    lambda one: np.asarray(one, dtype=np.int64)
)


def occupied(lengths: NDArray[np.int64], packing: Packing) -> NDArray[np.int64]:
    """How many documents lie on each place of each row."""
    grid = np.zeros((packing.rows, packing.length), dtype=np.int64)
    for tokens, row, offset in zip(lengths, packing.row, packing.offset, strict=True):
        if row != NO_ROOM:
            assert offset + tokens <= packing.length
            grid[row, offset : offset + tokens] += 1
    return grid


@settings(max_examples=30)
@given(LENGTHS, st.none() | st.integers(1, 6))
def test_documents_lie_beside_each_other(lengths: NDArray[np.int64], most_rows: int | None) -> None:
    packing = pack(lengths, most_rows=most_rows)
    grid = occupied(lengths, packing)
    assert grid.max() == 1
    assert grid.any(axis=1).all(), "an empty row"
    assert packing.length == lengths.max()
    inside = packing.row != NO_ROOM
    assert grid.sum() == lengths[inside].sum()
    assert packing.rows <= (len(lengths) if most_rows is None else most_rows)
    if most_rows is None:
        assert inside.all()
        # Two rows that would go into one are never left apart.
        fullest = np.sort(grid.sum(axis=1))
        assert len(fullest) < 2 or fullest[0] + fullest[1] > packing.length
    else:
        outside = lengths[~inside]
        left = packing.length - grid.sum(axis=1)
        assert not len(outside) or packing.rows == most_rows
        assert not len(outside) or left.max() < outside.min(), "something outside would have fitted"


@settings(max_examples=30)
@given(LENGTHS, st.integers(1, 6))
def test_what_fitted_lies_the_same_without_the_others(lengths: NDArray[np.int64], most_rows: int) -> None:
    first = pack(lengths, most_rows=most_rows)
    inside = first.row != NO_ROOM
    again = pack(lengths[inside])
    assert again.rows == first.rows
    assert again.row.tolist() == first.row[inside].tolist()
    assert again.offset.tolist() == first.offset[inside].tolist()


def batch_of(rows: list[list[int]]) -> TrainBatch:
    return TrainBatch.from_samples(
        [
            TrainSample(
                tokens=[*tokens, 9],
                loss_mask=[False] * len(tokens) + [True],
                logprobs=[0.0] * len(tokens) + [-1.0],
                versions=[NO_VERSION] * len(tokens) + [0],
                advantage=1.0,
                trajectory=number,
            )
            for number, tokens in enumerate(rows)
        ]
    )


def test_layout_of_a_pass() -> None:
    rows = batch_of([[1, 2], [3, 4, 5, 6], [7]]).packed(multiple_of=3)
    assert rows.tokens.tolist() == [[3, 4, 5, 6, PAD, PAD], [1, 2, 7, PAD, PAD, PAD]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 0, 0], [0, 1, 0, 0, 0, 0]]
    none = NO_DOCUMENT
    assert rows.document.tolist() == [[1, 1, 1, 1, none, none], [0, 0, 2, none, none, none]]
    # The logits that predict a loss token are those of the token before it.
    assert list(zip(rows.row.tolist(), rows.column.tolist(), strict=True)) == [(1, 1), (0, 3), (1, 2)]
    assert not rows.one_a_row
    assert batch_of([[1, 2], [3, 4]]).packed().one_a_row


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_parts_put_long_documents_together(rows: int) -> None:
    lengths = [3, 30, 4, 28, 2, 29, 3, 27]
    parts = [
        micro
        for micro, _ in batch_of([[1 + n] * length for n, length in enumerate(lengths)]).micro_batches(rows)
    ]
    longest = [int(part.lengths.max()) for part in parts]
    assert longest == sorted(longest, reverse=True)
    assert all(part.contexts.shape[1] == part.lengths.max() for part in parts)
