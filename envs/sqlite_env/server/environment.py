"""A database that is made for one question, the tools to read it, and the answer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, TypeAlias
from uuid import uuid4

from pydantic import Field

from openenv_core import EnvironmentMetadata
from openenv_core.errors import EpisodeOverError
from openenv_core.tasks import GeneratedTasks, read_task_options
from openenv_core.tools import ToolEnvironment, ToolFailedError, ToolResult, prompt, resource, tool

from ..models import SqliteObservation, SqliteState
from ..questions import QuestionLevel
from ..tasks import CALLS, SqliteTaskSpec, make_task
from ..world.reading import MAX_SQL, ReadOnlyDatabase
from ..world.records import Table, write_database

SAMPLES: Final = 3
"""Rows that describe_table shows."""

Given: TypeAlias = str | float | list[str | float | list[str | float]] | dict[str, float]
"""What may be handed in: as JSON has it, or as text."""

_READS: Final = {"readOnlyHint": True, "openWorldHint": False}


class SqliteEnvironment(GeneratedTasks, ToolEnvironment[SqliteState]):
    """A question about an SQLite database, to be answered by looking at the schema and asking SQL.

    The task decides the database, what its tables and columns are called, and the question, so the same task and
    calls give the same episode. The answer is worked out from the records that the database was made of, and is in
    nothing that a caller can see.
    """

    DETERMINISTIC = True
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._task: SqliteTaskSpec | None = None
        self._reader: ReadOnlyDatabase | None = None
        self._right: bool | None = None
        self._calls = CALLS
        self._state = SqliteState()

    def reset(
        self,
        *,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str | None = None,
        index: int | None = None,
        difficulty: str | None = None,
        max_calls: int | None = None,
        **unknown: Any,
    ) -> SqliteObservation:
        """Make a database and ask.

        Args:
            seed: Chooses the task of a split where `index` does not; None draws a seed, which `state` then tells.
            episode_id: The caller's name for the episode; None makes a uuid4.
            split: train (also where it is None), validation or test.
            index: The task of the split.
            difficulty: easy, medium or hard; None leaves it to the task. With another difficulty an index is another
                question about the same database.
            max_calls: After how many calls the episode ends; None for 20.
            **unknown: Refused.

        Raises:
            InvalidResetOptionError: An unknown option, or a value that cannot be. The episode before goes on.
        """
        options = read_task_options(
            type(self),
            QuestionLevel,
            CALLS,
            seed=seed,
            episode_id=episode_id,
            split=split,
            index=index,
            difficulty=difficulty,
            max_calls=max_calls,
            unknown=unknown,
        )
        number = self.task_number(options.split, options.index)
        task = make_task(number, held_out=options.split != "train", level=options.level)
        self.close()
        self._reader = ReadOnlyDatabase(write_database(task.world), task.world.today)
        self._task, self._right, self._calls = task, None, options.max_calls
        self._state = SqliteState(
            episode_id=str(uuid4()) if episode_id is None else episode_id,
            seed=options.seed,
            split=options.split,
            index=options.index,
            difficulty=task.question.level.value,
            calls_left=options.max_calls,
        )
        return SqliteObservation(
            task=task.text(options.max_calls),
            question=task.question.text,
            answer_format=task.question.answer.asked_for,
            difficulty=task.question.level.value,
            calls_left=options.max_calls,
        )

    @property
    def state(self) -> SqliteState:
        """Where the episode stands: a copy, so that the holder of it cannot change the task."""
        return self._state.model_copy()

    def close(self) -> None:
        """Free the database."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def get_metadata(self) -> EnvironmentMetadata:
        """What the environment says of itself."""
        return EnvironmentMetadata(
            name="sqlite",
            description="A question about an SQLite database, answered with tools that read it.",
        )

    def describe_task(self, split: str, index: int) -> Mapping[str, Any]:
        """Return the question of a task, without its answer."""
        task = make_task(self.task_number(split, index), held_out=split != "train")
        return {
            "id": f"sqlite-{split}-{index}",
            "task": task.text(CALLS),
            "question": task.question.text,
            "difficulty": task.question.level.value,
        }

    # The tools: callers are told of them by their types and docstrings.

    @tool(annotations=_READS)
    def list_tables(self) -> list[dict[str, str]]:
        """List the tables of the database, with what is in them."""
        return [{"name": table.name, "description": table.says} for table in self._tables().values()]

    @tool(annotations=_READS)
    def describe_table(
        self, table: Annotated[str, Field(max_length=200, description="the name of the table")]
    ) -> dict[str, Any]:
        """Describe a table: its columns, how many rows it has, and the first of them."""
        found = self._tables().get(table)
        if found is None:
            there_are = ", ".join(self._tables())
            raise ToolFailedError(f"expected one of the tables {there_are}, got {table!r:.60}")
        columns = [
            {
                "name": column.name,
                "type": column.type,
                "description": column.says,
                **({"nullable": True} if column.nullable else {}),
                **({"primary_key": True} if column.key else {}),
                **({"references": column.references} if column.references else {}),
            }
            for column in found.columns
        ]
        reader = self._open_reader()
        return {
            "name": found.name,
            "description": found.says,
            "columns": columns,
            "row_count": reader.query(f"SELECT count(*) FROM {found.name}")["rows"][0][0],
            "first_rows": reader.query(f"SELECT * FROM {found.name} LIMIT {SAMPLES}")["rows"],
        }

    @tool(annotations=_READS)
    def query(
        self,
        sql: Annotated[
            str, Field(max_length=MAX_SQL, description="one SELECT of SQLite, or WITH and a SELECT")
        ],
    ) -> dict[str, Any]:
        """Run one query that reads, and return its columns and at most 100 rows."""
        return self._open_reader().query(sql)

    @tool
    def submit_answer(
        self,
        answer: Annotated[
            Given,
            Field(
                description="the answer, in the form that the task asks for; a list may be a list, or text"
            ),
        ],
    ) -> str:
        """Hand in the answer. This can be done once, and ends the task."""
        self._right = self._asked().question.answer.matches(answer)
        return "right" if self._right else "wrong"

    # An agent that calls the tools over MCP sees no reset; it reads the task here.

    @resource("task://current", mime_type="text/plain")
    def task(self) -> str:
        """What is to be done with the tools."""
        return self._asked().text(self._calls)

    @prompt(name="task")
    def begin(self) -> str:
        """What is to be done with the tools, to begin a conversation with."""
        return self.task()

    # Around every call, one that fails too.

    def before_call(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Refuse calls outside of an episode."""
        if self._reader is None:
            raise EpisodeOverError("expected reset() before the first call, got a call; call reset() first")
        if self._state.done:
            raise EpisodeOverError

    def after_call(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        """Count the call, and say what it earned."""
        state = self._state
        state.step_count += 1
        state.calls_left = self._calls - state.step_count
        state.done = self._right is not None or state.calls_left == 0
        return replace(result, reward=float(self._right is True), done=state.done)

    def _asked(self) -> SqliteTaskSpec:
        if self._task is None:
            raise EpisodeOverError(
                "expected reset() before the task is asked for, got none; call reset() first"
            )
        return self._task

    def _open_reader(self) -> ReadOnlyDatabase:
        if self._reader is None:
            raise EpisodeOverError("expected reset() before the first call, got a call; call reset() first")
        return self._reader

    def _tables(self) -> dict[str, Table]:
        return {table.name: table for table in self._asked().world.naming.values()}
