"""Actions that a careless or ill-meaning caller sends: at the ends of what a schema allows, and beyond."""

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from openenv_core.checker.check import CheckFailed
from openenv_core.checker.drawing.sampling import sample
from openenv_core.checker.needs import needs
from openenv_core.checker.subject import Subject

Json: TypeAlias = dict[str, Any]
Path: TypeAlias = tuple[str | int, ...]

BASES: Final = 4
"""Different actions of which one value after the other is replaced."""

PLACES: Final = 8
"""Values of one action that are replaced."""

LONG: Final = 1 << 20
"""Characters of a long text."""

DEPTH: Final = 150


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


EXTREMES: Final[tuple[Any, ...]] = (
    "",
    " ",
    "\x00",
    "\u202e\U0001d573\ufeff",
    "a" * LONG,
    0,
    -1,
    1,
    2**31,
    -(2**31) - 1,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    2**64,
    10**30,
    10**400,
    0.0,
    -0.0,
    0.5,
    5e-324,
    1e308,
    -1e308,
    True,
    None,
    [],
    list(range(10_000)),
    _nested(DEPTH),
    {},
    {"": None},
    {str(number): number for number in range(1000)},
)
"""What each value of an action is replaced with, whatever it should be."""

RAW: Final[tuple[bytes, ...]] = (
    b'{"type":"step","data":{}}',
    b'{"type":"step","data":null}',
    b'{"type":"step","data":[]}',
    b'{"type":"step","data":"x"}',
    b'{"type":"step","data":7}',
    b'{"type":"step"}',
    b'{"type":"step","data":{"x":NaN}}',
    b'{"type":"step","data":{"x":Infinity,"y":-Infinity}}',
    b'{"type":"step","data":{"x":"\\ud800"}}',
    b'{"type":"step","data":{"\\udfff":1}}',
    b'{"type":"step","data":{"x":1,"x":2}}',
    b'{"type":"step","data":{"x":1e999}}',
    b'{"type":"step","data":{"__proto__":{},"constructor":1}}',
    b'{"type":"step","data":' + b"[" * 2000 + b"]" * 2000 + b"}",
    b'{"type":"step","data":{"x":' + b'{"x":' * 500 + b"1" + b"}" * 500 + b"}}",
    b'{"type":"nothing of the kind","data":{}}',
    b'{"type":["step"],"data":{}}',
    b"{}",
    b"[]",
    b"null",
    b"not JSON",
    b"",
)
"""Whole frames that no client of ours would send."""


def frame(action: object) -> bytes:
    """Write the frame of a step, as JSON that a client of any sort might write."""
    return b'{"type":"step","data":%b}' % json.dumps(action).encode()


def split(subject: Subject) -> tuple[list[Json], list[Any]]:
    """Return what the action's schema allows, from all over it and at its ends, and what it does not."""
    schema = subject.schema["action"]
    allows = _validator(schema)
    fuzz, seed = subject.limits.fuzz, subject.limits.seed
    valid: dict[str, Json] = {}
    invalid: dict[str, Any] = {}
    try:
        drawn = sample(schema, fuzz, seed, modest=False)
    except CheckFailed:  # an action that cannot be drawn: the author's examples stand in for it
        drawn = []
    bases = _bases(subject)
    for action in (*drawn, *(changed for base in bases for changed in _changed(base, schema))):
        kept = valid if isinstance(action, Mapping) and allows(action) else invalid
        kept.setdefault(json.dumps(action), action)
    return list(valid.values()), list(invalid.values())


def _bases(subject: Subject) -> list[Json]:
    """Return a few actions with different keys."""
    chosen: dict[tuple[str, ...], Json] = {}
    drawn = subject.actions(random.Random(f"hostile/{subject.limits.seed}"))
    for _ in range(64):
        action = next(drawn)
        keys = tuple(str(path) for path in _paths(action)) + tuple(
            str(value) for key, value in action.items() if key in ("type", "tool_name")
        )
        chosen.setdefault(keys, action)
    return list(chosen.values())[:BASES]


def _changed(base: Json, schema: Json) -> Iterator[Any]:
    """Yield an action with one thing changed at a time."""
    # What the schema has by default may be left out of an example, and is replaced all the same.
    names = [name for name in schema.get("properties", {}) if name != "metadata" and name not in base]
    paths = [*_paths(base), *((name,) for name in names)][:PLACES]
    for path in paths:
        bounds = _bounds(schema["properties"][path[0]]) if path[0] in schema.get("properties", {}) else ()
        for value in (*EXTREMES, *bounds):
            yield _with(base, path, value)
        if len(path) == 1:
            yield {key: value for key, value in base.items() if key != path[0]}
    yield {**base, "no_such_key": 1}
    yield {**base, "metadata": {"x" * 1000: _nested(50)}}
    yield {**base, "metadata": "text"}
    yield {}


def _bounds(schema: Json) -> list[Any]:
    """Return the values at the ends that a schema names."""
    found: list[Any] = list(schema.get("enum", ()))
    for name, step in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        if isinstance(schema.get(name), (int, float)):
            found += [schema[name], schema[name] + step]
    for name in ("minLength", "maxLength"):
        if isinstance(schema.get(name), int) and schema[name] <= LONG:
            found.append("a" * schema[name])
    return found


def _paths(value: Any, path: Path = ()) -> list[Path]:
    """Return the places of an action's values, those of nested ones included, down to the third level."""
    found: list[Path] = []
    if isinstance(value, dict) and len(path) < 3:
        for key, part in value.items():
            if (*path, key) != ("metadata",):
                found += [(*path, key), *_paths(part, (*path, key))]
    elif isinstance(value, list) and value and len(path) < 3:
        found += [(*path, 0), *_paths(value[0], (*path, 0))]
    return found


def _with(base: Json, path: Path, value: Any) -> Json:
    action: Any = copy.deepcopy(base)
    place = action
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return action  # type: ignore[no-any-return]


def _validator(schema: Json) -> Callable[[Mapping[Any, Any]], bool]:
    try:
        from jsonschema.validators import validator_for
    except ImportError as error:
        raise needs("jsonschema", error) from error
    is_valid = validator_for(schema)(schema).is_valid

    def allows(action: Mapping[Any, Any]) -> bool:
        try:
            return bool(is_valid(action))
        except (ArithmeticError, RecursionError):  # too large, or too deep, for the validator
            return False

    return allows
