"""Tasks from numbers: a database, a question about it, and the answer."""

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from openenv_core.worlds import Level

from .questions import Question, draw_question
from .world.domains import DOMAINS
from .world.making import make_world
from .world.records import DatabaseContents

CALLS: Final = 20
"""How many calls an episode has, unless reset says otherwise."""


@dataclass(frozen=True, slots=True)
class SqliteTaskSpec:
    """One task, with its answer."""

    world: DatabaseContents
    question: Question

    @property
    def level(self) -> Level:
        """How hard the question is."""
        return self.question.level

    def text(self, calls: int) -> str:
        """Put the task into words."""
        return (
            f"You can read an SQLite database of {self.world.domain.about}; for this task, today is "
            f"{self.world.today.isoformat()}. Find the answer to one question and hand it in with submit_answer.\n\n"
            f"Question: {self.question.text}\n"
            f"Answer: {self.question.answer.format_text}\n\n"
            "Begin with list_tables and describe_table: names differ from database to database, and some tables are "
            "beside the point. query runs one SELECT at a time. "
            f"You have {calls} calls in all, and one answer; handing it in ends the task."
        )


@lru_cache(maxsize=128)
def make_task(number: int, *, held_out: bool, level: Level | None = None) -> SqliteTaskSpec:
    """Make the task of a number. The newest are kept: the siblings of a group are reset to the same one.

    Args:
        number: Decides everything, together with the level.
        held_out: Put the question in a way that training never does.
        level: How hard the question is; None leaves that to the number as well.
    """
    source = random.Random(f"sqlite {number}")
    world = make_world(source.choice(DOMAINS), source)
    return SqliteTaskSpec(world, draw_question(world, source, held_out=held_out, level=level))
