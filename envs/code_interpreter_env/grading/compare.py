"""Comparison of answers with expected values, and a parser for numbers as people write them."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from hashlib import sha256
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator

from openenv_core.sandbox.values import MAX_DEPTH, dumps

MAX_CHARS: Final = 400

MAX_BOXES: Final = 100
r"""How many `\boxed{` are tried, from the end: a text may contain arbitrarily many that are never closed."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_SIGN = r"[+-]?\s*"

_PLAIN: Final = re.compile(rf"({_SIGN})({_DECIMAL})(?:[eE]([+-]?\d{{1,4}}))?", re.ASCII)
_TIMES_TEN: Final = re.compile(
    rf"({_SIGN})({_DECIMAL})\s*(?:\\times|\\cdot|\u00d7|\*)\s*10\s*\^\s*(?:\{{\s*([+-]?\d{{1,4}})\s*\}}|([+-]?\d{{1,4}}))",
    re.ASCII,
)
_FRACTION: Final = re.compile(
    rf"({_SIGN})(?:({_DECIMAL})\s*/\s*({_DECIMAL})"
    rf"|\\[dt]?frac\s*\{{\s*(-?{_DECIMAL})\s*\}}\s*\{{\s*({_DECIMAL})\s*\}})",
    re.ASCII,
)
_PERCENT: Final = re.compile(r"\s*\\?%$")
_DELIMITERS: Final = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_BOXED: Final = r"\boxed{"


