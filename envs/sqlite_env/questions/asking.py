"""Drawing one question about a world."""

import random
from dataclasses import dataclass
from typing import Final

from ..world.records import DatabaseContents
from .answers import ExpectedAnswer
from .family import FAMILIES, QuestionFamily, QuestionLevel, filled, rules, spoken

_TRIES: Final = 12


@dataclass(frozen=True, slots=True)
class Question:
    """One question and its answer, which is not for players."""

    family: str
    level: QuestionLevel
    text: str
    answer: ExpectedAnswer


def ask(
    world: DatabaseContents, source: random.Random, *, held_out: bool, level: QuestionLevel | None = None
) -> Question:
    """Draw a question.

    Args:
        world: What it is about.
        source: Where chance comes from.
        held_out: Put it in a way that training never does.
        level: How hard it is; None draws that too.
    """
    level = level or source.choice(list(QuestionLevel))
    chosen = [one for one in FAMILIES.values() if one.level is level]
    source.shuffle(chosen)
    for family in chosen:
        for _ in range(_TRIES):
            if (question := ask_of(family, world, source, held_out=held_out)) is not None:
                return question
    raise AssertionError(f"no family of level {level} has a question about this world")


def ask_of(
    family: QuestionFamily, world: DatabaseContents, source: random.Random, *, held_out: bool
) -> Question | None:
    """Draw a question of a family; None where this draw was none that is clear."""
    domain = world.domain
    valid_only = family.counts_events and source.random() < 0.7
    void = domain.statuses[-1]
    events = tuple(event for event in world.events if not (valid_only and event.status == void))
    draw = family.draw(world, events, source)
    if draw is None:
        return None
    *usual, kept = family.phrasings
    said = filled(spoken(kept if held_out else source.choice(usual), domain), draw.slots)
    if family.counts_events:
        said += " " + source.choice(rules(domain, valid_only=valid_only))
    return Question(family.name, family.level, said, draw.answer)
