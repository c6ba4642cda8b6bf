"""A rule-based policy: it recognizes a question's family and runs that family's query over views with fixed names."""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from tool_policies import Call, SolverError, ToolUser

from envs.sqlite_env.questions import FAMILIES, format_rules, phrase
from envs.sqlite_env.questions.families import MONTHS, ORDINALS, WEEKDAYS
from envs.sqlite_env.world.domains import DOMAINS, Amounts, Domain
from envs.sqlite_env.world.records import draw_naming

QUERIES: Final[dict[str, str]] = {
    "count_in_city": "SELECT count(*) FROM v_people WHERE city = :CITY",
    "missing_email": "SELECT count(*) FROM v_people WHERE email IS NULL",
    "dearest_item": """
        SELECT i.name FROM v_items i JOIN v_groups g ON g.id = i.group_id
        WHERE g.name = :GROUP ORDER BY i.price DESC LIMIT 1""",
    "items_between": "SELECT count(*) FROM v_items WHERE price BETWEEN cast(:LOW AS REAL) AND cast(:HIGH AS REAL)",
    "joined_in_year": "SELECT count(*) FROM v_people WHERE strftime('%Y', joined) = :YEAR",
    "last_name_begins": """
        SELECT count(*) FROM v_people WHERE substr(name, instr(name, ' ') + 1, 1) BETWEEN :LETTER AND :LAST""",
    "names_with_word": "SELECT name FROM v_items WHERE name LIKE '% ' || :WORD",
    "largest_group": """
        SELECT g.name FROM v_items i JOIN v_groups g ON g.id = i.group_id
        GROUP BY g.id ORDER BY count(*) DESC LIMIT 1""",
    "units_of_item": """
        SELECT sum(e.units) FROM v_counted e JOIN v_items i ON i.id = e.item_id WHERE i.name = :ITEM""",
    "amount_in_month": """
        SELECT round(sum(amount), 2) FROM v_counted WHERE strftime('%m %Y', day) = :MONTH || ' ' || :YEAR""",
    "never_used": "SELECT name FROM v_items WHERE id NOT IN (SELECT item_id FROM v_counted)",
    "idle_in_city": """
        SELECT count(*) FROM v_people p LEFT JOIN v_counted e ON e.person_id = p.id
        WHERE p.city = :CITY AND e.header IS NULL""",
    "at_least": """
        SELECT count(*) FROM (SELECT person_id FROM v_counted GROUP BY person_id
        HAVING count(DISTINCT header) >= cast(:COUNT AS INTEGER))""",
    "average_score": """
        SELECT round(avg(e.score), 2) FROM v_counted e JOIN v_items i ON i.id = e.item_id WHERE i.name = :ITEM""",
    "top_items": """
        SELECT i.name FROM v_counted e JOIN v_items i ON i.id = e.item_id
        GROUP BY i.id ORDER BY sum(e.units) DESC, i.name LIMIT cast(:COUNT AS INTEGER)""",
    "busiest_month": """
        SELECT substr(day, 1, 7) AS month FROM v_counted WHERE substr(day, 1, 4) = :YEAR
        GROUP BY month ORDER BY count(DISTINCT header) DESC, month LIMIT 1""",
    "different_items": """
        SELECT count(DISTINCT e.item_id) FROM v_counted e JOIN v_people p ON p.id = e.person_id
        WHERE p.name = :PERSON""",
    "on_weekday": "SELECT count(DISTINCT header) FROM v_counted WHERE strftime('%w', day) = :WEEKDAY",
    "best_city": """
        SELECT p.city FROM v_counted e JOIN v_people p ON p.id = e.person_id
        GROUP BY p.city ORDER BY sum(e.amount) DESC LIMIT 1""",
    "events_by_group": """
        SELECT g.name, count(DISTINCT e.header) FROM v_counted e JOIN v_items i ON i.id = e.item_id
        JOIN v_groups g ON g.id = i.group_id WHERE substr(e.day, 1, 4) = :YEAR GROUP BY g.id""",
    "rank_in_group": """
        SELECT name FROM (SELECT i.name, rank() OVER (ORDER BY sum(e.amount) DESC) AS place
        FROM v_counted e JOIN v_items i ON i.id = e.item_id JOIN v_groups g ON g.id = i.group_id
        WHERE g.name = :GROUP GROUP BY i.id) WHERE place = cast(:NTH AS INTEGER)""",
    "best_of_each_group": """
        SELECT g.name, max(t.total) FROM (SELECT item_id, sum(units) AS total FROM v_counted GROUP BY item_id) t
        JOIN v_items i ON i.id = t.item_id JOIN v_groups g ON g.id = i.group_id GROUP BY g.id""",
    "longest_gap": """
        SELECT p.name FROM (SELECT person_id, julianday(day) - julianday(lag(day) OVER
        (PARTITION BY person_id ORDER BY day)) AS gap FROM v_counted) t
        JOIN v_people p ON p.id = t.person_id WHERE gap IS NOT NULL ORDER BY gap DESC LIMIT 1""",
    "above_group_average": """
        SELECT count(*) FROM (SELECT price, avg(price) OVER (PARTITION BY group_id) AS mean FROM v_items)
        WHERE price > mean""",
    "amount_of_largest_city": """
        SELECT round(sum(e.amount), 2) FROM v_counted e JOIN v_people p ON p.id = e.person_id
        WHERE substr(e.day, 1, 4) = :YEAR AND p.city =
        (SELECT city FROM v_people GROUP BY city ORDER BY count(*) DESC LIMIT 1)""",
    "used_both": """
        SELECT name FROM v_people WHERE id IN (SELECT e.person_id FROM v_counted e JOIN v_items i ON i.id = e.item_id
        WHERE i.name = :ITEM INTERSECT SELECT e.person_id FROM v_counted e JOIN v_items i ON i.id = e.item_id
        WHERE i.name = :OTHER)""",
    "greatest_growth": """
        SELECT g.name FROM v_counted e JOIN v_items i ON i.id = e.item_id JOIN v_groups g ON g.id = i.group_id
        GROUP BY g.id ORDER BY sum(CASE substr(e.day, 1, 4) WHEN :NEXT THEN e.units WHEN :YEAR THEN -e.units ELSE 0 END)
        DESC LIMIT 1""",
    "share_of_status": """
        SELECT round(100.0 * count(DISTINCT CASE WHEN status = :STATUS THEN header END) / count(DISTINCT header), 1)
        FROM v_events WHERE substr(day, 1, 4) = :YEAR""",
    "with_archive": """
        SELECT (SELECT count(DISTINCT e.header) FROM v_counted e WHERE e.person_id = p.id)
        + (SELECT count(*) FROM v_counted_archive a WHERE a.person_id = p.id) FROM v_people p WHERE p.name = :PERSON""",
    "soon_after_joining": """
        SELECT count(*) FROM (SELECT p.id FROM v_people p JOIN v_counted e ON e.person_id = p.id GROUP BY p.id
        HAVING julianday(min(e.day)) - julianday(p.joined) <= cast(:DAYS AS INTEGER))""",
    "running_total": """
        SELECT day FROM (SELECT day, sum(sum(amount)) OVER (ORDER BY day) AS total FROM v_counted
        WHERE substr(day, 1, 4) = :YEAR GROUP BY day) WHERE total >= cast(:SUM AS REAL) ORDER BY day LIMIT 1""",
    "above_average_people": """
        SELECT count(*) FROM (SELECT n, avg(n) OVER () AS mean FROM
        (SELECT count(DISTINCT header) AS n FROM v_counted GROUP BY person_id)) WHERE n > mean""",
}


