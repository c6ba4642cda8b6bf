"""From what describe_table tells to views with names of our own, so that one query fits every database."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..world.domain import Amounts, Domain
from ..world.domains import DOMAINS
from ..world.naming import draw_naming


class Puzzled(Exception):  # noqa: N818 - it says what the solver is
    """The solver does not know what it sees."""


@dataclass(frozen=True, slots=True)
class Schema:
    """A domain, and what its tables and columns are called here.

    Attributes:
        tables: names by role.
        columns: names by role.
    """

    domain: Domain
    tables: Mapping[str, str]
    columns: Mapping[str, str]

    def views(self) -> str:
        """Return a WITH clause of v_people, v_groups, v_items, v_events and v_archive."""
        c, t = self.columns, self.tables
        return (
            f"WITH v_people AS (SELECT {c['person.id']} AS id, {c['person.name']} AS name, {c['person.city']} AS city, "
            f"{c['person.joined']} AS joined, {c['person.email']} AS email FROM {t['people']}), "
            f"v_groups AS (SELECT {c['group.id']} AS id, {c['group.name']} AS name FROM {t['groups']}), "
            f"v_items AS (SELECT {c['item.id']} AS id, {c['item.name']} AS name, {c['item.group']} AS group_id, "
            f"{c['item.price']} AS price FROM {t['items']}), "
            f"v_events AS ({self._events()}), v_archive AS ({self._archive()})"
        )

    def _events(self) -> str:
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
            "status": self._status(head, "event"),
            "score": f"e.{c['event.score']}",
        }
        return f"SELECT {', '.join(f'{said} AS {name}' for name, said in columns.items())} FROM {source}"

    def _archive(self) -> str:
        c = self.columns
        return (
            f"SELECT a.{c['archived.person']} AS person_id, {self._status('a', 'archived')} AS status "
            f"FROM {self.tables['archive']} a"
        )

    def _status(self, alias: str, role: str) -> str:
        c = self.columns
        if not self.domain.status_table:
            return f"{alias}.{c[f'{role}.status']}"
        return (
            f"(SELECT s.{c['status.name']} FROM {self.tables['statuses']} s "
            f"WHERE s.{c['status.id']} = {alias}.{c[f'{role}.status']})"
        )


def read_schema(tables: list[dict[str, Any]], described: Mapping[str, dict[str, Any]]) -> Schema:
    """Find out which table and which column is what, by their descriptions.

    Args:
        tables: What list_tables told.
        described: What describe_table told, by table.

    Raises:
        Puzzled: They are of no domain that is known.
    """
    names = {table["description"]: table["name"] for table in tables}
    for domain in DOMAINS:
        # Whatever the names are that this draws: the descriptions are always the same.
        known = draw_naming(domain, random.Random(0))
        if {table.says for table in known.values()} != names.keys():
            continue
        columns: dict[str, str] = {}
        for table in known.values():
            told = {
                column["description"]: column["name"] for column in described[names[table.says]]["columns"]
            }
            columns |= {column.role: told[column.says] for column in table.columns}
        return Schema(domain, {role: names[table.says] for role, table in known.items()}, columns)
    raise Puzzled(f"expected tables of a domain that is known, got {', '.join(names)}")
