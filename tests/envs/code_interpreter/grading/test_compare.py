"""How answers are compared with what was expected, and how numbers are read out of texts."""

import math
from fractions import Fraction
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from envs.code_interpreter_env.grading.compare import (
    CHECKERS,
    MAX_BOXES,
    Compare,
    Exact,
    Numeric,
    Unordered,
    extract_boxed,
    parse_number,
)

SAME: list[tuple[Any, Any]] = [
    (1, 1), (None, None), ("a", "a"), (math.nan, math.nan), (-0.0, 0.0), ([1, [2]], [1, [2]]), ((1, 2), (1, 2)),
    ({"a": [1], "b": 2}, {"b": 2, "a": [1]}), ({1, 2, 3}, {3, 2, 1}), ({math.nan: 1}, {math.nan: 1}),
    ({-0.0: "a"}, {0.0: "a"}), (frozenset({frozenset({1})}), frozenset({frozenset({1})})), (10**4000, 10**4000),
]  # fmt: skip
OTHER: list[tuple[Any, Any]] = [
    (True, 1), (1, True), (0, False), (1, 1.0), (1.0, 1), (0, None), ("1", 1), ("a", b"a"), ([1, 2], (1, 2)),
    ((1, 2), [1, 2]), ([1, True], [1, 1]), ([1, 2], [2, 1]), ([1], [1, 2]), ({"a": 1}, {"a": 1, "b": 2}),
    ({"a": 1, "b": 2}, {"a": 1}), ({"a": True}, {"a": 1}), ({True: "x"}, {1: "x"}), ({1}, {True}),
    ({1}, frozenset({1})), ([1], {1}), ({1.0}, {1}), (math.nan, 1.0), (math.inf, -math.inf), (1 + 0j, 1),
]  # fmt: skip


def test_exact_takes_the_same_and_nothing_else() -> None:
    for got, expected in SAME:
        assert Exact().matches(got, expected)
        assert Numeric().matches(got, expected)
    for got, expected in OTHER:
        assert not Exact().matches(got, expected), (got, expected)


CLOSE: list[tuple[Any, Any]] = [
    (1, 1.0), (1.0, 1), (1.0 + 1e-12, 1.0), (1e-13, 0.0), (math.inf, math.inf), (math.nan, math.nan),
    (10**400, 10**400 + 1), ([1, {"a": 2.0}], [1.0, {"a": 2}]),
]  # fmt: skip
FAR: list[tuple[Any, Any]] = [
    (1.001, 1.0), (True, 1), (1, True), (math.inf, 1.0), (1.0, math.inf), (math.nan, 1.0), (10**400, 1.0),
    (10**400, math.inf), (1.7e308, -1.7e308), ("1", 1), (None, 0),
]  # fmt: skip


def test_numeric_tolerance() -> None:
    numeric = Numeric(rel_tol=1e-9, abs_tol=1e-12)
    for at, (got, expected) in enumerate(CLOSE + FAR):
        assert numeric.matches(got, expected) is (at < len(CLOSE)), (str(got)[:9], str(expected)[:9])


def test_unordered_lists_have_the_same_items_equally_often() -> None:
    for got, expected in [([[2], [1], [1]], [[1], [1], [2]]), (([1], 2), [2, [1]])]:
        assert Unordered().matches(got, expected)
    for got, expected in [([1, 1, 2], [1, 2, 2]), ([1, True], [1, 1]), ([1], [1, 1])]:
        assert not Unordered().matches(got, expected)
    for other in (None, 3, "ab", {1: 2}, {1, 2}):
        assert not Unordered().matches(other, ["a", "b"])


EXAMPLES: dict[str, tuple[list[Any], Any, list[Any], list[Any]]] = {
    "pair_with_sum": (
        [[3, 4, 3], 6], True, [[0, 2]], [[2, 0], [0, 0], [0, 1], [0, 3], [-1, 0], (0, 2), [0], [False, 2]],
    ),
    "queens": ([4], True, [[1, 3, 0, 2], [2, 0, 3, 1]], [[0, 1, 2, 3], [1, 3, 0], [1, 3, 0, 2, 4], [1, 1, 1, 1]]),
    "shortest_path": (
        [[["a", "b"], ["c", "b"], ["a", "c"]], "a", "c"], 2,
        [["a", "c"]], [["a", "b", "c"], ["c", "a"], ["a"], ["a", "z"]],
    ),
    "topological_order": (
        [["a", "b", "c"], [["a", "b"]]], True,
        [["a", "b", "c"], ["c", "a", "b"]], [["b", "a", "c"], ["a", "b"], ["a", "b", "b"], ["a", "b", "c", "c"]],
    ),
}  # fmt: skip
OTHER_VALUES: list[Any] = [
    None, True, 0, 1.5, math.nan, "abc", b"abc", [], [None], [[]], {}, {"a": 1}, set(), (), [1, "a"], 10**400,
]  # fmt: skip