@dataclass(frozen=True, slots=True)
class Schema:
    """A domain, and the names of its tables and columns in this database by role."""

    domain: Domain
    tables: Mapping[str, str]
    columns: Mapping[str, str]

    def write_views(self) -> str:
        """Return a WITH clause that defines v_people, v_groups, v_items, v_events and v_archive."""
        c, t = self.columns, self.tables
        return (
            f"WITH v_people AS (SELECT {c['person.id']} AS id, {c['person.name']} AS name, {c['person.city']} AS city, "
            f"{c['person.joined']} AS joined, {c['person.email']} AS email FROM {t['people']}), "
            f"v_groups AS (SELECT {c['group.id']} AS id, {c['group.name']} AS name FROM {t['groups']}), "
            f"v_items AS (SELECT {c['item.id']} AS id, {c['item.name']} AS name, {c['item.group']} AS group_id, "
            f"{c['item.price']} AS price FROM {t['items']}), "
            f"v_events AS ({self._events_query()}), v_archive AS ({self._archive_query()})"
        )

    def _events_query(self) -> str:
        c, t, lines = self.columns, self.tables, self.domain.lines
        amount = {
            Amounts.COLUMN: "e.{event.amount}",
            Amounts.CENTS: "e.{event.amount} / 100.0",
            Amounts.PRODUCT: "e.{event.units} * e.{event.unit_price}",
        }[self.domain.amounts]
        for role in ("event.amount", "event.units", "event.unit_price"):
            amount = amount.replace(f"{{{role}}}", c.get(role, ""))
        head = "h" if lines else "e"
        source = f"{t['events']} e"
        if lines:
            source += f" JOIN {t['headers']} h ON h.{c['header.id']} = e.{c['event.header']}"
        columns = {
            "header": f"{head}.{c['header.id' if lines else 'event.id']}",
            "person_id": f"{head}.{c['event.person']}",
            "item_id": f"e.{c['event.item']}",
            "day": f"substr({head}.{c['event.day']}, 1, 10)",
            "units": f"e.{c['event.units']}",
            "amount": amount,
            "status": self._status_expression(head, "event"),
            "score": f"e.{c['event.score']}",
        }
        return f"SELECT {', '.join(f'{expression} AS {name}' for name, expression in columns.items())} FROM {source}"

    def _archive_query(self) -> str:
        c = self.columns
        return (
            f"SELECT a.{c['archived.person']} AS person_id, {self._status_expression('a', 'archived')} AS status "
            f"FROM {self.tables['archive']} a"
        )

    def _status_expression(self, alias: str, role: str) -> str:
        c = self.columns
        if not self.domain.status_table:
            return f"{alias}.{c[f'{role}.status']}"
        return (
            f"(SELECT s.{c['status.name']} FROM {self.tables['statuses']} s "
            f"WHERE s.{c['status.id']} = {alias}.{c[f'{role}.status']})"
        )


