"""Untrusted queries on a database, restricted to reads of that database and bounded in cost."""

# ruff: noqa: SIM905 - a string of words is easier to read than a list of them

import math
import re
import resource
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from typing import Any, Final

from openenv_core.tools import ToolFailedError


class QueryRefusedError(ToolFailedError):
    """A query was rejected or aborted. The message is shown to its author."""


MAX_TOKENS: Final = 40_000
"""The maximum number of tokens in a query after every WITH is expanded."""

MAX_DEFINITIONS: Final = 50

# As in SQLite, every non-ASCII character is part of a name, even a space.
_TOKEN: Final = re.compile(
    r"""[ \t\n\v\f\r]+|--[^\n]*|/\*.*?(?:\*/|\Z)          # nothing
    |(?P<quoted>'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\])
    |(?P<plain>[A-Za-z_\x80-\U0010ffff][\w$\x80-\U0010ffff]*|\d[\w.]*|.)""",
    re.DOTALL | re.VERBOSE,
)
_TABLE_PREFIXES: Final = frozenset(("from", "join", "in", ",", "("))


def _check_expansion(sql: str) -> None:
    """Reject a query that is too long once every WITH is expanded, or has too many definitions.

    Some other names are mistaken for tables, so the limits are far above any real need.

    Raises:
        QueryRefusedError: The query exceeds a limit.
    """
    tokens = list(_tokenize(sql))
    bodies: dict[str, list[str]] = {}
    for count, (name, start, end) in enumerate(_find_definitions(tokens), 1):
        bodies.setdefault(name, []).extend(tokens[start:end])
        if count > MAX_DEFINITIONS:
            raise QueryRefusedError(f"expected a query of at most {MAX_DEFINITIONS} parts (x AS (...))")
    lengths: dict[str, int] = {}
    if bodies and _count_tokens(tokens, bodies, lengths) > MAX_TOKENS:
        raise QueryRefusedError(
            f"expected a query of at most {MAX_TOKENS} words with every WITH written out where it is used, got "
            "a longer one; use each of them less often"
        )


def _count_tokens(tokens: Sequence[str], bodies: dict[str, list[str]], lengths: dict[str, int]) -> int:
    total = len(tokens)
    for name in _find_tables(tokens):
        if name not in bodies:
            continue
        if name not in lengths:
            lengths[name] = 0  # ends the recursion; a query that refers to itself is rejected elsewhere
            lengths[name] = _count_tokens(bodies[name], bodies, lengths)
        total += lengths[name]
        if total > MAX_TOKENS:
            break
    return total


def _find_tables(tokens: Sequence[str]) -> Iterator[str]:
    for at, token in enumerate(tokens):
        if at and tokens[at - 1] in _TABLE_PREFIXES and tokens[at + 1 : at + 2] != ["."]:
            yield token


def _find_definitions(tokens: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield the name, and the start and end of the body, of each `name [(columns)] AS [[NOT] MATERIALIZED] (body)`."""
    ends = _find_closing_brackets(tokens)
    starts = {end: start for start, end in ends.items()}
    for index, token in enumerate(tokens):
        if token != "as" or not index:
            continue
        body = index + 1
        while tokens[body : body + 1] in (["not"], ["materialized"]):
            body += 1
        if body in ends:
            name = starts.get(index - 1, index) - 1
            if name >= 0:
                yield tokens[name], body, ends[body]


def _find_closing_brackets(tokens: Sequence[str]) -> dict[int, int]:
    """Return the index of the closing bracket for each opening one; the end of the tokens if it is not closed."""
    ends: dict[int, int] = {}
    open_brackets: list[int] = []
    for index, token in enumerate(tokens):
        if token == "(":
            open_brackets.append(index)
        elif token == ")" and open_brackets:
            ends[open_brackets.pop()] = index
    return ends | dict.fromkeys(open_brackets, len(tokens))


def _tokenize(sql: str) -> Iterator[str]:
    for match in _TOKEN.finditer(sql):
        if quoted := match["quoted"]:
            # SQLite accepts any kind of quotes around a name.
            mark = "]" if quoted[0] == "[" else quoted[0]
            yield quoted[1:-1].replace(mark * 2, mark).lower()
        elif plain := match["plain"]:
            yield plain.lower()


MAX_SQL: Final = 8_000
MAX_ROWS: Final = 100
MAX_CELL: Final = 400
MAX_NAME: Final = 100
MAX_RESULT: Final = 16_000
"""Limits: characters of a query, rows of a result, characters of a value, of a column's name, and of a result."""

MAX_INSTRUCTIONS: Final = 1_000_000
MAX_QUERY_TIME_S: Final = 3.0

MAX_SPILLED_BYTES: Final = 32_000_000
"""The maximum number of bytes that a query may write to disk, as it does for sorting or when its cache overflows."""

MAX_TEXT: Final = 1_000
"""The maximum number of bytes of any text or row during a query."""

MAX_PROGRAM: Final = 20_000
"""The maximum number of instructions in the program to which SQLite compiles a query."""

_PROGRESS_INTERVAL: Final = 500
"""The number of executed instructions between two calls of the progress handler."""

_LIMITS: Final = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_TEXT,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_SQL * 4,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 60,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_VDBE_OP: MAX_PROGRAM,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 20,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}

