import math
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from envs.code_interpreter_env.grading.checkers import CHECKERS
from envs.code_interpreter_env.grading.compare import (
    AnyOf,
    Compare,
    Exact,
    Numeric,
    SetLike,
    Unordered,
)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (1, 1),
        (None, None),
        ("a", "a"),
        (math.nan, math.nan),
        (-0.0, 0.0),
        ([1, [2]], [1, [2]]),
        ((1, 2), (1, 2)),
        ({"a": [1], "b": 2}, {"b": 2, "a": [1]}),
        ({1, 2, 3}, {3, 2, 1}),
        ({math.nan: 1}, {math.nan: 1}),
        ({-0.0: "a"}, {0.0: "a"}),
        (frozenset({frozenset({1})}), frozenset({frozenset({1})})),
        pytest.param(10**4000, 10**4000, id="huge"),
    ],
)
def test_exact_takes_the_same(got: Any, expected: Any) -> None:
    assert Exact().holds(got, expected)
    assert Numeric().holds(got, expected)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (True, 1),
        (1, True),
        (0, False),
        (1, 1.0),
        (1.0, 1),
        (0, None),
        ("1", 1),
        ("a", b"a"),
        ([1, 2], (1, 2)),
        ((1, 2), [1, 2]),
        ([1, True], [1, 1]),
        ([1, 2], [2, 1]),
        ([1], [1, 2]),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"a": True}, {"a": 1}),
        ({True: "x"}, {1: "x"}),
        ({1}, {True}),
        ({1}, frozenset({1})),
        ([1], {1}),
        ({1.0}, {1}),
        (math.nan, 1.0),
        (math.inf, -math.inf),
        (1 + 0j, 1),
    ],
)
def test_exact_takes_nothing_else(got: Any, expected: Any) -> None:
    assert not Exact().holds(got, expected)


def test_tuples_may_be_lists_where_a_task_says_so() -> None:
    loose = Exact(tuples_as_lists=True)
    assert loose.holds([(1, 2), [3]], [[1, 2], (3,)])
    assert not loose.holds({1}, [1])
    assert Numeric(tuples_as_lists=True).holds((1.0,), [1])


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        (1, 1.0, True),
        (1.0, 1, True),
        (1.0 + 1e-12, 1.0, True),
        (1.001, 1.0, False),
        (True, 1, False),
        (1, True, False),
        (1e-13, 0.0, True),
        (math.inf, math.inf, True),
        (math.inf, 1.0, False),
        (1.0, math.inf, False),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        pytest.param(10**400, 10**400 + 1, True, id="huge"),
        pytest.param(10**400, 1.0, False, id="huge and small"),
        pytest.param(10**400, math.inf, False, id="huge and infinite"),
        (1.7e308, -1.7e308, False),
        ([1, {"a": 2.0}], [1.0, {"a": 2}], True),
        ("1", 1, False),
        (None, 0, False),
    ],
)
def test_numeric_tolerance(got: Any, expected: Any, same: bool) -> None:
    assert Numeric(rel_tol=1e-9, abs_tol=1e-12).holds(got, expected) is same


def test_unordered_counts_items() -> None:
    assert Unordered().holds([[2], [1], [1]], [[1], [1], [2]])
    assert Unordered().holds(([1], 2), [2, [1]])
    assert not Unordered().holds([1, 1, 2], [1, 2, 2])
    assert not Unordered().holds([1, True], [1, 1])
    assert not Unordered().holds([1], [1, 1])
    for other in (None, 3, "ab", {1: 2}, {1, 2}):
        assert not Unordered().holds(other, ["a", "b"])


def test_unordered_within_a_tolerance_finds_the_one_matching() -> None:
    wide = Unordered(items=Numeric(rel_tol=0.0, abs_tol=1.0))
    # The first may go with both, the second with one: taking the first best would leave the second alone.
    assert wide.holds([1.0, 0.0], [1.0, 2.0]) is True
    assert wide.holds([0.5, 0.0], [0.0, 3.0]) is False
    assert Unordered(items=Exact(tuples_as_lists=True)).holds([(1, 2), [0]], [[0], [1, 2]])


def test_set_like_ignores_repetitions() -> None:
    assert SetLike().holds([1, 1, 2], [2, 1])
    assert SetLike().holds({1, 2}, [2, 1])
    assert not SetLike().holds([1, True], [1])
    assert not SetLike().holds("ab", ["a", "b"])
    assert not SetLike().holds(None, [])


def test_any_of() -> None:
    assert AnyOf().holds("b", ["a", "b"])
    assert not AnyOf().holds(["a", "b"], ["a", "b"])
    assert AnyOf(each=Numeric(abs_tol=0.1)).holds(2.05, [1, 2])


EXAMPLES: dict[str, tuple[list[Any], Any, list[Any], list[Any]]] = {
    "pair_with_sum": (
        [[3, 4, 3], 6],
        True,
        [[0, 2]],
        [[2, 0], [0, 0], [0, 1], [0, 3], [-1, 0], (0, 2), [0], [False, 2]],
    ),
    "queens": (
        [4],
        True,
        [[1, 3, 0, 2], [2, 0, 3, 1]],
        [[0, 1, 2, 3], [1, 3, 0], [1, 3, 0, 2, 4], [1, 1, 1, 1]],
    ),
    "shortest_path": (
        [[["a", "b"], ["c", "b"], ["a", "c"]], "a", "c"],
        2,
        [["a", "c"]],
        [["a", "b", "c"], ["c", "a"], ["a"], ["a", "z"]],
    ),
    "topological_order": (
        [["a", "b", "c"], [["a", "b"]]],
        True,
        [["a", "b", "c"], ["c", "a", "b"]],
        [["b", "a", "c"], ["a", "b"], ["a", "b", "b"], ["a", "b", "c", "c"]],
    ),
}


@pytest.mark.parametrize("name", CHECKERS)
def test_a_checker_takes_what_is_right_and_no_other_value(name: str) -> None:
    args, expected, right, wrong = EXAMPLES[name]
    for answer in right:
        assert CHECKERS[name](answer, expected, args)
    others: list[Any] = [
        None,
        True,
        0,
        1.5,
        math.nan,
        "abc",
        b"abc",
        [],
        [None],
        [[]],
        {},
        {"a": 1},
        set(),
        (),
        [1, "a"],
        10**400,
    ]
    for answer in [*wrong, *others]:
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


def test_an_unknown_comparison_or_checker_is_refused() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Compare)
    refused = (
        '{"type": "exactly"}',
        '{"type": "checker", "name": "eval"}',
        '{"type": "numeric", "rel_tol": "1"}',
    )
    for text in refused:
        with pytest.raises(ValidationError):
            adapter.validate_json(text)
    with pytest.raises(ValidationError, match="queens"):
        adapter.validate_json('{"type": "checker", "name": "knights"}')
