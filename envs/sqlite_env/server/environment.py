"""The environment: a database generated for one question, tools to read it, and the check of the answer."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

from pydantic import Field

from openenv_core.errors import EpisodeOverError
from openenv_core.tools import ToolFailedError, tool
from openenv_core.worlds import Level, ToolWorld

from ..models import SqliteObservation, SqliteState
from ..tasks import CALLS, SqliteTaskSpec, make_task
from ..world.reading import MAX_SQL, ReadOnlyDatabase
from ..world.records import Table, write_database

SAMPLES: Final = 3
"""The number of rows that describe_table shows."""

Answer: TypeAlias = str | float | list[str | float | list[str | float]] | dict[str, float]
"""A submitted answer, as JSON values or as text."""

_READ_ONLY: Final = {"readOnlyHint": True, "openWorldHint": False}


class SqliteEnvironment(ToolWorld[SqliteTaskSpec, SqliteState]):
    """A question about an SQLite database, to be answered by looking at the schema and asking SQL.

    The task decides the database, what its tables and columns are called, and the question. The answer is worked out
    from the records that the database was made of, and is in nothing that a caller can see.
    """

    NAME = "sqlite"
    ABOUT = "A question about an SQLite database, answered with tools that read it."
    CALLS = CALLS

    _reader: ReadOnlyDatabase | None = None
    _is_right = False

    def make_task(self, number: int, *, held_out: bool, level: Level | None = None) -> SqliteTaskSpec:
        """Generate the task of a number."""
        return make_task(number, held_out=held_out, level=level)

    def begin_task(self, task: SqliteTaskSpec, calls: int) -> SqliteObservation:
        """Create the task's database, and return the task as the observation of the reset."""
        self._reader, self._is_right = ReadOnlyDatabase(write_database(task.world), task.world.today), False
        return SqliteObservation(
            task=task.text(calls),
            question=task.question.text,
            answer_format=task.question.answer.format_text,
            difficulty=task.level.value,
            calls_left=calls,
        )

    def earned(self) -> float:
        """Return the reward: 1 for a correct answer, else 0."""
        return float(self._is_right)

    def close(self) -> None:
        """Close the database."""
        super().close()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def describe_more(self, task: SqliteTaskSpec) -> Mapping[str, Any]:
        """Add the question to the description of a task."""
        return {"question": task.question.text}

    # The tools. Their signatures and docstrings become the schemas and descriptions that the policy sees.

    @tool(annotations=_READ_ONLY)
    def list_tables(self) -> list[dict[str, str]]:
        """List the tables of the database, with what is in them."""
        return [{"name": table.name, "description": table.description} for table in self._tables().values()]

    @tool(annotations=_READ_ONLY)
    def describe_table(
        self, table: Annotated[str, Field(max_length=200, description="the name of the table")]
    ) -> dict[str, Any]:
        """Describe a table: its columns, how many rows it has, and the first of them."""
        table_info = self._tables().get(table)
        if table_info is None:
            names = ", ".join(self._tables())
            raise ToolFailedError(f"expected one of the tables {names}, got {table!r:.60}")
        columns = [
            {
                "name": column.name,
                "type": column.type,
                "description": column.description,
                **({"nullable": True} if column.nullable else {}),
                **({"primary_key": True} if column.key else {}),
                **({"references": column.references} if column.references else {}),
            }
            for column in table_info.columns
        ]
        return {
            "name": table_info.name,
            "description": table_info.description,
            "columns": columns,
            "row_count": self.query(f"SELECT count(*) FROM {table_info.name}")["rows"][0][0],
            "first_rows": self.query(f"SELECT * FROM {table_info.name} LIMIT {SAMPLES}")["rows"],
        }

    @tool(annotations=_READ_ONLY)
    def query(
        self,
        sql: Annotated[
            str, Field(max_length=MAX_SQL, description="one SELECT of SQLite, or WITH and a SELECT")
        ],
    ) -> dict[str, Any]:
        """Run one query that reads, and return its columns and at most 100 rows."""
        if self._reader is None:
            raise EpisodeOverError("expected reset() before the first call, got a call; call reset() first")
        return self._reader.query(sql)

    @tool
    def submit_answer(
        self,
        answer: Annotated[
            Answer,
            Field(
                description="the answer, in the form that the task asks for; a list may be a list, or text"
            ),
        ],
    ) -> str:
        """Hand in the answer. This can be done once, and ends the task."""
        self._is_right, self._finished = self._current().question.answer.matches(answer), True
        return "right" if self._is_right else "wrong"

    def _tables(self) -> dict[str, Table]:
        return {table.name: table for table in self._current().world.naming.values()}
