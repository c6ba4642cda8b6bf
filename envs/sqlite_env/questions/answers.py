"""Expected answers: their form in words, and the comparison with given answers."""

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
_SLACK: Final = 1e-6

_NUMBER: Final = re.compile(
    r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d{1,2})?|[+-]?\.\d+", re.IGNORECASE
)
_DECORATION: Final = " \t\n€$%"
_QUOTES: Final = "\"'`"
_OUTER: Final = f"{_QUOTES}. \t\r\n"
_MAX_INTEGER: Final = 10**30


class Kind(StrEnum):
    """What sort of answer a question has."""

    NUMBER = "number"
    TEXT = "text"
    TEXTS = "texts"
    """Several, in any order."""
    SEQUENCE = "sequence"
    """Several, in the order that the question states."""
    PAIRS = "pairs"
    """Names with a number each, in any order."""


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """The right answer.

    Attributes:
        value: by kind a number, a text, texts, or pairs of a text and a number.
        places: the decimals that numbers are asked for with.
    """

    kind: Kind
    value: Any
    places: int = 0

    @property
    def asked_for(self) -> str:
        """How the answer is to be given, in words."""
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

    def matches(self, given: Any) -> bool:
        """Return whether what was given is the answer. Never raises, whatever was given."""
        match self.kind:
            case Kind.NUMBER:
                return self._same(self.value, _number(given))
            case Kind.TEXT:
                return _fold(given) == _fold(self.value)
            case Kind.TEXTS:
                return Counter(_texts(given)) == Counter(map(_fold, self.value))
            case Kind.SEQUENCE:
                return _texts(given) == [_fold(item) for item in self.value]
        wanted = {_fold(name): number for name, number in self.value}
        pairs = _pairs(given)
        answered = dict(pairs)
        return (
            len(pairs) == len(answered)
            and answered.keys() == wanted.keys()
            and all(self._same(wanted[name], answered[name]) for name in wanted)
        )

    def _same(self, wanted: Fraction | int, given: float | None) -> bool:
        # Half of the last decimal that was asked for: rounded and unrounded numbers are both within it.
        return (
            given is not None
            and abs(given - float(wanted)) <= 0.5 * 10**-self.places * bool(self.places) + _SLACK
        )


def number(value: int | Fraction, places: int = 0) -> ExpectedAnswer:
    """Return the answer that is one number."""
    return ExpectedAnswer(Kind.NUMBER, value, places)


def text(value: str) -> ExpectedAnswer:
    """Return the answer that is one text."""
    return ExpectedAnswer(Kind.TEXT, value)


def texts(values: Sequence[str]) -> ExpectedAnswer:
    """Return the answer that is several texts, in whichever order."""
    return ExpectedAnswer(Kind.TEXTS, tuple(values))


def sequence(values: Sequence[str]) -> ExpectedAnswer:
    """Return the answer that is several texts, of which the order counts."""
    return ExpectedAnswer(Kind.SEQUENCE, tuple(values))


def pairs(values: Sequence[tuple[str, int | Fraction]], places: int = 0) -> ExpectedAnswer:
    """Return the answer that is names with numbers."""
    return ExpectedAnswer(Kind.PAIRS, tuple(values), places)


def _number(given: Any) -> float | None:
    if isinstance(given, list) and len(given) == 1:
        given = given[0]
    if isinstance(given, bool):
        return None
    if isinstance(given, str):
        text = given[:MAX_TEXT].strip(_DECORATION + _QUOTES)
        if not _NUMBER.fullmatch(text):
            return None
        given = float(text.replace(",", ""))
    if not isinstance(given, int | float):
        return None
    try:
        number = float(given)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _fold(given: Any) -> str | None:
    if isinstance(given, list) and len(given) == 1:
        given = given[0]
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        return None
    if isinstance(given, int) and abs(given) > _MAX_INTEGER:
        return None  # Python writes no integer of thousands of digits
    return " ".join(str(given)[:MAX_TEXT].strip(_OUTER).split()).casefold()


def _split_list(given: Any) -> list[Any]:
    """Return the parts of a list, or of a text that stands for one."""
    if isinstance(given, str):
        given = given[:MAX_TEXT]
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            separator = next((mark for mark in ("\n", ";", ",") if mark in given), "\n")
            return [item for item in given.split(separator) if item.strip()][:MAX_PARTS]
    if isinstance(given, dict):
        return [list(pair) for pair in given.items()][:MAX_PARTS]
    return given[:MAX_PARTS] if isinstance(given, list) else [given]


def _texts(given: Any) -> list[str | None]:
    return [_fold(item) for item in _split_list(given)]


def _pairs(given: Any) -> list[tuple[str | None, float | None]]:
    parsed = []
    for item in _split_list(given):
        if isinstance(item, str):
            name, _, value = item.rpartition(":")
            item = [name, value]
        if isinstance(item, dict) and len(item) == 2:
            item = list(item.values())
        if not isinstance(item, list) or len(item) != 2:
            return []
        parsed.append((_fold(item[0]), _number(item[1])))
    return parsed
