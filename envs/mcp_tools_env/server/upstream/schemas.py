"""Bounded validation of a call's arguments, in general and by a tool's JSON schema, and limits of messages."""

import asyncio
import json
import re
import re._constants as constants  # type: ignore[import-not-found] # the only parser of regular expressions
import re._parser as parser  # type: ignore[import-not-found]
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Final, TypeAlias

import jsonschema
from jsonschema import validators
from jsonschema.protocols import Validator
from referencing import Registry

from openenv_core.protocol.jsonio import dumps

MAX_SCHEMA_BYTES: Final = 256 << 10
MAX_CHECKS: Final = 50_000
"""The budget for validating one set of arguments. Each keyword costs one check, plus one for each member of its value
and of the instance it applies to."""

BYTES_A_CHECK: Final = 64
"""How many bytes cost as much as one check when whole values are compared or printed."""

MAX_PATTERN_CHARS: Final = 512
MAX_MATCHED_CHARS: Final = 1024
"""The maximum length of a text that is matched against a pattern."""

MAX_WAYS: Final = 16 * MAX_MATCHED_CHARS
"""The maximum number of ways in which a pattern may match: one unbounded repetition and a few choices."""

MAX_FAULTS: Final = 3

_Keyword: TypeAlias = Callable[[Any, Any, Any, Any], Any]

_SKIPPED_KEYWORDS: Final = ("unevaluatedProperties", "unevaluatedItems", "format")
"""Keywords that are not checked, because their cost cannot be bounded here."""

_WHOLE_VALUE_KEYWORDS: Final = ("enum", "const")
"""Keywords that compare whole values."""


class _TooMuchError(Exception):
    pass


class ArgumentCheck:
    """Checks the arguments of one tool."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = dict(schema)
        self._validator: Validator | None = None
        try:
            self._size = len(json.dumps(self._schema))
            if self._size <= MAX_SCHEMA_BYTES:
                kind = _bound_validator(
                    validators.validator_for(self._schema, jsonschema.Draft202012Validator)
                )
                # An empty registry, so that nothing is fetched to resolve a reference.
                self._validator = kind(self._schema, registry=Registry())
        except Exception:
            self._validator = None  # not a valid schema: leave the check to the server

    def find_faults(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return messages on what is wrong with the arguments; empty if nothing is, or it cannot be checked."""
        if self._validator is None:
            return []
        messages: list[str] = []
        token = _BUDGET.set(_Budget())
        try:
            _BUDGET.get().fault_cost = 1 + (len(dumps(arguments)) + self._size) // BYTES_A_CHECK
            for error in self._validator.iter_errors(dict(arguments)):
                messages.append(_describe(error))
                if len(messages) >= MAX_FAULTS:
                    break
        except Exception:  # anything a schema can cause: exhausted budget, recursion, external references
            return []
        finally:
            _BUDGET.reset(token)
        return messages


class _Budget:
    def __init__(self) -> None:
        self.checks_left = MAX_CHECKS
        self.fault_cost = 1  # the cost of reporting one fault

    def spend(self, cost: int = 1) -> None:
        self.checks_left -= cost
        if self.checks_left < 0:
            raise _TooMuchError


_BUDGET: Final[ContextVar[_Budget]] = ContextVar("budget")
"""The budget of the current validation; a context variable, because keyword functions take no further arguments."""


def _describe(error: jsonschema.ValidationError) -> str:
    place = ".".join(str(key) for key in error.absolute_path)
    text = error.message if len(error.message) <= 300 else f"{error.message[:300]}..."
    return f"{place}: {text}" if place else text


@lru_cache(maxsize=16)
def _bound_validator(kind: type[Validator]) -> type[Validator]:
    """Return a validator class that counts the cost of every keyword, and restricts or skips the dangerous ones."""
    keywords: dict[str, _Keyword] = {
        name: _count_keyword(keyword, whole_values=name in _WHOLE_VALUE_KEYWORDS)
        for name, keyword in kind.VALIDATORS.items()
        if name not in _SKIPPED_KEYWORDS
    }
    keywords |= dict.fromkeys((name for name in _SKIPPED_KEYWORDS if name in kind.VALIDATORS), _skip_keyword)
    keywords["uniqueItems"] = _count_keyword(_check_unique, whole_values=True)
    keywords["pattern"] = _check_pattern
    for name in ("patternProperties", "additionalProperties"):
        if name in keywords:
            keywords[name] = _require_tame_patterns(keywords[name])
    extended: type[Validator] = validators.extend(kind, keywords)  # type: ignore[no-untyped-call]
    return extended


