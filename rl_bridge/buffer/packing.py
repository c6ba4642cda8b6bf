"""Documents in rows, and documents in passes: each pass within a budget of tokens, ranks with about as many each."""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_bridge.errors import ConfigError

LEAST_GAP = 0.01
"""Of a rank's mean: ranks that are nearer to each other are left as they are."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Packing:
    """Where each document lies.

    Attributes:
        row: Shape [U].
        offset: The column of its first token, shape [U].
        rows: How many rows there are, B.
        length: Columns of every row, L: the longest document.
    """

    row: NDArray[np.int64]
    offset: NDArray[np.int64]
    rows: int
    length: int


def pack(lengths: NDArray[np.int64]) -> Packing:
    """Put documents into rows that are as long as the longest of them, the longest first, each where it fits first.

    Rows never become longer than one row a document would be, so packing costs no attention over longer rows;
    there are only fewer of them. First fit decreasing takes at most 11/9 of the fewest rows, and 6/9 of one more
    (Dósa, 2007).

    Args:
        lengths: Tokens of each document, shape [U], at least one document.
    """
    order = np.argsort(-lengths, kind="stable")
    length = int(lengths[order[0]])
    row, offset = np.zeros(len(lengths), dtype=np.int64), np.zeros(len(lengths), dtype=np.int64)
    free = np.full(len(lengths), length, dtype=np.int64)
    opened = 0
    for document in order:
        first = int(np.argmax(free[: opened + 1] >= lengths[document]))  # with the next fresh row
        opened = max(opened, first + 1)
        row[document], offset[document] = first, length - free[first]
        free[first] -= lengths[document]
    return Packing(row=row, offset=offset, rows=opened, length=length)


def share_out(
    lengths: NDArray[np.int64], *, ranks: int, budget: int, least_passes: int = 1
) -> list[list[NDArray[np.int64]]]:
    """Divide documents into passes, as many on each rank, none of more tokens than the budget.

    The longest go first, each to the pass that has least (R. L. Graham, 1969), so passes of one time have about as many
    tokens on all ranks; then ranks exchange passes until they are near each other in sum.

    Args:
        lengths: Tokens of each document, shape [U].
        ranks: Who makes passes.
        budget: Tokens a pass.
        least_passes: On each rank.

    Returns:
        Of each rank, of each of its passes, the documents. Where there are too few, some passes have none.

    Raises:
        ConfigError: A document is longer than the budget.
    """
    if len(lengths) and lengths.max() > budget:
        raise ConfigError(
            f"a row of {lengths.max()} tokens is longer than a pass of {budget}; raise trainer.tokens_per_pass"
        )
    passes = max(least_passes, -(-int(lengths.sum()) // (budget * ranks)))
    while True:
        documents, tokens = _spread(lengths, passes * ranks)
        if tokens.max() <= budget:
            break
        passes += 1
    order = np.argsort(-tokens, kind="stable").reshape(passes, ranks)
    sums = np.zeros(ranks, dtype=np.int64)
    for number, some in enumerate(order):  # the largest of them to the rank that has least
        order[number, np.argsort(sums, kind="stable")] = some
        sums += tokens[order[number]]
    _even_out(order, tokens)
    return [[np.asarray(documents[one], dtype=np.int64) for one in order[:, rank]] for rank in range(ranks)]


def _spread(lengths: NDArray[np.int64], passes: int) -> tuple[list[list[int]], NDArray[np.int64]]:
    """The documents of each pass, and their tokens."""
    found: list[list[int]] = [[] for _ in range(passes)]
    loads = [(0, number) for number in range(passes)]
    for document in np.argsort(-lengths, kind="stable").tolist():
        load, number = loads[0]
        found[number].append(document)
        heapq.heapreplace(loads, (load + int(lengths[document]), number))
    tokens = np.zeros(passes, dtype=np.int64)
    for load, number in loads:
        tokens[number] = load
    return found, tokens


def _even_out(order: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
    """Have the ranks with most and least exchange passes with others, as long as that brings those nearer together."""
    while True:
        sums = tokens[order].sum(axis=0)
        mean = sums.mean()
        if sums.max() - sums.min() <= LEAST_GAP * mean:
            return
        for extreme in (int(sums.argmax()), int(sums.argmin())):
            gaps = sums[extreme] - sums  # [other], signed
            gains = (
                tokens[order[:, extreme, None, None]] - tokens[order[None]]
            )  # [own pass, other pass, other]
            # The squares of both sums become smaller by 2 gain (gap - gain).
            better = gains * (gaps - gains)
            own, theirs, other = np.unravel_index(int(better.argmax()), better.shape)
            if better[own, theirs, other] > 0:
                order[own, extreme], order[theirs, other] = order[theirs, other], order[own, extreme]
                break
        else:
            return
