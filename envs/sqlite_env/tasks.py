"""Generation of tasks from numbers: a database, a question about it, and the answer."""

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
"""The default number of tool calls in an episode."""


@dataclass(frozen=True, slots=True)
class SqliteTaskSpec:
    """One task, including the answer."""

    world: DatabaseContents
    question: Question

    @property
    def level(self) -> Level:
        """The question's difficulty level."""
        return self.question.level

    def text(self, calls: int) -> str:
        """Return the prompt of the task for an episode with `calls` tool calls."""
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
    """Generate the task of a number. Recent tasks are cached: all rollouts of a group reset to the same one.

    Args:
        number: The number of the task, which together with the level determines it.
        held_out: Whether to use a phrasing that does not occur in training.
        level: The difficulty; None derives it from the number as well.
    """
    source = random.Random(f"sqlite {number}")
    world = make_world(source.choice(DOMAINS), source)
    return SqliteTaskSpec(world, draw_question(world, source, held_out=held_out, level=level))
