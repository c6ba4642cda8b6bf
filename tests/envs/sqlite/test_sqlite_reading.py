"""Limits of queries: statements, time, memory, and size of results."""

import itertools
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.sqlite_env.world.domains import LIBRARY
from envs.sqlite_env.world.making import make_world
from envs.sqlite_env.world.reading import MAX_RESULT, MAX_ROWS, QueryRefusedError, ReadOnlyDatabase
from envs.sqlite_env.world.records import write_database

WORLD = make_world(LIBRARY, random.Random("reading"))
PEOPLE, EVENTS = WORLD.naming["people"].name, WORLD.naming["events"].name
LONG = f"'{'a' * 900}'"


@pytest.fixture
def reader() -> Iterator[ReadOnlyDatabase]:
    found = ReadOnlyDatabase(write_database(WORLD), WORLD.today)
    yield found
    found.close()


REFUSED = [
    f"DELETE FROM {PEOPLE}",
    f"WITH x AS (SELECT 1) DELETE FROM {PEOPLE}",
    f"/* SELECT */ DROP TABLE {PEOPLE}",
    f"SELECT 1; DELETE FROM {PEOPLE}",
    f"EXPLAIN DELETE FROM {PEOPLE}",
    "CREATE TEMP TABLE x AS SELECT 1",
    "ATTACH ':memory:' AS x",
    "ATTACH '{tmp}/x.db' AS x",
    "VACUUM INTO '{tmp}/x.db'",
    "PRAGMA query_only = OFF",
    "SELECT * FROM pragma_database_list",
    "SELECT load_extension('{tmp}/x.so')",
    "SELECT readfile('/etc/hostname')",
    "SELECT writefile('{tmp}/x', 'x')",
    "SELECT fts3_tokenizer('simple')",
    "SELECT * FROM json_each('[1]')",
    "SELECT * FROM dbstat",
    "SELECT name FROM sqlite_temp_master",
    f"/* {'x' * 9000} */ SELECT 1",
    "SELECT random()",
    "SELECT current_timestamp",
    "SELECT randomblob(1000000000)",
    "SELECT printf('%1000000000d', 1)",
    "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c",
    "WITH c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n FROM c",
    "BEGIN",
    "SELECT * FROM no_such_table",
    "",
    "SELECT \x00",
    "\ud800",
    "SELECT ?1",
    "SELECT abs(-9223372036854775808)",
    f"SELECT {'(' * 200}1{')' * 200}",
    f"SELECT {','.join('1' * 500)}",
    " UNION ALL ".join(["SELECT 1"] * 100),
    f"SELECT '{'x' * 9000}'",
]


def test_refused_statement_is_reported_and_changes_nothing(reader: ReadOnlyDatabase, tmp_path: Path) -> None:
    def everything() -> list[object]:
        return [reader.query(f"SELECT * FROM {table.name}")["rows"] for table in WORLD.naming.values()]

    before = everything()
    for sql in REFUSED:
        with pytest.raises(QueryRefusedError):
            reader.query(sql.replace("{tmp}", str(tmp_path)))
    for sql in (
        "PRAGMA user_version",
        "DELETE FROM nothing",
        "",
        "/* SELECT 1",
        "BEGIN",
    ):  # not even prepared
        with pytest.raises(QueryRefusedError, match="expected one query that reads"):
            reader.query(sql)
    assert everything() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "sql",
    [
        f"SELECT count(*) FROM {EVENTS} a, {EVENTS} b, {EVENTS} c, {EVENTS} d",
        f"SELECT {LONG} || a.rowid FROM {EVENTS} a, {EVENTS} b, {EVENTS} c ORDER BY 1",
        f"SELECT count(DISTINCT {LONG} || a.rowid || b.rowid || c.rowid) FROM {EVENTS} a, {EVENTS} b, {EVENTS} c",
        f"SELECT sum({LONG} || c.rowid GLOB '{'*a' * 40}b') FROM {EVENTS} a, {EVENTS} b, {EVENTS} c",
    ],
)
def test_queries_that_take_too_much_are_ended_and_the_next_one_runs(
    reader: ReadOnlyDatabase, sql: str
) -> None:
    with pytest.raises(QueryRefusedError, match=r"instructions|at most 1000 characters|32 MB|longer"):
        reader.query(sql)
    assert reader.query(f"SELECT count(*) FROM {PEOPLE}")["rows"] == [[len(WORLD.people)]]


def double(levels: int, definition: str, mark: str = "") -> str:
    parts = [
        definition.replace("NEW", f"a{level}").replace("OLD", f"a{level - 1}") for level in range(1, levels)
    ]
    return f"WITH {', '.join([f'a0{mark} AS (SELECT 1 x)', *parts])} SELECT count(*) FROM a{levels - 1}{mark}"


@pytest.mark.parametrize(
    "definition",
    [
        "NEW AS (SELECT 1 x FROM OLD, OLD t)",
        "NEW(x) AS MATERIALIZED (SELECT (SELECT x FROM OLD) + (SELECT x FROM (OLD)))",
        """"NEW" AS (SELECT 1 x FROM[OLD]a JOIN/* */'OLD' b)""",
        "`NEW` AS (SELECT 1 x FROM -- )\n OLD a, OLD b)",
        "NEW\u00b7 AS (SELECT 1 x FROM OLD\u00b7, OLD\u00b7 t)",
        "NEW\u00a0 AS (SELECT ')(' x FROM OLD\u00a0, OLD\u00a0 t)",
    ],
)
def test_multiplying_expressions_are_refused_before_expansion(
    reader: ReadOnlyDatabase, definition: str
) -> None:
    mark = definition[3] if ord(definition[3]) > 127 else ""
    assert reader.query(double(5, definition, mark))["row_count"] == 1
    with pytest.raises(QueryRefusedError, match="written out"):
        reader.query(double(16, definition, mark))