_DATE_FUNCTIONS: Final = ("date", "time", "datetime", "julianday", "strftime")

_FUNCTIONS: Final = frozenset(
    "abs avg cast ceil ceiling char coalesce concat count cume_dist dense_rank first_value floor glob group_concat "
    "hex ifnull iif instr lag last_value lead length like lower ltrim max min nth_value ntile nullif percent_rank "
    "quote rank replace round row_number rtrim sign string_agg substr substring sum total trim typeof unicode "
    "upper".split()
) | frozenset(_DATE_FUNCTIONS)
"""The allowed functions: none that returns random numbers, reads the system clock or allocates gigabytes."""

_SCHEMA_TABLES: Final = ("sqlite_master", "sqlite_schema")
_COMMENT: Final = re.compile(r"\s+|--[^\n]*(?:\n|\Z)|/\*.*?(?:\*/|\Z)", re.DOTALL)
_READING_WORDS: Final = ("select", "with", "values", "explain")


class ReadOnlyDatabase:
    """Runs untrusted queries on one connection, and makes it read-only.

    Args:
        connection: The connection to a complete database. `close` closes it.
        today: The value of "now" in date functions.
    """

    def __init__(self, connection: sqlite3.Connection, today: date) -> None:
        self._connection = connection
        self._today = f"{today.isoformat()} 12:00:00"
        self._ticks = 0
        self._deadline = 0.0
        self._initial_written_bytes = 0
        self._stop_reason: str | None = None
        self._refusal_reason: str | None = None
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        self._tables = frozenset(name for (name,) in tables) | frozenset(_SCHEMA_TABLES)
        # A separate connection for date functions: the one that runs the query cannot be used inside its functions.
        self._clock = sqlite3.connect(":memory:", check_same_thread=False)
        for name in _DATE_FUNCTIONS:
            connection.create_function(name, -1, self._make_date_function(name), deterministic=True)
        connection.execute("PRAGMA query_only = ON")
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_progress_handler(self._check_progress, _PROGRESS_INTERVAL)
        connection.set_authorizer(self._authorize)

    def query(self, sql: str) -> dict[str, Any]:
        """Run one query and return its columns and its first rows.

        Raises:
            QueryRefusedError: The query is invalid, not allowed, or exceeds a limit; the message says which.
        """
        if len(sql) > MAX_SQL:
            raise QueryRefusedError(f"expected a query of at most {MAX_SQL} characters, got {len(sql)}")
        if (word := _read_first_word(sql)) not in _READING_WORDS:
            raise QueryRefusedError(f"expected one query that reads (SELECT or WITH), got {word!r:.40}")
        _check_expansion(sql)
        self._ticks, self._stop_reason, self._refusal_reason = 0, None, None
        self._initial_written_bytes = _count_written_bytes()
        self._deadline = time.monotonic() + MAX_QUERY_TIME_S
        try:
            cursor = self._connection.execute(sql)
            try:
                # Fetch one more than is returned, to detect whether there are more.
                rows = cursor.fetchmany(MAX_ROWS + 1)
                columns = [str(column[0]) for column in cursor.description or ()]
            finally:
                cursor.close()
        except MemoryError:
            # SQLite reports a program above its limit as out of memory.
            raise QueryRefusedError(
                f"expected a query of at most {MAX_PROGRAM} instructions before any is run, got a longer one; "
                "join and nest less"
            ) from None
        except (sqlite3.Error, sqlite3.Warning, OverflowError, ValueError) as error:
            raise QueryRefusedError(
                self._stop_reason or self._refusal_reason or _describe_error(error)
            ) from None
        return _bound_rows(columns, rows)

    def close(self) -> None:
        """Close the database."""
        self._connection.close()
        self._clock.close()

    def _check_progress(self) -> int:
        self._ticks += 1
        if self._ticks * _PROGRESS_INTERVAL > MAX_INSTRUCTIONS:
            self._stop_reason = (
                f"expected a query that SQLite runs in {MAX_INSTRUCTIONS} instructions, got one that takes more; "
                "join on keys, and filter before joining"
            )
        elif time.monotonic() > self._deadline:
            self._stop_reason = (
                f"expected a query that takes at most {MAX_QUERY_TIME_S:g} s, got one that takes longer"
            )
        elif _count_written_bytes() - self._initial_written_bytes > MAX_SPILLED_BYTES:
            self._stop_reason = (
                f"expected a query that keeps at most {MAX_SPILLED_BYTES // 1_000_000} MB on its way, got one that "
                "keeps more; sort and group fewer rows"
            )
        return self._stop_reason is not None

    def _authorize(
        self, action: int, table: str | None, column: str | None, _database: str | None, _inner: str | None
    ) -> int:
        if action == sqlite3.SQLITE_SELECT:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ:
            # For a name that the query itself defines, SQLite reports no column.
            if table in self._tables or not column:
                return sqlite3.SQLITE_OK
            self._refusal_reason = f"expected one of the tables that list_tables tells, got {table!r:.60}"
        elif action == sqlite3.SQLITE_FUNCTION:
            if str(column).lower() in _FUNCTIONS:
                return sqlite3.SQLITE_OK
            self._refusal_reason = (
                f"expected one of SQLite's plain functions, got {column!r:.60}, which is not available here"
            )
        elif action == sqlite3.SQLITE_RECURSIVE:
            self._refusal_reason = "expected a query without recursion, got WITH RECURSIVE"
        else:
            self._refusal_reason = "expected a query that only reads, got one that does something else"
        return sqlite3.SQLITE_DENY

    def _make_date_function(self, name: str) -> Any:
        """Return a replacement of one of SQLite's date functions in which "now" is the day of the task."""
        takes_format = name == "strftime"

        def call(*arguments: Any) -> Any:
            # As in SQLite, a blob is read as text, and a text ends at its first NUL.
            args = [_to_plain(argument) for argument in arguments]
            at = 1 if takes_format else 0
            if len(args) == at:
                args.append("now")
            if len(args) > at and isinstance(args[at], str) and args[at].strip().lower() == "now":
                args[at] = self._today
            if any(
                isinstance(argument, str) and argument.strip().lower() in ("localtime", "utc")
                for argument in args
            ):
                return None  # dates in these databases have no time zone
            placeholders = ", ".join("?" for _ in args)
            row = self._clock.execute(f"SELECT {name}({placeholders})", args).fetchone()
            return row[0]

        return call


