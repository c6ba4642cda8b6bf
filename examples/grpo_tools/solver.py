"""The scripted solver: reads the question and the tools' results, like a policy, and needs four calls."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from envs.sqlite_env.models import SqliteObservation
from envs.sqlite_env.questions import FAMILIES as QUESTIONS
from envs.sqlite_env.questions import phrase
from envs.sqlite_env.world.domains import DOMAINS, Domain
from examples.grpo_tools.world import FAMILIES
from rl_bridge.data.traces import Call

_ABOUT: Final = {
    "count_in_city": ("people", "where the {person} lives", "{COLUMN} = '{CITY}'"),
    "missing_email": ("people", "email address; NULL where none is on file", "{COLUMN} IS NULL"),
    "joined_in_year": (
        "people",
        "the day on which the {person} {joined}, YYYY-MM-DD",
        "{COLUMN} LIKE '{YEAR}%'",
    ),
    "items_between": ("items", "{price} in euros", "{COLUMN} BETWEEN {LOW} AND {HIGH}"),
}
"""By family: its table, the description of the deciding column, and the SQL condition."""


async def solve(observation: SqliteObservation, call: Call) -> None:
    """Play a task to its end; of the observation only the question is used.

    Raises:
        ValueError: The question is of no family.
    """
    domain, family, slots = parse_question(observation.question)
    table_role, column_description, condition = _ABOUT[family]
    tables = await call("list_tables", {})
    table = _find_name(tables, phrase(f"the {{{table_role}}}", domain))
    columns = (await call("describe_table", {"table": table}))["columns"]
    where = condition.format(COLUMN=_find_name(columns, phrase(column_description, domain)), **slots)
    rows = (await call("query", {"sql": f"SELECT count(*) FROM {table} WHERE {where}"}))["rows"]
    await call("submit_answer", {"answer": rows[0][0]})


def parse_question(question: str) -> tuple[Domain, str, dict[str, str]]:
    """Return the domain of a question, its family, and the values of its slots.

    Raises:
        ValueError: The question is of no family.
    """
    for domain in DOMAINS:
        for family in FAMILIES:
            for phrasing in QUESTIONS[family].phrasings:
                pattern = re.sub(r"\\\{([A-Z]+)\\\}", r"(?P<\1>.+?)", re.escape(phrase(phrasing, domain)))
                if match := re.fullmatch(pattern, question):
                    return domain, family, match.groupdict()
    raise ValueError(f"expected a question of the families {', '.join(FAMILIES)}, got {question!r}")


def _find_name(entries: Sequence[Mapping[str, Any]], description: str) -> str:
    return next(str(entry["name"]) for entry in entries if entry["description"] == description)
