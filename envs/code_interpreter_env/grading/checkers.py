"""Checkers for tasks that many answers solve. Trusted code: it runs where the verdict is made.

A checker gets what the solution returned, what the task expects (often only a figure that the answer must reach), and
the arguments. It must take any builtin value for an answer without raising.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, TypeAlias

Checker: TypeAlias = Callable[[Any, Any, Sequence[Any]], bool]


def topological_order(got: Any, expected: Any, args: Sequence[Any]) -> bool:
    """Arguments (nodes, edges): every node once, each edge's first before its second; [] where `expected` is []."""
    nodes, edges = args[0], args[1]
    if expected == []:
        return type(got) is list and not got
    if not _all_of(got, type(nodes[0])) or sorted(got) != sorted(nodes):
        return False
    place = {node: at for at, node in enumerate(got)}
    return all(place[before] < place[after] for before, after in edges)


def pair_with_sum(got: Any, expected: Any, args: Sequence[Any]) -> bool:
    """Arguments (numbers, target): two different indices, ascending, of numbers that sum to the target."""
    numbers, target = args[0], args[1]
    if expected is None:
        return got is None
    if not _all_of(got, int) or len(got) != 2:
        return False
    low, high = got
    return 0 <= low < high < len(numbers) and bool(numbers[low] + numbers[high] == target)


def shortest_path(got: Any, expected: Any, args: Sequence[Any]) -> bool:
    """Arguments (edges, start, end): a path along undirected edges with `expected` nodes; None where it is None."""
    edges, start, end = args[0], args[1], args[2]
    if expected is None:
        return got is None
    if not _all_of(got, type(start)) or len(got) != expected or (got[0], got[-1]) != (start, end):
        return False
    known = {tuple(edge) for edge in edges} | {tuple(reversed(edge)) for edge in edges}
    return all(step in known for step in pairwise(got))


def queens(got: Any, expected: Any, args: Sequence[Any]) -> bool:
    """Arguments (n): a column for each row so that no two queens attack each other; None where there is no way."""
    size = args[0]
    if expected is None:
        return got is None
    if not _all_of(got, int) or sorted(got) != list(range(size)):
        return False
    ways = [
        {row + column for row, column in enumerate(got)},
        {row - column for row, column in enumerate(got)},
    ]
    return all(len(way) == size for way in ways)


def _all_of(got: Any, kind: type) -> bool:
    return type(got) is list and bool(got) and all(type(item) is kind for item in got)


CHECKERS: Final[dict[str, Checker]] = {
    "pair_with_sum": pair_with_sum,
    "queens": queens,
    "shortest_path": shortest_path,
    "topological_order": topological_order,
}
