"""Several documents in one row, so that little of a forward pass is padding."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_ROOM = -1
"""The row of a document that did not fit."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Packing:
    """Where each document lies.

    Attributes:
        row: Shape [U]; `NO_ROOM` where there was none.
        offset: The column of its first token, shape [U].
        rows: How many rows there are, B.
        length: Columns of every row, L: the longest document.
    """

    row: NDArray[np.int64]
    offset: NDArray[np.int64]
    rows: int
    length: int


def pack(lengths: NDArray[np.int64], *, most_rows: int | None = None) -> Packing:
    """Put documents into rows that are as long as the longest of them, the longest first, each where it fits first.

    Rows never become longer than one row a document would be, so packing costs no attention over longer rows;
    there are only fewer of them. First fit decreasing takes at most 11/9 of the fewest rows, and 6/9 of one more
    (Dósa, 2007).

    Args:
        lengths: Tokens of each document, shape [U], at least one document.
        most_rows: Rows at most; what does not fit stays outside. The documents that did fit, packed again without the
            others, come to lie in the same places.
    """
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    length = int(descending[0])
    limit = len(lengths) if most_rows is None else min(most_rows, len(lengths))
    row = np.full(len(lengths), NO_ROOM, dtype=np.int64)
    offset = np.zeros(len(lengths), dtype=np.int64)
    free = np.full(limit, length, dtype=np.int64)
    opened = place = 0
    while place < len(order):
        document, tokens = order[place], descending[place]
        visible = free[: opened + 1]  # with the next fresh row, where there may be one
        first = int(np.argmax(visible >= tokens))
        if visible[first] < tokens:  # on to the longest document that is short enough for what is left
            place = int(np.searchsorted(-descending, -free.max()))
            continue
        opened = max(opened, first + 1)
        row[document], offset[document] = first, length - free[first]
        free[first] -= tokens
        place += 1
    return Packing(row=row, offset=offset, rows=opened, length=length)