def parse_number(text: str) -> Fraction | None:
    """Return the exact value of a text that consists of one number, else None."""
    text = text.strip()
    if len(text) > MAX_CHARS:
        return None
    text = _strip_delimiters(text.replace("\N{MINUS SIGN}", "-"))
    without_percent = _PERCENT.sub("", text)
    number = _parse_plain(without_percent)
    if number is None or without_percent == text:
        return number
    return number / 100


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}`, or None if none of the last ones is complete."""
    start = len(text)
    for _ in range(MAX_BOXES):
        start = text.rfind(_BOXED, 0, start)
        if start < 0:
            break
        depth = 1
        for end in range(start + len(_BOXED), min(len(text), start + 2 * MAX_CHARS)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if not depth:
                return text[start + len(_BOXED) : end]
    return None


def is_close(got: Fraction, expected: Fraction, rel_tol: float, abs_tol: float) -> bool:
    """Return whether two numbers differ by at most the larger of the relative and the absolute tolerance."""
    return abs(got - expected) <= max(Fraction(abs_tol), Fraction(rel_tol) * abs(expected))


def _strip_delimiters(text: str) -> str:
    for opening, closing in _DELIMITERS:
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) and inner:
            return inner.strip()
    return text


def _parse_plain(text: str) -> Fraction | None:
    if match := _PLAIN.fullmatch(text):
        sign, digits, exponent = match.groups()
        return _apply_sign(sign, _parse_decimal(digits) * _power_of_ten(exponent))
    if match := _TIMES_TEN.fullmatch(text):
        sign, digits, braced, bare = match.groups()
        return _apply_sign(sign, _parse_decimal(digits) * _power_of_ten(braced or bare))
    if match := _FRACTION.fullmatch(text):
        sign, *parts = match.groups()
        numerator, denominator = (_parse_decimal(string) for string in parts if string is not None)
        return _apply_sign(sign, numerator / denominator) if denominator else None
    return None


def _apply_sign(sign: str, number: Fraction) -> Fraction:
    return -number if "-" in sign else number


def _parse_decimal(digits: str) -> Fraction:
    digits = digits.replace(",", "").removesuffix(".")
    return Fraction(f"0{digits}" if digits.startswith(".") else digits)


def _power_of_ten(exponent: str | None) -> Fraction:
    return Fraction(10) ** int(exponent or 0)


_MAX_CANONICAL: Final = 64 << 20
"""A size limit that no transferred value exceeds, even with its sets replaced by digests."""


class Comparison(BaseModel):
    """Base class of the comparisons."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    def matches(self, got: Any, expected: Any, args: Sequence[Any] = ()) -> bool:
        """Return whether a solution's value matches the expected one; checkers also use the arguments of the call."""
        raise NotImplementedError


class Exact(Comparison):
    """Equal values of equal types: 1, 1.0 and True all differ, NaN equals NaN, and -0.0 equals 0.0."""

    type: Literal["exact"] = "exact"

    def matches(self, got: Any, expected: Any, args: Sequence[Any] = ()) -> bool:
        """Compare types and values."""
        return _equal(got, expected, _leaves_equal)


class Numeric(Comparison):
    """Like `Exact`, but numbers may differ by the larger of the two tolerances. A bool is not a number here.

    Attributes:
        rel_tol: tolerance relative to the expected number.
        abs_tol: absolute tolerance.
    """

    type: Literal["numeric"] = "numeric"
    rel_tol: float = Field(default=1e-9, ge=0, lt=1)
    abs_tol: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def matches(self, got: Any, expected: Any, args: Sequence[Any] = ()) -> bool:
        """Compare with tolerance."""
        return _equal(got, expected, self._equal_leaves)

    def _equal_leaves(self, got: Any, expected: Any) -> bool:
        kinds = (type(got), type(expected))
        if kinds == (float, float) and math.isfinite(expected):
            return bool(abs(got - expected) <= max(self.abs_tol, self.rel_tol * abs(expected)))
        if kinds in ((int, int), (int, float), (float, int)) and _is_finite(got) and _is_finite(expected):
            return is_close(Fraction(got), Fraction(expected), self.rel_tol, self.abs_tol)
        return _leaves_equal(got, expected)


class Unordered(Comparison):
    """Lists with the same items, each equally often, in any order."""

    type: Literal["unordered"] = "unordered"

    def matches(self, got: Any, expected: Any, args: Sequence[Any] = ()) -> bool:
        """Compare the items by type and value."""
        return type(got) in (list, tuple) and Counter(map(_to_digest, got)) == Counter(
            map(_to_digest, expected)
        )


# Checkers, for tasks with many correct answers. A checker gets the value that the solution returned, the expected
# value (often only a number that the answer must reach) and the arguments. It must not raise on any builtin value.

Checker: TypeAlias = Callable[[Any, Any, Sequence[Any]], bool]


def check_topological_order(got: Any, expected: Any, args: Sequence[Any]) -> bool:
    """Check a list of every node once, each edge's first before its second, of (nodes, edges); [] if `expected` is."""
    nodes, edges = args[0], args[1]
    if expected == []:
        return type(got) is list and not got
    if not _is_list_of(got, type(nodes[0])) or sorted(got) != sorted(nodes):
        return False
    position = {node: index for index, node in enumerate(got)}
    return all(position[before] < position[after] for before, after in edges)


def check_pair_with_sum(got: Any, expected: Any, args: Sequence[Any]) -> bool:
    """Check two ascending indices into (numbers, target) whose numbers sum to the target; None if `expected` is."""
    numbers, target = args[0], args[1]
    if expected is None:
        return got is None
    if not _is_list_of(got, int) or len(got) != 2:
        return False
    low, high = got
    return 0 <= low < high < len(numbers) and bool(numbers[low] + numbers[high] == target)


def check_shortest_path(got: Any, expected: Any, args: Sequence[Any]) -> bool:
    """Check a path of `expected` nodes from start to end in (edges, start, end), undirected; None if `expected` is."""
    edges, start, end = args[0], args[1], args[2]
    if expected is None:
        return got is None
    if not _is_list_of(got, type(start)) or len(got) != expected or (got[0], got[-1]) != (start, end):
        return False
    both_ways = {tuple(edge) for edge in edges} | {tuple(reversed(edge)) for edge in edges}
    return all(step in both_ways for step in pairwise(got))


def check_queens(got: Any, expected: Any, args: Sequence[Any]) -> bool:
    """Check a placement of n queens, as a column for each row; None if `expected` is None."""
    size = args[0]
    if expected is None:
        return got is None
    if not _is_list_of(got, int) or sorted(got) != list(range(size)):
        return False
    diagonals = [
        {row + column for row, column in enumerate(got)},
        {row - column for row, column in enumerate(got)},
    ]
    return all(len(placement) == size for placement in diagonals)


def _is_list_of(got: Any, kind: type) -> bool:
    return type(got) is list and bool(got) and all(type(item) is kind for item in got)


CHECKERS: Final[dict[str, Checker]] = {
    "pair_with_sum": check_pair_with_sum,
    "queens": check_queens,
    "shortest_path": check_shortest_path,
    "topological_order": check_topological_order,
}


class Checked(Comparison):
    """A comparison by a named checker function, which gets the arguments and the answer."""

    type: Literal["checker"] = "checker"
    name: str

    @field_validator("name")
    @classmethod
    def _check_known(cls, name: str) -> str:
        if name not in CHECKERS:
            raise ValueError(f"expected a checker ({', '.join(sorted(CHECKERS))}), got {name!r}")
        return name

    def matches(self, got: Any, expected: Any, args: Sequence[Any] = ()) -> bool:
        """Call the checker."""
        return CHECKERS[self.name](got, expected, args)


Compare: TypeAlias = Annotated[Exact | Numeric | Unordered | Checked, Field(discriminator="type")]
"""How a task compares a function's return values with the expected ones."""


def _equal(got: Any, expected: Any, leaves: Callable[[Any, Any], bool]) -> bool:
    kind = type(expected)
    if type(got) is not kind:
        return leaves(got, expected)
    if kind in (list, tuple):
        return len(got) == len(expected) and all(
            _equal(item, expected_item, leaves) for item, expected_item in zip(got, expected, strict=True)
        )
    if kind is dict:
        # Compare keys by digest: by a plain lookup, 1 would match True and NaN would match nothing.
        got_items = {_to_digest(key): value for key, value in got.items()}
        expected_items = {_to_digest(key): value for key, value in expected.items()}
        return got_items.keys() == expected_items.keys() and all(
            _equal(got_items[key], value, leaves) for key, value in expected_items.items()
        )
    if kind in (set, frozenset):
        return set(map(_to_digest, got)) == set(map(_to_digest, expected))
    return leaves(got, expected)


def _is_finite(number: int | float) -> bool:
    return type(number) is int or math.isfinite(number)


def _leaves_equal(got: Any, expected: Any) -> bool:
    if type(got) is not type(expected):
        return False
    if type(got) is float and math.isnan(got):
        return math.isnan(expected)
    return bool(got == expected)


def _to_digest(value: Any) -> bytes:
    """Return a digest that is equal for exactly equal values, types included."""
    data = dumps(_to_comparable(value), max_bytes=_MAX_CANONICAL, max_depth=2 * MAX_DEPTH)
    return sha256(data).digest()


def _to_comparable(value: Any) -> Any:
    kind = type(value)
    if kind is float:
        return value + 0.0  # -0.0 becomes 0.0
    if kind is list:
        return [_to_comparable(item) for item in value]
    if kind is tuple:
        return tuple(_to_comparable(item) for item in value)
    if kind in (set, frozenset):
        return {kind.__name__: sorted(map(_to_digest, value))}
    if kind is dict:
        return {"dict": sorted((_to_digest(key), _to_digest(item)) for key, item in value.items())}
    return value
