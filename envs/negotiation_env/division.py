"""Divisions of the items: what they are worth, and the best there are."""

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from operator import mul
from random import Random

from .models import ITEMS, SEATS, Item

TOTAL_VALUE = 10
"""What all items together are worth to each player."""

_COUNTS = range(1, 5)
_TOTAL_ITEMS = range(5, 8)


def worth(share: Mapping[Item, int], values: Mapping[Item, int]) -> int:
    """Return what a share is worth to a player with these values."""
    return sum(count * values[item] for item, count in share.items())


def rest_of(items: Mapping[Item, int], share: Mapping[Item, int]) -> dict[Item, int]:
    """Return what a share leaves to the other player."""
    return {item: count - share.get(item, 0) for item, count in items.items()}


def shares(items: Mapping[Item, int]) -> Iterator[dict[Item, int]]:
    """Yield every share of the items."""
    for counts in product(*(range(count + 1) for count in items.values())):
        yield dict(zip(items, counts, strict=True))


def best_joint_worth(items: Mapping[Item, int], values: Mapping[str, Mapping[Item, int]]) -> int:
    """Return the most that both players together can get by an agreement."""
    first, second = (values[seat] for seat in SEATS)
    return sum(count * max(first[item], second[item]) for item, count in items.items())


def draw_pool(rng: Random) -> tuple[dict[Item, int], dict[str, dict[Item, int]]]:
    """Draw the items and both players' values, as in Lewis et al., "Deal or No Deal?" (2017).

    There are 5 to 7 items of three kinds. To each player all of them are worth 10; each kind is worth something to
    somebody, and some kind to both.
    """
    while True:
        items: dict[Item, int] = {item: rng.choice(_COUNTS) for item in ITEMS}
        if sum(items.values()) in _TOTAL_ITEMS:
            break
    pairs = _pairs_of_values(tuple(items.values()))
    return items, {
        seat: dict(zip(ITEMS, prices, strict=True))
        for seat, prices in zip(SEATS, rng.choice(pairs), strict=True)
    }


@cache
def _pairs_of_values(counts: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the values that both players may have, of each kind, given how many there are of it."""
    options = [
        prices
        for prices in product(range(TOTAL_VALUE + 1), repeat=len(counts))
        if sum(map(mul, counts, prices)) == TOTAL_VALUE
    ]
    return [
        (first, second)
        for first, second in product(options, repeat=2)
        if all(map(max, first, second)) and any(map(min, first, second))
    ]
