import json
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from openenv_core.sandbox.values import MAX_DEPTH, NotPlainError, decode, dumps, encode, loads


class Colour(IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")

NUMBERS = [0, -5, 2**63 - 1, -(2**63), 2**63, -(2**4000), 1.5, -0.0, 1e308, math.inf, -math.inf, 1 + 2j]
TEXTS = ["", 'text with "quotes", \n, é and \U0001f600', "\ud800 alone", b"", b"\x00\xff"]
LISTS = [
    [],
    [1, 2, 3],
    [1, 2**70],
    [1.5, math.inf],
    [1, True, 1.0],
    ["a", "b"],
    [[[]], [1, ["a"]]],
    (),
    ((1, 2), [3]),
]
SETS = [set(), {1, "a", (2, 3)}, frozenset({1, 2}), {frozenset({1}), frozenset()}]
DICTS = [
    {},
    {"a": 1, "b": [2]},
    {1: "one", (1, 2): "pair", None: 0},
    {"$set": [1]},
    {"$": 1},
    {"$tuple": 1, "other": 2},
]


def test_values_round_trip() -> None:
    for value in (None, True, complex(-0.0, math.inf), *NUMBERS, *TEXTS, *LISTS, *SETS, *DICTS):
        for back in (loads(dumps(value)), decode(json.loads(json.dumps(encode(value))))):
            assert type(back) is type(value)
            assert back == value if isinstance(value, set | frozenset) else repr(back) == repr(value)


def test_nan_round_trips_as_ascii_json_without_constants() -> None:
    assert dumps([math.nan, "é", {1}]) == b'[{"$float":"nan"},"\\u00e9",{"$set":[1]}]'
    back = loads(dumps([math.nan, complex(math.nan, 1)]))
    assert math.isnan(back[0])
    assert math.isnan(back[1].real)


def test_standard_library_dicts_become_dicts() -> None:
    for value in (Counter("aab"), OrderedDict(a=2, b=1), defaultdict(int, {"a": 2, "b": 1})):
        back = loads(dumps(value))
        assert type(back) is dict
        assert back == {"a": 2, "b": 1}


def touched(*_: Any, **__: Any) -> Any:
    raise AssertionError("a method of the value was called")


def lying(base: type) -> type:
    dunders = (
        "__eq__ __hash__ __repr__ __str__ __len__ __iter__ __bool__ __getattribute__ __reduce_ex__ __int__"
    )
    return type("Liar", (base,), dict.fromkeys([*dunders.split(), "items", "keys"], touched))


class Metaclass(type):
    __hash__ = touched
    __eq__ = touched
    __name__ = property(touched)


# Made by the test itself: pytest would ask them for their representation.
NOT_PLAIN: dict[str, Callable[[], Any]] = {
    "int": lambda: lying(int)(3),
    "str": lambda: lying(str)("a"),
    "float": lambda: lying(float)(1.5),
    "list": lambda: lying(list)([1]),
    "dict": lambda: lying(dict)(a=1),
    "tuple": lambda: lying(tuple)((1,)),
    "object": lambda: lying(object)(),
    "class": lambda: Metaclass("Meta", (), {}),
    "metaclass": lambda: Metaclass("Meta", (), {})(),
    "namedtuple": lambda: Point(1, 2),
    "enum": lambda: Colour.RED,
    "bytearray": lambda: bytearray(b"a"),
    "iterator": lambda: iter([1]),
    "function": lambda: len,
    "range": lambda: range(3),
    "exception": lambda: ValueError("no"),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_other_values_are_refused_without_calling_their_methods(name: str) -> None:
    value = NOT_PLAIN[name]()
    for holder in (value, [value], [1, value], {"key": value}, (value,), [[1], {1: value}]):
        with pytest.raises(NotPlainError, match="Meta" if name == "metaclass" else "got an instance of"):
            dumps(holder)


def test_counter_with_replaced_methods_is_read_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter({"a": 1})
    with monkeypatch.context() as replaced:
        for name in ("items", "keys", "__iter__", "__len__", "__getitem__"):
            replaced.setattr(Counter, name, touched, raising=False)
        data = dumps(counter)
    assert loads(data) == {"a": 1}


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_depth_is_bounded_in_both_directions() -> None:
    assert loads(dumps(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    with pytest.raises(NotPlainError, match="nested"):
        dumps(nested(MAX_DEPTH + 1))
    for text in ('{"a":', "[", '{"$tuple":[', '{"$dict":[[1,', '{"$set":['):
        ends = "".join({"[": "]", "{": "}"}.get(mark, "") for mark in reversed(text))
        for levels in (MAX_DEPTH + 1, 20_000):
            with pytest.raises(NotPlainError):
                loads((text * levels + "1" + ends * levels).encode())
            with pytest.raises(NotPlainError):
                loads((text * levels).encode())


@pytest.mark.parametrize("levels", [1, 3])
def test_each_container_counts_one_level(levels: int) -> None:
    for wrap in (
        lambda v: [v],
        lambda v: (v,),
        lambda v: {"a": v},
        lambda v: {1: v},
        lambda v: frozenset({v}),
    ):
        value: Any = math.nan if levels == 1 else 1j
        for _ in range(levels):
            value = wrap(value)
        data = dumps(value, max_depth=levels)
        loads(data, max_depth=levels)
        with pytest.raises(NotPlainError):
            dumps(value, max_depth=levels - 1)
        with pytest.raises(NotPlainError):
            loads(data, max_depth=levels - 1)


LONG = ["a" * 2000, [0] * 2000, ["ab"] * 1000, [1.5] * 1000, [None] * 1000, {str(n): n for n in range(500)}]
LONG += [{n: n for n in range(300)}, b"a" * 2000, 2**9000, tuple(range(1000)), "\U0001f600" * 300]


def test_size_is_bounded() -> None:
    for value in LONG:
        data = dumps(value)
        assert len(data) > 1000
        for function, argument in ((dumps, value), (loads, data)):
            with pytest.raises(NotPlainError, match="1000 bytes"):
                function(argument, max_bytes=1000)


def test_shared_value_that_expands_hugely_is_refused_quickly() -> None:
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    with pytest.raises(NotPlainError):
        dumps(value, max_bytes=100_000)


FORGED = r"""
nul
[1
{"$unknown": 1}
{"$tuple": 1}
{"$tuple": {"0": 1}}
{"$set": [[1]]}
{"$set": "ab"}
{"$frozenset": [{}]}
{"$dict": [[1]]}
{"$dict": [[1, 2, 3]]}
{"$dict": [[[], 2]]}
{"$dict": {"a": 1}}
{"$dict": ["ab"]}
{"$int": 1}
{"$int": "0x1"}
{"$int": "1_0"}
{"$int": " 1"}
{"$int": "--1"}
{"$int": ""}
{"$float": "1.5"}
{"$float": 1.5}
{"$float": []}
{"$complex": [1, 2]}
{"$complex": [1.0]}
{"$complex": [1.0, "a"]}
{"$bytes": "?"}
{"$bytes": 1}
"""


def test_forged_json_is_refused() -> None:
    for text in (*FORGED.strip().splitlines(), "", "\xff", "1" * 5000):
        with pytest.raises(NotPlainError):
            loads(text.encode("latin-1"))


def test_colliding_numbers_are_refused() -> None:
    # All of them have the hash 0; a set of 20,000 such would take minutes to build.
    multiples = [n * (2**61 - 1) for n in range(1, 2_001)]
    for forged in ({"$set": encode(multiples)}, {"$dict": [[encode(n), 1] for n in multiples]}):
        with pytest.raises(NotPlainError, match="hash"):
            decode(forged)
    assert decode({"$set": encode(multiples[:40])}) == set(multiples[:40])
    assert len(decode(encode(set(range(20_000))))) == 20_000


def test_module_needs_only_the_standard_library() -> None:
    source = Path(sys.modules[encode.__module__].__file__ or "").read_text()
    assert set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)) <= sys.stdlib_module_names
