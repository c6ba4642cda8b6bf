"""Expected answers: descriptions of their format, and comparison with submitted answers."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, Final

MAX_TEXT: Final = 10_000
MAX_PARTS: Final = 500
_TOLERANCE: Final = 1e-6

_NUMBER: Final = re.compile(
    r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d{1,2})?|[+-]?\.\d+", re.IGNORECASE
)
_DECORATION: Final = " \t\n€$%"
_QUOTES: Final = "\"'`"
_OUTER: Final = f"{_QUOTES}. \t\r\n"
_MAX_INTEGER: Final = 10**30


class Kind(StrEnum):
    """The type of an answer."""

    NUMBER = "number"
    TEXT = "text"
    TEXTS = "texts"
    """Several texts, in any order."""
    SEQUENCE = "sequence"
    """Several texts, in the order that the question states."""
    PAIRS = "pairs"
    """Pairs of a name and a number, in any order."""


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """The correct answer of a question.

    Attributes:
        kind: the type of the answer.
        value: a number, a text, a tuple of texts, or a tuple of (text, number) pairs, depending on `kind`.
        places: the number of decimals that the question asks for.
    """

    kind: Kind
    value: Any
    places: int = 0

    @property
    def format_text(self) -> str:
        """The description of the answer's format in the prompt."""
        digits = ("whole", "with one decimal", "with two decimals")[self.places]
        match self.kind:
            case Kind.NUMBER if self.places:
                return f"one number, rounded to {'one decimal' if self.places == 1 else 'two decimals'}"
            case Kind.NUMBER:
                return "one whole number"
            case Kind.TEXT:
                return "one text: a name as the database has it, or a date as the question has it"
            case Kind.TEXTS:
                return "a list of texts, in any order"
            case Kind.SEQUENCE:
                return "a list of texts, in the order asked for"
        return f"a list of pairs [text, number], in any order; numbers {digits}"

    def matches(self, answer: Any) -> bool:
        """Return whether a submitted answer is correct. Never raises, whatever was submitted."""
        match self.kind:
            case Kind.NUMBER:
                return self._is_near(self.value, _parse_number(answer))
            case Kind.TEXT:
                return _fold(answer) == _fold(self.value)
            case Kind.TEXTS:
                return Counter(_parse_texts(answer)) == Counter(map(_fold, self.value))
            case Kind.SEQUENCE:
                return _parse_texts(answer) == [_fold(item) for item in self.value]
        expected = {_fold(name): number for name, number in self.value}
        pairs = _parse_pairs(answer)
        got = dict(pairs)
        return (
            len(pairs) == len(got)
            and got.keys() == expected.keys()
            and all(self._is_near(expected[name], got[name]) for name in expected)
        )

    def _is_near(self, expected: Fraction | int, number: float | None) -> bool:
        # Half a unit of the last requested decimal, so that rounded and unrounded numbers are both accepted.
        return (
            number is not None
            and abs(number - float(expected)) <= 0.5 * 10**-self.places * bool(self.places) + _TOLERANCE
        )


def number(value: int | Fraction, places: int = 0) -> ExpectedAnswer:
    """Return an expected answer of one number."""
    return ExpectedAnswer(Kind.NUMBER, value, places)


def text(value: str) -> ExpectedAnswer:
    """Return an expected answer of one text."""
    return ExpectedAnswer(Kind.TEXT, value)


def texts(values: Sequence[str]) -> ExpectedAnswer:
    """Return an expected answer of several texts in any order."""
    return ExpectedAnswer(Kind.TEXTS, tuple(values))


def sequence(values: Sequence[str]) -> ExpectedAnswer:
    """Return an expected answer of several texts in a given order."""
    return ExpectedAnswer(Kind.SEQUENCE, tuple(values))


def pairs(values: Sequence[tuple[str, int | Fraction]], places: int = 0) -> ExpectedAnswer:
    """Return an expected answer of (name, number) pairs."""
    return ExpectedAnswer(Kind.PAIRS, tuple(values), places)


def _parse_number(value: Any) -> float | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        text = value[:MAX_TEXT].strip(_DECORATION + _QUOTES)
        if not _NUMBER.fullmatch(text):
            return None
        value = float(text.replace(",", ""))
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _fold(value: Any) -> str | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        return None  # Python refuses to convert integers of thousands of digits to text
    return " ".join(str(value)[:MAX_TEXT].strip(_OUTER).split()).casefold()


def _split_list(value: Any) -> list[Any]:
    """Return the items of a list, or of a text that represents one."""
    if isinstance(value, str):
        value = value[:MAX_TEXT]
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            separator = next((mark for mark in ("\n", ";", ",") if mark in value), "\n")
            return [item for item in value.split(separator) if item.strip()][:MAX_PARTS]
    if isinstance(value, dict):
        return [list(pair) for pair in value.items()][:MAX_PARTS]
    return value[:MAX_PARTS] if isinstance(value, list) else [value]


def _parse_texts(value: Any) -> list[str | None]:
    return [_fold(item) for item in _split_list(value)]


def _parse_pairs(answer: Any) -> list[tuple[str | None, float | None]]:
    parsed = []
    for item in _split_list(answer):
        if isinstance(item, str):
            name, _, value = item.rpartition(":")
            item = [name, value]
        if isinstance(item, dict) and len(item) == 2:
            item = list(item.values())
        if not isinstance(item, list) or len(item) != 2:
            return []
        parsed.append((_fold(item[0]), _parse_number(item[1])))
    return parsed