def _count_written_bytes() -> int:
    """Return the number of bytes that this thread has written to files; 0 if the system does not count them."""
    scope = getattr(resource, "RUSAGE_THREAD", None)
    return 0 if scope is None else resource.getrusage(scope).ru_oublock * 512


def _describe_error(error: Exception) -> str:
    if "too big" in str(error):
        return (
            f"expected texts of at most {MAX_TEXT} characters, got a longer one on the way; "
            "shorten it, and give long expressions a name with AS"
        )
    return f"SQLite says: {error!s:.300}"


def _to_plain(value: Any) -> Any:
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return value.partition("\0")[0] if isinstance(value, str) else value


def _read_first_word(sql: str) -> str:
    at = 0
    while match := _COMMENT.match(sql, at):
        at = match.end()
    word = re.match(r"\w+", sql[at:])
    return word.group().lower() if word else sql[at : at + 20]


def _bound_rows(columns: list[str], fetched: Iterable[tuple[Any, ...]]) -> dict[str, Any]:
    columns = [name[:MAX_NAME] for name in columns]
    rows: list[list[Any]] = []
    size = sum(map(len, columns))
    truncated = False
    for row in fetched:
        cells = [_to_cell(value) for value in row]
        size += sum(len(str(cell)) + 2 for cell in cells)
        if len(rows) == MAX_ROWS or size > MAX_RESULT:
            truncated = True
            break
        rows.append(cells)
    result: dict[str, Any] = {"columns": columns, "rows": rows, "row_count": len(rows)}
    if truncated:
        result["truncated"] = f"there are more rows than the {len(rows)} shown"
    return result


def _to_cell(value: Any) -> Any:
    if isinstance(value, bytes):
        value = value.hex()
    if isinstance(value, str) and len(value) > MAX_CELL:
        return f"{value[:MAX_CELL]}... ({len(value)} characters)"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