def _read_schema(tables: list[dict[str, Any]], descriptions: Mapping[str, dict[str, Any]]) -> Schema:
    """Identify the domain and the roles of tables and columns by their descriptions.

    Raises:
        SolverError: The tables match no known domain.
    """
    names = {table["description"]: table["name"] for table in tables}
    for domain in DOMAINS:
        # The drawn names do not matter: the descriptions are the same for every seed.
        naming = draw_naming(domain, random.Random(0))
        if {table.description for table in naming.values()} != names.keys():
            continue
        columns: dict[str, str] = {}
        for table in naming.values():
            by_description = {
                column["description"]: column["name"]
                for column in descriptions[names[table.description]]["columns"]
            }
            columns |= {column.role: by_description[column.description] for column in table.columns}
        return Schema(domain, {role: names[table.description] for role, table in naming.items()}, columns)
    raise SolverError(f"expected tables of a domain that is known, got {', '.join(names)}")


_SLOT: Final = re.compile(r"\{([A-Z]+)\}")


@dataclass(frozen=True, slots=True)
class ParsedQuestion:
    """A parsed question: its family, the values of its slots, and whether only valid events count."""

    family: str
    slots: dict[str, str]
    valid_only: bool


def solve(task: str, call: Call) -> float:
    """Solve a task through the tools, and return the total reward."""
    user = ToolUser(call)
    question = next(line for line in task.splitlines() if line.startswith("Question: "))
    tables = user.use("list_tables")
    descriptions = {table["name"]: user.use("describe_table", table=table["name"]) for table in tables}
    schema = _read_schema(tables, descriptions)
    parsed = read_question(question.removeprefix("Question: "), schema.domain)
    rows = user.use("query", sql=write_query(parsed, schema))["rows"]
    user.use("submit_answer", answer=_format_answer(rows, task))
    return user.total


