"""Questions and answers: worked out in two ways, compared leniently, and never visible."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
from sqlite_solver import Schema, read_question, write_query

from envs.sqlite_env.questions import FAMILIES, Kind, Question, draw_family_question, draw_question, phrase
from envs.sqlite_env.questions.answers import ExpectedAnswer, number, pairs, sequence, text, texts
from envs.sqlite_env.server.environment import SqliteEnvironment
from envs.sqlite_env.world.domains import DOMAINS
from envs.sqlite_env.world.making import make_world
from envs.sqlite_env.world.reading import ReadOnlyDatabase
from envs.sqlite_env.world.records import DatabaseContents, write_database
from openenv_core.tools import ToolFailedError
from tests.envs.tool_calls import calls_of, visible_in


def schema_of(world: DatabaseContents) -> Schema:
    tables = world.naming.values()
    return Schema(
        world.domain,
        {table.role: table.name for table in tables},
        {column.role: column.name for table in tables for column in table.columns},
    )


@pytest.mark.parametrize(
    ("worlds", "least"), [(range(8), 1), pytest.param(range(1000, 1150), 76, marks=pytest.mark.soak)]
)
def test_sql_and_records_agree_on_every_family_and_domain(worlds: range, least: int) -> None:
    seen: Counter[str] = Counter()
    for place in worlds:
        source = random.Random(f"compared {place}")
        world = make_world(DOMAINS[place % len(DOMAINS)], source)
        reader = ReadOnlyDatabase(write_database(world), world.today)
        for family in FAMILIES.values():
            question: Question | None = None
            for _ in range(3):
                if question is None:
                    held_out = source.random() < 0.3
                    question = draw_family_question(family, world, source, held_out=held_out)
            if question is None:
                continue
            read = read_question(question.text, world.domain)
            assert read.family == family.name
            rows = reader.query(write_query(read, schema_of(world)))["rows"]
            answers = (rows, [row[0] for row in rows], rows[0][0] if rows else None)
            assert any(map(question.answer.matches, answers)), f"{question.text} SQL says {rows}"
            seen[family.name] += 1
        reader.close()
    assert seen.keys() == FAMILIES.keys()
    assert len(FAMILIES) >= 30
    assert min(seen.values()) >= least


def test_held_out_phrasings_are_never_asked_in_training() -> None:
    domain = DOMAINS[0]
    world = make_world(domain, random.Random(5))

    def phrasings_used(held_out: bool) -> set[str]:
        found = set()
        for place in range(80):
            question = draw_question(world, random.Random(place), held_out=held_out)
            forms = FAMILIES[question.family].phrasings
            found |= {
                form
                for form in forms
                if re.match(re.sub(r"\\\{[A-Z]+\\\}", ".+", re.escape(phrase(form, domain))), question.text)
            }
        return found

    held_out = {family.phrasings[-1] for family in FAMILIES.values()}
    usual = {form for family in FAMILIES.values() for form in family.phrasings[:-1]}
    assert phrasings_used(False) <= usual
    assert phrasings_used(True) <= held_out


ADA = ["Ada Berg", 3]
TAKEN: list[tuple[ExpectedAnswer, list[Any], list[Any]]] = [
    (
        number(12),
        [12, 12.0, " 12 ", [12], '"12"'],
        [13, "12 or 13", True, None, "", {}, [], [12, 12], "1e99", "nan"],
    ),
    (number(Fraction(2469, 2), 2), ["1,234.50 €", "€1234.5", "1234.504"], [1234.51, 1234, "1.234,50", "inf"]),
    (number(Fraction(200, 3), 1), [66.7, 66.6667, "66.7%"], [66.6, 67, 66]),
    (number(0), [0, "0", -0.0], ["", False, None, [], "zero"]),
    (text("Bela O'Neill"), ["bela  o'neill", '"Bela O\'Neill".'], ["Bela ONeill", "Bela", "", None, 3, {}]),
    (text("2021-04"), ["2021-04", " 2021-04. "], ["2021-4", 2021, "2021-04-01"]),
    (
        texts(["a b", "c"]),
        [["c", "A B"], "c, a b", '["a b", "c"]', "c\na b", "c; a b"],
        [["c"], ["c", "c", "a b"], "c a b", "", None],
    ),
    (sequence(["b", "a"]), [["b", "a"], "b, a"], [["a", "b"], "a,b", "b", {}]),
    (
        pairs([("Ada Berg", 3), ("Bela O'Neill", Fraction(3, 2))], 1),
        [
            [["Bela O'Neill", 1.5], ADA],
            {"Ada Berg": 3, "Bela O'Neill": 1.5},
            "Ada Berg: 3, Bela O'Neill: 1.5",
        ],
        [[ADA], [ADA, ["Bela O'Neill", 1.5], ADA], [ADA, ["Bela O'Neill", 2]], "Ada Berg", [[["x"]]], 3],
    ),
]


@pytest.mark.parametrize(("answer", "right", "wrong"), TAKEN)
def test_accepted_and_refused_answers(answer: ExpectedAnswer, right: list[Any], wrong: list[Any]) -> None:
    assert [value for value in right if not answer.matches(value)] == []
    assert [value for value in wrong if answer.matches(value)] == []


def test_hostile_answers_match_nothing() -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    hostile = [
        "9" * 1_000_000,
        "[" * 100_000,
        "," * 1_000_000,
        [[]] * 100_000,
        10**5000,
        deep,
        {"a": [deep]},
        "\x00",
    ]
    every = [number(1), text("a"), texts(["a"]), sequence(["a"]), pairs([("a", 1)])]
    assert not any(answer.matches(value) for answer in every for value in hostile)


@pytest.fixture
def world() -> Iterator[SqliteEnvironment]:
    found = SqliteEnvironment()
    yield found
    found.close()


def test_answers_are_visible_nowhere(world: SqliteEnvironment) -> None:
    # What is asked for by date may be the day of the task, which is told.
    looked = 0
    for index in range(30):
        seen = world.reset(index=index)
        assert world._task is not None
        answer = world._task.question.answer
        if answer.kind is not Kind.TEXT or answer.value[:2] == "20":
            continue
        looked += 1
        visible = visible_in(world, seen, index)
        for name, arguments in (("list_tables", {}), ("submit_answer", {"answer": "nothing of the kind"})):
            visible += calls_of(world)(name, arguments).model_dump_json()
        assert answer.value not in visible, seen.question
    assert looked > 3


def test_readers_are_closed_with_their_episode(world: SqliteEnvironment) -> None:
    for end in (lambda: world.reset(seed=3), world.close):
        world.reset(seed=2)
        reader = world._reader
        assert reader is not None
        end()
        with pytest.raises(ToolFailedError, match="closed"):
            reader.query("SELECT 1")
