"""The database world, reduced to questions about one table: `examples.grpo_tools.world:app`.

A reset's seed determines the task: the database, the names of its tables and columns, and the question. Tasks of
held-out episodes never occur in training.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final

from envs.sqlite_env.models import SqliteObservation, SqliteState
from envs.sqlite_env.server.environment import SqliteEnvironment
from envs.sqlite_env.tasks import make_task
from openenv_core.tools import ToolAction, ToolObservation
from openenv_core.worlds import Level
from rl_bridge.rollout.assignment import TRAINING_SEEDS
from servers import create_app

FAMILIES: Final = ("count_in_city", "missing_email", "joined_in_year", "items_between")
"""Families of questions that are answered by counting rows of one table."""

_TRIES: Final = 64
"""Candidate numbers for each task; about every second one has a question of the families."""


class SmallSqliteEnvironment(SqliteEnvironment):
    """Asks how many rows of one table meet a condition. Meant to be reset with `difficulty="easy"`."""

    SPLITS: ClassVar[Mapping[str, int]] = MappingProxyType({"train": 2 * TRAINING_SEEDS})

    @classmethod
    def task_number(cls, split: str, index: int) -> int:
        """Return the number that determines a task: the first of its candidates with a question of the families."""
        first = super().task_number(split, index) * _TRIES
        for number in range(first, first + _TRIES):
            if make_task(number, held_out=False, level=Level.EASY).question.family in FAMILIES:
                return number
        raise IndexError(
            f"expected a question of the families for the index {index}, got none in {_TRIES} tries"
        )


app = create_app(
    SmallSqliteEnvironment,
    ToolAction,
    ToolObservation,
    env_name="small_sqlite",
    max_concurrent_envs=1024,
    state_cls=SqliteState,
    reset_observation_cls=SqliteObservation,
)
