"""Contexts as a forest of tokens: a run of tokens that several contexts begin with is laid out and computed once."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_BLOCK = 64
"""The fewest queries of a block, so that each block's products are large enough to be efficient."""


def sort_by_prefix(
    tokens: NDArray[np.int32], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort contexts by their tokens, so that each one shares most with the one before it.

    Args:
        tokens: Token ids of all contexts, one after the other, shape [sum of lengths].
        lengths: The number of tokens of each context, shape [U].

    Returns:
        The contexts' indices in order, shape [U], a prefix before what continues it; and in that order the number of
        tokens that each shares from the start with the one before it, shape [U].
    """
    contexts = np.split(tokens, np.cumsum(lengths)[:-1])
    # Bytes compare as the tokens do: tokens are not negative, and their highest byte is first.
    keys = [context.astype(">i4").tobytes() for context in contexts]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = np.zeros(len(order), dtype=np.int64)
    for place in range(1, len(order)):
        one, other = contexts[order[place - 1]], contexts[order[place]]
        length = min(len(one), len(other))
        differs = one[:length] != other[:length]
        shared[place] = differs.argmax() if differs.any() else length
    return np.asarray(order, dtype=np.int64), shared


def select_shared(shared: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many tokens each of some contexts shares with the one before it among them.

    Args:
        shared: That number among all contexts, in the order of `sort_by_prefix`, shape [U].
        places: The places of some contexts in that order, ascending, shape [S].
    """
    result = np.zeros(len(places), dtype=np.int64)
    if len(places) > 1:
        # Two contexts share what all between them share, too.
        bounds = np.stack([places[:-1] + 1, places[1:] + 1], axis=1).ravel()
        result[1:] = np.minimum.reduceat(np.append(shared, 0), bounds)[::2]
    return result


@dataclass(kw_only=True, slots=True, frozen=True)
class Forest:
    """Contexts in one row in the order of `sort_by_prefix`, without the tokens that each shares with the one before it.

    A token thus comes after its ancestors, which are the tokens before it in its contexts, and before its descendants,
    which are contiguous.

    Attributes:
        columns: The column of each token of each context, contexts in that order, shape [sum of lengths].
        last: The last column of each token's descendants, or its own column if it has none, shape [L]. A token at
            column q has an ancestor, or itself, at column k if k <= q <= last[k].
    """

    columns: NDArray[np.int64]
    last: NDArray[np.int64]


def lay_out(lengths: NDArray[np.int64], shared: NDArray[np.int64]) -> Forest:
    """Lay contexts out; the arguments are in the order of `sort_by_prefix`, each of shape [U]."""
    last = np.arange(int((lengths - shared).sum()))
    columns = np.empty(int(lengths.sum()), dtype=np.int64)
    path = np.empty(int(lengths.max()), dtype=np.int64)  # the columns of the current context's tokens
    count, first, length_before = 0, 0, 0
    for length, common in zip(lengths.tolist(), shared.tolist(), strict=True):
        last[path[common:length_before]] = count - 1
        path[common:length] = np.arange(count, count + length - common)
        columns[first : first + length] = path[:length]
        count, first, length_before = count + length - common, first + length, length
    last[path[:length_before]] = count - 1
    return Forest(columns=columns, last=last)


@dataclass(kw_only=True, slots=True, frozen=True)
class KeyBlocks:
    """The keys that each block of a row's queries attends to: those of the block and of its ancestors before it.

    Attributes:
        columns: The columns of each block's keys, shape [blocks, K]; 0 for padding.
        visible: Whether each query of a block attends to each key, shape [blocks, Q, K].
    """

    columns: NDArray[np.int64]
    visible: NDArray[np.bool_]


def block_length(longest: int) -> int:
    """Return the number of queries of a block for contexts of at most `longest` tokens.

    A block of Q queries attends to at most longest + Q keys, whatever the length of the row, and copies as many. Small
    blocks copy more keys per query, longest / Q + 1, and large ones have more keys that only some of their queries see,
    Q. With a quarter of the longest context a query takes at most 1.25 times the attention to its context, and 5 keys.
    """
    return max(MIN_BLOCK, longest // 4)


def find_keys(last: NDArray[np.int64], queries: int) -> KeyBlocks:
    """Return the keys of each block of `queries` tokens of a row, whose length is a multiple of that.

    Args:
        last: As `Forest.last`, shape [L]; padding has its own column, so that it attends to itself alone.
        queries: The number of queries of a block.
    """
    starts = np.arange(0, len(last), queries)
    ancestors = [np.flatnonzero(last[:start] >= start) for start in starts.tolist()]
    before = max(map(len, ancestors))
    columns = np.zeros((len(starts), before + queries), dtype=np.int64)
    used = np.ones(columns.shape, dtype=np.bool_)
    for block, found in enumerate(ancestors):
        columns[block, : len(found)] = found
        used[block, len(found) : before] = False
    columns[:, before:] = starts[:, None] + np.arange(queries)
    query = columns[:, before:, None]
    visible = (columns[:, None] <= query) & (query <= last[columns][:, None]) & used[:, None]
    return KeyBlocks(columns=columns, visible=visible)