def read_question(question: str, domain: Domain) -> ParsedQuestion:
    """Parse a question.

    Raises:
        SolverError: The question belongs to no known family.
    """
    for valid_only in (True, False):
        for rule in format_rules(domain, valid_only=valid_only):
            if question.endswith(f" {rule}"):
                return _match_family(question.removesuffix(f" {rule}"), domain, valid_only)
    return _match_family(question, domain, False)


def write_query(parsed: ParsedQuestion, schema: Schema) -> str:
    """Write the query that answers a question."""
    slots = dict(parsed.slots)
    if "MONTH" in slots:
        slots["MONTH"] = f"{MONTHS.index(slots['MONTH']) + 1:02d}"
    if "WEEKDAY" in slots:
        slots["WEEKDAY"] = str((WEEKDAYS.index(slots["WEEKDAY"]) + 1) % 7)
    if "NTH" in slots:
        slots["NTH"] = str(ORDINALS.index(slots["NTH"]) + 1)
    where = f" WHERE status <> '{schema.domain.statuses[-1]}'" if parsed.valid_only else ""
    views = (
        f"{schema.write_views()}, v_counted AS (SELECT * FROM v_events{where}), "
        f"v_counted_archive AS (SELECT * FROM v_archive{where}) "
    )
    query = re.sub(
        r":([A-Z]+)\b",
        lambda slot: f"'{slots[slot[1]].replace(chr(39), chr(39) * 2)}'",
        QUERIES[parsed.family],
    )
    return views + " ".join(query.split())


def _match_family(question: str, domain: Domain, valid_only: bool) -> ParsedQuestion:
    for name, pattern in _compile_patterns(domain.name):
        if match := pattern.fullmatch(question):
            return ParsedQuestion(name, match.groupdict(), valid_only)
    raise SolverError(f"expected a question of a known form, got {question!r}")


@cache
def _compile_patterns(domain: str) -> tuple[tuple[str, "re.Pattern[str]"], ...]:
    (matching_domain,) = (candidate for candidate in DOMAINS if candidate.name == domain)
    return tuple(
        (family.name, _compile_pattern(phrase(phrasing, matching_domain)))
        for family in FAMILIES.values()
        for phrasing in family.phrasings
    )


def _compile_pattern(phrasing: str) -> "re.Pattern[str]":
    """Return a pattern that matches a phrasing with filled slots; a slot that occurs twice has the same value."""
    seen_slots: set[str] = set()
    parts = []
    for index, piece in enumerate(_SLOT.split(phrasing)):
        if index % 2 == 0:
            parts.append(re.escape(piece))
        elif piece in seen_slots:
            parts.append(f"(?P={piece})")
        else:
            seen_slots.add(piece)
            parts.append(f"(?P<{piece}>.+?)")
    return re.compile("".join(parts))


def _format_answer(rows: list[list[Any]], task: str) -> Any:
    """Convert rows to the answer format that the task asks for."""
    if "a list of pairs" in task:
        return rows
    if "a list of texts" in task:
        return [row[0] for row in rows]
    return rows[0][0]