def _count_keyword(keyword: _Keyword, *, whole_values: bool = False) -> _Keyword:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        budget = _BUDGET.get()
        budget.spend(1 + _count_members(value) + _count_members(instance))
        if whole_values and _count_members(instance):
            budget.spend((len(dumps(value)) + len(dumps(instance))) // BYTES_A_CHECK)
        for error in keyword(validator, value, instance, schema) or ():
            budget.spend(budget.fault_cost)
            yield error

    return check


def _count_members(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _skip_keyword(validator: Any, value: Any, instance: Any, schema: Any) -> None:
    return None


def _check_unique(
    validator: Any, is_required: Any, instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    """Check `uniqueItems` in one pass, by comparing the items' JSON texts."""
    if is_required is True and isinstance(instance, list):
        texts = [json.dumps(item, sort_keys=True) for item in instance]
        if len(set(texts)) != len(texts):
            yield jsonschema.ValidationError("has items that are equal, and may not")


def _check_pattern(
    validator: Any, pattern: Any, instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    _BUDGET.get().spend()
    if not isinstance(instance, str) or len(instance) > MAX_MATCHED_CHARS or not is_tame(pattern):
        return
    if not re.search(pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _require_tame_patterns(keyword: _Keyword) -> _Keyword:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        patterns = schema.get("patternProperties", {}) if isinstance(schema, Mapping) else {}
        tame = isinstance(patterns, Mapping) and all(is_tame(pattern) for pattern in patterns)
        if tame and not (
            patterns and isinstance(instance, Mapping) and any(len(key) > 256 for key in instance)
        ):
            yield from keyword(validator, value, instance, schema) or ()

    return check


@lru_cache(maxsize=1024)
def is_tame(pattern: Any) -> bool:
    """Return whether a pattern can match a text in only a few ways, all of which the regex engine may have to try.

    A pattern has too many ways if it repeats something that contains a choice, uses back-references or lookaround, or
    has many choices in a row.
    """
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
        return False
    try:
        return _count_ways(parser.parse(pattern), repeated=False) <= MAX_WAYS
    except (re.error, RecursionError, OverflowError):
        return False


_REPEATS: Final = (constants.MAX_REPEAT, constants.MIN_REPEAT, constants.POSSESSIVE_REPEAT)
_TOO_MANY_WAYS: Final = MAX_WAYS + 1


def _count_ways(parsed: Any, *, repeated: bool) -> int:
    """Count the ways to match, up to `_TOO_MANY_WAYS`; a repeated part may have only one."""
    total = 1
    for kind, argument in parsed:
        if kind in _REPEATS:
            low, high, items = argument
            choices = min(int(high), MAX_MATCHED_CHARS) - min(int(low), MAX_MATCHED_CHARS) + 1
            ways = choices * _count_ways(items, repeated=repeated or high > 1)
        elif kind is constants.SUBPATTERN:
            ways = _count_ways(argument[3], repeated=repeated)
        elif kind is constants.ATOMIC_GROUP:
            ways = _count_ways(argument, repeated=repeated)
        elif kind is constants.BRANCH:
            ways = sum(_count_ways(branch, repeated=repeated) for branch in argument[1])
        elif kind in (constants.GROUPREF, constants.GROUPREF_EXISTS, constants.ASSERT, constants.ASSERT_NOT):
            return _TOO_MANY_WAYS
        else:
            continue
        if repeated and ways > 1:
            return _TOO_MANY_WAYS
        total = min(total * ways, _TOO_MANY_WAYS)
    return total


MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 64
MAX_NUMBER: Final = 1 << 1023
"""The largest integer that every JSON parser can be expected to read; it has 308 digits."""


def describe_unsendable(arguments: Mapping[str, Any]) -> str | None:
    """Return why arguments cannot be sent to any tool; None if they can."""
    level: list[Any] = [arguments]
    for _ in range(MAX_DEPTH):
        next_level: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                next_level += value.values()
            elif isinstance(value, list | tuple):
                next_level += value
            elif isinstance(value, int) and abs(value) > MAX_NUMBER:
                return f"expected numbers of at most {MAX_NUMBER.bit_length()} bits, got one of {value.bit_length()}"
        level = next_level
        if not level:
            break
    else:
        return f"expected arguments of at most {MAX_DEPTH} levels, got more"
    try:
        size = len(dumps(arguments))
    except ValueError as error:
        return f"expected arguments that JSON can carry, got: {str(error)[:200]}"
    return None if size <= MAX_BYTES else f"expected arguments of at most {MAX_BYTES} bytes, got {size}"


MAX_VALUES: Final = 1 << 18
"""The maximum number of JSON values in a message."""

MESSAGES_A_SECOND: Final = 2000
"""The maximum rate of messages from a tool server; beyond it, reading pauses."""

_VALUE_PREFIXES: Final = (b"[", b"{", b",")


class ValueCounter:
    """Counts the values in one JSON text that arrives in chunks."""

    def __init__(self) -> None:
        self.values = 0
        self._in_string = False
        self._escape = b""

    def add(self, data: bytes) -> bool:
        """Count a chunk; return whether the total is still within `MAX_VALUES`.

        The contents of strings do not count; a quote within a string is always escaped.
        """
        data = self._escape + data
        self._escape = b"\\" if _ends_with_escape(data) else b""
        if self._escape:
            data = data[:-1]
        if b"\\" in data:
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = data.split(b'"', 2 * MAX_VALUES + 2)
        for piece in pieces[self._in_string :: 2]:
            self.values += sum(map(piece.count, _VALUE_PREFIXES))
        self._in_string ^= len(pieces) % 2 == 0
        return self.values <= MAX_VALUES and len(pieces) <= 2 * MAX_VALUES


def _ends_with_escape(data: bytes) -> bool:
    return (len(data) - len(data.rstrip(b"\\"))) % 2 == 1


class MessageThrottle:
    """Limits the rate of messages by pausing the reader, which applies backpressure to the server."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._count = 0

    async def wait(self, messages: int = 1) -> None:
        """Count messages, and pause if the rate limit is exceeded."""
        self._count += messages
        if self._count < MESSAGES_A_SECOND:
            return
        pause_s = self._start + self._count / MESSAGES_A_SECOND - time.monotonic()
        await asyncio.sleep(max(0.0, pause_s))
        self._start, self._count = time.monotonic(), 0
