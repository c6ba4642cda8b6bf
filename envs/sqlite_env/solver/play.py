"""One task from its text to the answer."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

from openenv_core.tools import CallToolObservation

from ..questions import FAMILIES
from ..questions.hard import ORDINALS
from ..questions.medium import MONTHS, WEEKDAYS
from ..questions.wording import rules, spoken
from ..world.domain import Domain
from ..world.domains import DOMAINS
from .queries import QUERIES
from .schema import Puzzled, Schema, read_schema

Call: TypeAlias = Callable[[str, dict[str, Any]], CallToolObservation]
"""Calls a tool: its name and arguments, and what the step answers."""

_SLOT: Final = re.compile(r"\{([A-Z]+)\}")


@dataclass(frozen=True, slots=True)
class Read:
    """A question as it was understood."""

    family: str
    slots: dict[str, str]
    valid_only: bool


def solve(task: str, call: Call) -> float:
    """Play a task to its end through the tools, and return the reward of it all.

    Args:
        task: Its text.
        call: How to call a tool.

    Raises:
        Puzzled: The question, or the database, is of no known kind.
    """
    asked = next(line for line in task.splitlines() if line.startswith("Question: ")).removeprefix(
        "Question: "
    )
    rewards: list[float] = []

    def use(name: str, **arguments: Any) -> Any:
        seen = call(name, arguments)
        rewards.append(float(seen.reward or 0.0))
        if seen.error is not None:
            raise Puzzled(f"{name} said: {seen.error.message}")
        return seen.result

    tables = use("list_tables")
    described = {table["name"]: use("describe_table", table=table["name"]) for table in tables}
    schema = read_schema(tables, described)
    read = understood(asked, schema.domain)
    rows = use("query", sql=written(read, schema))["rows"]
    use("submit_answer", answer=_answer(rows, task))
    return sum(rewards)


def understood(asked: str, domain: Domain) -> Read:
    """Find out which family a question is of, and what it asks about.

    Raises:
        Puzzled: It is of none.
    """
    for valid_only in (True, False):
        for rule in rules(domain, valid_only=valid_only):
            if asked.endswith(f" {rule}"):
                return _matched(asked.removesuffix(f" {rule}"), domain, valid_only)
    return _matched(asked, domain, False)


def written(read: Read, schema: Schema) -> str:
    """Write the query that answers a question."""
    slots = dict(read.slots)
    if "MONTH" in slots:
        slots["MONTH"] = f"{MONTHS.index(slots['MONTH']) + 1:02d}"
    if "WEEKDAY" in slots:
        slots["WEEKDAY"] = str((WEEKDAYS.index(slots["WEEKDAY"]) + 1) % 7)
    if "NTH" in slots:
        slots["NTH"] = str(ORDINALS.index(slots["NTH"]) + 1)
    where = f" WHERE status <> '{schema.domain.statuses[-1]}'" if read.valid_only else ""
    views = (
        f"{schema.views()}, v_counted AS (SELECT * FROM v_events{where}), "
        f"v_counted_archive AS (SELECT * FROM v_archive{where}) "
    )
    query = re.sub(
        r":([A-Z]+)\b", lambda slot: f"'{slots[slot[1]].replace(chr(39), chr(39) * 2)}'", QUERIES[read.family]
    )
    return views + " ".join(query.split())


def _matched(asked: str, domain: Domain, valid_only: bool) -> Read:
    for name, pattern in _patterns(domain.name):
        if found := pattern.fullmatch(asked):
            return Read(name, found.groupdict(), valid_only)
    raise Puzzled(f"expected a question of a known form, got {asked!r}")


@cache
def _patterns(domain: str) -> tuple[tuple[str, "re.Pattern[str]"], ...]:
    (about,) = (one for one in DOMAINS if one.name == domain)
    return tuple(
        (family.name, _pattern(spoken(phrasing, about)))
        for family in FAMILIES.values()
        for phrasing in family.phrasings
    )


def _pattern(said: str) -> "re.Pattern[str]":
    """Return what a phrasing looks like once its slots are filled; a slot that comes twice is the same both times."""
    seen: set[str] = set()
    parts = []
    for place, part in enumerate(_SLOT.split(said)):
        if place % 2 == 0:
            parts.append(re.escape(part))
        elif part in seen:
            parts.append(f"(?P={part})")
        else:
            seen.add(part)
            parts.append(f"(?P<{part}>.+?)")
    return re.compile("".join(parts))


def _answer(rows: list[list[Any]], task: str) -> Any:
    """Give the rows the form that the task asks for."""
    if "a list of pairs" in task:
        return rows
    if "a list of texts" in task:
        return [row[0] for row in rows]
    return rows[0][0]
