"""Families of questions: how one is worded, and how its answer is worked out, from records and without SQL."""

import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from ..world.domains import Domain
from ..world.records import DatabaseContents, Transaction
from .answers import ExpectedAnswer


class QuestionLevel(StrEnum):
    """How much a question asks for."""

    EASY = "easy"
    """One table, or one join."""
    MEDIUM = "medium"
    """Joins and groups."""
    HARD = "hard"
    """Windows, comparisons within groups, several steps."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One question of a family, before it is put into words."""

    answer: ExpectedAnswer
    slots: dict[str, str] = field(default_factory=dict)


Drawing = Callable[[DatabaseContents, tuple[Transaction, ...], random.Random], Draw | None]
"""Draws a question; None where this draw was none that is clear. The events are those that count."""


@dataclass(frozen=True, slots=True)
class QuestionFamily:
    """Questions that are answered in the same way.

    Attributes:
        phrasings: ways to put it; the last is kept for validation and test.
        counts_events: the question says which status counts, after the phrasing.
    """

    name: str
    level: QuestionLevel
    phrasings: tuple[str, ...]
    draw: Drawing
    counts_events: bool


FAMILIES: Final[dict[str, QuestionFamily]] = {}

VALID_RULES: Final = (
    "Leave out {events} with the status '{void}'.",
    "{Events} with the status '{void}' do not count.",
)
ANY_RULES: Final = ("Count {events} of every status.", "The status of the {events} does not matter.")


def family(
    name: str, level: QuestionLevel, *phrasings: str, counts_events: bool = True
) -> Callable[[Drawing], Drawing]:
    """Register a family."""

    def register(draw: Drawing) -> Drawing:
        FAMILIES[name] = QuestionFamily(name, level, phrasings, draw, counts_events)
        return draw

    return register


def headers(events: Iterable[Transaction]) -> int:
    """Return how many events there are, where several lines may be one."""
    return len({event.header for event in events})


def single(scores: dict[str, int]) -> str | None:
    """Return the name with the greatest number; None where two have it."""
    if not scores:
        return None
    ranked = sorted(scores.values(), reverse=True)
    if len(ranked) > 1 and ranked[0] == ranked[1]:
        return None
    return max(scores, key=lambda name: scores[name])


_WORD: Final = re.compile(r"\{([A-Za-z_]+)\}")


def spoken(phrasing: str, domain: Domain) -> str:
    """Put a domain's words into a phrasing. Slots, in capitals, stay."""
    words = dict(domain.all_words)
    words |= {name.capitalize(): word.capitalize() for name, word in domain.all_words.items()}
    said = _WORD.sub(lambda found: words.get(found[1], found[0]), phrasing)
    return re.sub(r"\b([Aa])n? (?=(\w))", _article, said)


def filled(said: str, slots: Mapping[str, str]) -> str:
    """Put values into the slots."""
    return _WORD.sub(lambda found: slots[found[1]], said)


def rules(domain: Domain, *, valid_only: bool) -> tuple[str, ...]:
    """The sentences that say which events count."""
    return tuple(spoken(rule, domain) for rule in (VALID_RULES if valid_only else ANY_RULES))


def _article(found: re.Match[str]) -> str:
    return f"{found[1]}{'n' if found[2].lower() in 'aeio' else ''} "