@pytest.mark.parametrize("name", CHECKERS)
def test_a_checker_takes_what_is_right_and_no_other_value(name: str) -> None:
    args, expected, right, wrong = EXAMPLES[name]
    for answer in right:
        assert CHECKERS[name](answer, expected, args)
    for answer in [*wrong, *OTHER_VALUES]:
        assert not CHECKERS[name](answer, expected, args)


@pytest.mark.parametrize(
    ("name", "args", "nothing"),
    [
        ("pair_with_sum", [[1], 5], None),
        ("queens", [3], None),
        ("shortest_path", [[], "a", "b"], None),
        ("topological_order", [["a"], [["a", "a"]]], []),
    ],
)
def test_a_checker_knows_when_there_is_no_answer(name: str, args: list[Any], nothing: Any) -> None:
    assert CHECKERS[name](nothing, nothing, args)
    assert not CHECKERS[name]([0], nothing, args)
    assert not CHECKERS[name](0, nothing, args)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"type": "exactly"}', "exactly"),
        ('{"type": "numeric", "rel_tol": "1"}', "rel_tol"),
        ('{"type": "checker", "name": "knights"}', "queens"),
    ],
)
def test_unknown_comparison_or_checker_is_refused(text: str, why: str) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Compare)
    with pytest.raises(ValidationError, match=why):
        adapter.validate_json(text)


NUMBERS: dict[str, Fraction | int] = {
    " 42\n": 42, "+7": 7, "\N{MINUS SIGN}7": -7, "- 7": -7, "007": 7, "1,234,567.5": Fraction("1234567.5"),
    ".5": Fraction(1, 2), "5.": 5, "-0.0": 0, "6.02e23": Fraction("6.02e23"), "1E-3": Fraction(1, 1000),
    "-3 / 4": Fraction(-3, 4), "1.5/3": Fraction(1, 2), "12.5%": Fraction(1, 8), r"25\%": Fraction(1, 4),
    r"\frac{3}{4}": Fraction(3, 4), r"-\dfrac{ 1 }{ 2 }": Fraction(-1, 2), r"\tfrac{-1}{2}": Fraction(-1, 2),
    r"1.5 \times 10^{-3}": Fraction("0.0015"), r"2\cdot10^3": 2000, "2*10^3": 2000,
    "$3$": 3, "$$3$$": 3, r"\(3\)": 3, r"\[ 3 \]": 3,
}  # fmt: skip
NONE = (
    "", " ", "about 3", "3 4", "1 000", "1,23", "12,34,567", "1.2.3", "--3", "+-3", "3/0", "1/2/3", "1e", "1e99999",
    "0x10", "1_000", "nan", "inf", "True", "3+4", "2**3", "__import__('os')", "½", "٣", "%", "3%%", r"\frac{1}{0}",
    r"\frac{1}{2", r"\boxed{3}", "1" * 401, ".", "-", "$", "$$",
)  # fmt: skip


def test_numbers_are_read_exactly_or_not_at_all() -> None:
    assert {text: parse_number(text) for text in NUMBERS} == NUMBERS
    assert [text for text in NONE if parse_number(text) is not None] == []


def test_the_last_complete_box_counts() -> None:
    assert extract_boxed(r"first \boxed{1}, then \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert extract_boxed(r"\boxed{1} and \boxed{2") == "1"
    assert extract_boxed("nothing") is None
    assert extract_boxed(r"\boxed{" * 1000) is None
    # Openings that nobody closes are looked at so long and no longer.
    assert extract_boxed(r"\boxed{1} " + r"\boxed{{}" * (MAX_BOXES - 1)) == "1"
    # Each would have hundreds of characters gone through.
    assert extract_boxed(r"\boxed{1} " + r"\boxed{{}" * 150_000) is None
