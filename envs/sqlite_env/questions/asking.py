"""Question families, and drawing and wording a question about a world."""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from openenv_core.worlds import Level

from ..world.domains import Domain
from ..world.records import DatabaseContents, Transaction
from .answers import ExpectedAnswer

_TRIES: Final = 12


@dataclass(frozen=True, slots=True)
class Draw:
    """A drawn question of a family before wording: the answer, and the values of the phrasing's slots."""

    answer: ExpectedAnswer
    slots: dict[str, str] = field(default_factory=dict)


Events: TypeAlias = tuple[Transaction, ...]

DrawQuestion: TypeAlias = Callable[[DatabaseContents, Events, random.Random], Draw | None]
"""Draws a question about a world and those of its events that count; None if the drawn one is ambiguous or trivial."""


@dataclass(frozen=True, slots=True)
class QuestionFamily:
    """Questions that are answered in the same way.

    Attributes:
        name: the key in `FAMILIES`.
        level: the difficulty.
        phrasings: wordings of the question; the last one is held out for validation and test.
        draw: draws a question.
        counts_events: whether a sentence on which events count, by status, follows the phrasing.
    """

    name: str
    level: Level
    phrasings: tuple[str, ...]
    draw: DrawQuestion
    counts_events: bool


FAMILIES: Final[dict[str, QuestionFamily]] = {}

VALID_RULES: Final = (
    "Leave out {events} with the status '{void}'.",
    "{Events} with the status '{void}' do not count.",
)
ANY_RULES: Final = ("Count {events} of every status.", "The status of the {events} does not matter.")


def family(
    level: Level, *phrasings: str, counts_events: bool = True
) -> Callable[[DrawQuestion], DrawQuestion]:
    """Return a decorator that registers a family, named as the decorated function, which is its `draw`."""

    def register(draw: DrawQuestion) -> DrawQuestion:
        name = draw.__name__.removeprefix("_")
        FAMILIES[name] = QuestionFamily(name, level, phrasings, draw, counts_events)
        return draw

    return register


_WORD: Final = re.compile(r"\{([A-Za-z_]+)\}")


def phrase(phrasing: str, domain: Domain) -> str:
    """Insert a domain's words into a phrasing. Slots, which are in capitals, are left in place."""
    words = dict(domain.all_words)
    words |= {name.capitalize(): word.capitalize() for name, word in domain.all_words.items()}
    text = _WORD.sub(lambda match: words.get(match[1], match[0]), phrasing)
    return re.sub(r"\b([Aa])n? (?=(\w))", _fix_article, text)


def fill(text: str, slots: Mapping[str, str]) -> str:
    """Insert values into the slots."""
    return _WORD.sub(lambda match: slots[match[1]], text)


def format_rules(domain: Domain, *, valid_only: bool) -> tuple[str, ...]:
    """Return the alternative sentences that say which events count."""
    return tuple(phrase(rule, domain) for rule in (VALID_RULES if valid_only else ANY_RULES))


def _fix_article(match: re.Match[str]) -> str:
    return f"{match[1]}{'n' if match[2].lower() in 'aeio' else ''} "


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and its answer, which must not be shown to players."""

    family: str
    level: Level
    text: str
    answer: ExpectedAnswer


def draw_question(
    world: DatabaseContents, rng: random.Random, *, held_out: bool, level: Level | None = None
) -> Question:
    """Draw a question about a world.

    Args:
        world: The world.
        rng: The source of randomness.
        held_out: Whether to use a phrasing that does not occur in training.
        level: The difficulty; None draws it.
    """
    level = level or rng.choice(list(Level))
    candidates = [candidate for candidate in FAMILIES.values() if candidate.level is level]
    rng.shuffle(candidates)
    for family in candidates:
        for _ in range(_TRIES):
            if (question := draw_family_question(family, world, rng, held_out=held_out)) is not None:
                return question
    raise AssertionError(f"no family of level {level} has a question about this world")


def draw_family_question(
    family: QuestionFamily, world: DatabaseContents, rng: random.Random, *, held_out: bool
) -> Question | None:
    """Draw a question of a family; None if the family rejects the drawn one."""
    domain = world.domain
    valid_only = family.counts_events and rng.random() < 0.7
    void = domain.statuses[-1]
    events = tuple(event for event in world.events if not (valid_only and event.status == void))
    draw = family.draw(world, events, rng)
    if draw is None:
        return None
    *usual, held_out_phrasing = family.phrasings
    text = fill(phrase(held_out_phrasing if held_out else rng.choice(usual), domain), draw.slots)
    if family.counts_events:
        text += " " + rng.choice(format_rules(domain, valid_only=valid_only))
    return Question(family.name, family.level, text, draw.answer)