def test_a_query_that_spills_too_much_is_ended(
    reader: ReadOnlyDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not every file system counts what is written; this one counts too much.
    monkeypatch.setattr(
        "envs.sqlite_env.world.reading._count_written_bytes", itertools.count(step=20_000_000).__next__
    )
    with pytest.raises(QueryRefusedError, match="32 MB"):
        reader.query(f"SELECT count(*) FROM {EVENTS} a, {EVENTS} b")


def test_a_query_that_becomes_too_long_a_program_is_refused(reader: ReadOnlyDatabase) -> None:
    tables = ", ".join(f"{PEOPLE} t{place}" for place in range(8))
    uses = ", ".join(["(SELECT x FROM a)"] * 350)
    with pytest.raises(QueryRefusedError, match="20000 instructions"):
        reader.query(
            f"WITH a AS NOT MATERIALIZED (SELECT t1.rowid x FROM {tables} ORDER BY 1) SELECT 1 WHERE 1 IN ({uses})"
        )
    assert reader.query("SELECT 1")["rows"] == [[1]]


def test_a_query_has_so_many_parts_and_no_more(reader: ReadOnlyDatabase) -> None:
    line = "NEW AS (SELECT x FROM OLD)"
    assert reader.query(double(50, line))["rows"] == [[1]]
    with pytest.raises(QueryRefusedError, match="50 parts"):
        reader.query(double(51, line))


def test_usual_queries_run(reader: ReadOnlyDatabase) -> None:
    people = len(WORLD.people)
    for sql in (
        f"SELECT count(*) FROM {PEOPLE};",
        f"  -- how many\n/* there are */ select count(*) from main.{PEOPLE}",
        f"WITH x AS (SELECT 1 FROM {PEOPLE}), y AS (SELECT * FROM x) SELECT count(*) FROM y",
        f"WITH x AS MATERIALIZED (SELECT * FROM {PEOPLE}) SELECT count(*) FROM x",
        f"SELECT count(*) OVER () FROM {PEOPLE} LIMIT 1",
        f"SELECT max(n) FROM (SELECT row_number() OVER (ORDER BY rowid) AS n FROM {PEOPLE})",
        f"SELECT CASE WHEN EXISTS (SELECT 1 FROM {EVENTS}) THEN (SELECT count(*) FROM {PEOPLE}) END",
    ):
        assert reader.query(sql)["rows"] == [[people]], sql
    assert reader.query("VALUES (1, 'a'), (NULL, x'00ff')")["rows"] == [[1, "a"], [None, "00ff"]]
    assert reader.query("SELECT 9e999, -9e999")["rows"] == [["inf", "-inf"]]
    assert {name for (name,) in reader.query("SELECT name FROM sqlite_master")["rows"]} == {
        table.name for table in WORLD.naming.values()
    }
    assert "SCAN" in str(reader.query(f"EXPLAIN QUERY PLAN SELECT * FROM {PEOPLE}")["rows"])


def test_results_are_cut_at_a_bound(reader: ReadOnlyDatabase) -> None:
    many = reader.query(f"SELECT a.rowid FROM {EVENTS} a, {EVENTS} b")
    assert (many["row_count"], len(many["rows"])) == (MAX_ROWS, MAX_ROWS)
    assert "more rows" in many["truncated"]
    assert "truncated" not in reader.query(f"SELECT rowid FROM {EVENTS} LIMIT {MAX_ROWS}")
    wide = reader.query(f"SELECT {', '.join([LONG] * 3)} FROM {EVENTS}")
    assert 0 < len(str(wide["rows"])) <= MAX_RESULT
    names = reader.query(f'SELECT 1 AS "{"y" * 900}"')["columns"]
    assert [len(name) for name in names] == [100]
    assert reader.query(f"SELECT {LONG}")["rows"][0][0].endswith("... (900 characters)")


def test_now_is_the_day_of_the_task(reader: ReadOnlyDatabase) -> None:
    today = WORLD.today.isoformat()
    row = reader.query(
        "SELECT date('now'), date(), date(' NOW '), strftime('%Y-%m-%d'), strftime('%Y', 'now'), "
        "date('now', '+1 day'), date('2024-02-28', '+1 day'), time('now', 'localtime'), strftime(), date(NULL), "
        "julianday(date('now')) > 0"
    )["rows"][0]
    tomorrow = sqlite3.connect(":memory:").execute("SELECT date(?, '+1 day')", [today]).fetchone()[0]
    odd = "SELECT date(x'6e6f77'), date('now' || char(0) || 'x'), date('now', 'localtime' || char(0))"
    assert reader.query(odd)["rows"] == [[today, today, None]]
    assert row[:6] == [today, today, today, today, today[:4], tomorrow]
    assert row[6:] == ["2024-02-29", None, None, None, 1]
