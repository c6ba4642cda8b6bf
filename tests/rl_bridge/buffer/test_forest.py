"""Contexts with common prefixes in one row: each token sees the tokens before it in its context, and no others."""

from dataclasses import replace

import numpy as np
import pytest
from buffer_fixtures import sample
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rl_bridge.buffer.batch import NO_DOCUMENT, PAD_TOKEN, PackedRows, TrainBatch
from rl_bridge.buffer.forest import MIN_BLOCK, find_keys, lay_out, select_shared, sort_by_prefix

CONTEXTS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=12, unique=True
)
"""Of few different tokens, so that many begin alike and some are the beginning of others."""


def arrays_of(contexts: list[tuple[int, ...]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    return np.concatenate([np.array(one, dtype=np.int32) for one in contexts]), np.array(
        [len(one) for one in contexts]
    )


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


@settings(max_examples=100)
@given(CONTEXTS, st.data())
def test_contexts_in_order_share_most_with_the_one_before(
    contexts: list[tuple[int, ...]], data: st.DataObject
) -> None:
    order, shared = sort_by_prefix(*arrays_of(contexts))
    ordered = [contexts[index] for index in order]
    assert ordered == sorted(contexts)
    assert shared.tolist() == [0, *map(common, ordered, ordered[1:])]
    for place in range(1, len(ordered)):
        assert shared[place] == max(common(ordered[place], other) for other in ordered[:place])
    some = sorted(data.draw(st.sets(st.integers(0, len(contexts) - 1), min_size=1)))
    chosen = [ordered[place] for place in some]
    assert select_shared(shared, np.array(some)).tolist() == [0, *map(common, chosen, chosen[1:])]


def test_tokens_of_several_bytes_are_in_order() -> None:
    order, shared = sort_by_prefix(*arrays_of([(70_000, 1), (256, 2), (255, 3), (70_000,)]))
    assert order.tolist() == [2, 1, 3, 0]
    assert shared.tolist() == [0, 0, 0, 1]


@settings(max_examples=100)
@given(CONTEXTS, st.integers(1, 7))
def test_a_token_sees_its_context_up_to_itself(contexts: list[tuple[int, ...]], queries: int) -> None:
    """Attention by blocks has the keys that a forest defines, which are those of separate contexts."""
    contexts = sorted(contexts)
    tokens, lengths = arrays_of(contexts)
    forest = lay_out(lengths, sort_by_prefix(tokens, lengths)[1])
    prefixes = {one[:length] for one in contexts for length in range(1, len(one) + 1)}
    assert len(forest.last) == len(prefixes), "a token was computed twice"
    size = -(-len(forest.last) // queries) * queries
    last = np.arange(size)
    last[: len(forest.last)] = forest.last
    seen = keys_of(find_keys(last, queries).columns, find_keys(last, queries).visible)
    for columns in np.split(forest.columns, np.cumsum(lengths)[:-1]):
        for position, column in enumerate(columns):
            assert seen[column] == sorted(columns[: position + 1].tolist())
    assert all(seen[column] == [column] for column in range(len(forest.last), size))


def keys_of(columns: NDArray[np.int64], visible: NDArray[np.bool_]) -> list[list[int]]:
    """The columns that each query sees, each as often as it has it."""
    return [
        sorted(keys[mask].tolist()) for keys, block in zip(columns, visible, strict=True) for mask in block
    ]


def batch_of(rows: list[list[int]], *, shares: bool = True) -> TrainBatch:
    """The last token of each row is a loss token, and so is each 8."""
    masks = [[int(place > 0 and token == 8) for place, token in enumerate(row[:-1])] + [1] for row in rows]
    samples = [sample(row, mask, trajectory=n) for n, (row, mask) in enumerate(zip(rows, masks, strict=True))]
    return replace(TrainBatch.from_samples(samples), shares_prefixes=shares)


ROWS = [[1, 2, 8, 4, 8], [1, 2, 8, 5], [7, 6], [1, 2, 9], [1, 2, 8, 4, 3]]


def test_layout_of_a_forest() -> None:
    batch = batch_of(ROWS)
    rows = batch.pack_rows(multiple_of=4)
    # 1 2 | 9 is a context of two tokens, 1 2 8 one of three and 1 2 8 4 one of four: a path; and a tree of one token.
    assert rows.tokens.tolist() == [[1, 2, 8, 4, 7, *[PAD_TOKEN] * 3]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 0, 0, 0, 0]]
    assert rows.document.tolist() == [[0] * 5 + [NO_DOCUMENT] * 3]
    assert rows.valid == 5 == batch.computed.sum()
    # An 8 is predicted at the 2 in every row that has it.
    assert rows.column.tolist() == [1, 3, 1, 2, 4, 1, 1, 3]
    assert rows.target.tolist() == [8, 8, 8, 5, 6, 9, 8, 3]
    assert rows.blocks is not None
    seen = keys_of(rows.blocks.columns, rows.blocks.visible)
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [4], [5], [6], [7]]


def test_contexts_that_share_nothing_are_laid_out_as_before() -> None:
    rows = [[1, 2, 3], [2, 2, 3, 4], [3, 1]]
    alone, forest = (batch_of(rows, shares=shares).pack_rows() for shares in (False, True))
    assert_same_rows(forest, alone)
    assert_same_rows(
        batch_of(ROWS).pack_rows(in_one_row=True), batch_of(ROWS, shares=False).pack_rows(in_one_row=True)
    )


def assert_same_rows(one: PackedRows, other: PackedRows) -> None:
    assert one.blocks is None
    assert one.one_a_row == other.one_a_row
    for name in ("tokens", "positions", "document", "row", "column", "target"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("longest", [10, 1000])
def test_keys_of_a_block_have_a_bound_however_long_the_row_is(longest: int) -> None:
    random = np.random.default_rng(0)
    prefix = random.integers(0, 50, longest - 8).tolist()
    batch = batch_of([[*prefix, *random.integers(0, 50, 9).tolist()] for _ in range(300)])
    rows = batch.pack_rows()
    assert rows.blocks is not None
    blocks, queries, keys = rows.blocks.visible.shape
    assert blocks * queries == rows.tokens.size < rows.valid + blocks
    assert keys <= longest + queries
    assert queries <= 1.1 * max(MIN_BLOCK, longest / 4)
