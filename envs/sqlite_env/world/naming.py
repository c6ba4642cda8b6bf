"""What tables and columns are called in one database, and what is said of them.

Names differ from database to database, so that a schema has to be looked at; descriptions do not, and say what a
column is.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .domain import Amounts, Domain

_COMMON: Final[Mapping[str, tuple[str, ...]]] = {
    "name": ("name", "full_name", "label"),
    "item_name": ("name", "title", "description"),
    "city": ("city", "town", "home_city"),
    "email": ("email", "email_address", "contact_email"),
    "day": ("day", "date", "dated_on"),
    "status": ("status", "state", "current_status"),
    "hired": ("hired_on", "employed_since"),
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        role: what it holds, whatever it is called.
        says: its description.
        references: the table and column that it points to.
    """

    role: str
    name: str
    type: str
    says: str
    nullable: bool = False
    key: bool = False
    references: str | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """One table."""

    role: str
    name: str
    says: str
    columns: tuple[Column, ...]


Naming = Mapping[str, Table]
"""The tables of one database by their role."""


def draw_naming(domain: Domain, source: random.Random) -> dict[str, Table]:
    """Draw the names of one database's tables and columns."""
    names = {role: source.choice(options) for role, options in sorted(domain.tables.items())}
    return _Namer(domain, names, source).tables()


class _Namer:
    def __init__(self, domain: Domain, names: Mapping[str, str], source: random.Random) -> None:
        self._domain = domain
        self._names = names
        self._source = source
        self._words = domain.all_words
        self._bare_keys = source.random() < 0.4
        self._suffix = source.choice(("id", "no", "ref"))

    def tables(self) -> dict[str, Table]:
        word = self._words
        found = [self._people(), self._groups(), self._items()]
        if self._domain.status_table:
            found.append(
                self._table(
                    "statuses",
                    f"what the status numbers of {word['events']} mean",
                    self._key("status", "status"),
                    self._column("status.name", "TEXT", "the status in words", common="name"),
                )
            )
        if self._domain.lines:
            found.append(
                self._table(
                    "headers", f"{word['events']}, without what is in them", *self._header_columns("event")
                )
            )
        found += [self._events(), self._archive(), self._staff()]
        return {table.role: table for table in found}

    def _people(self) -> Table:
        word = self._words
        return self._table(
            "people",
            f"the {word['people']}",
            self._key("person", word["person"]),
            self._column(
                "person.name", "TEXT", f"first and last name of the {word['person']}", common="name"
            ),
            self._column("person.city", "TEXT", f"where the {word['person']} lives", common="city"),
            self._column(
                "person.joined", "TEXT", f"the day on which the {word['person']} {word['joined']}, YYYY-MM-DD"
            ),
            self._column(
                "person.email",
                "TEXT",
                "email address; NULL where none is on file",
                common="email",
                nullable=True,
            ),
        )

    def _groups(self) -> Table:
        word = self._words
        return self._table(
            "groups",
            f"the {word['groups']} that {word['items']} belong to",
            self._key("group", word["group"]),
            self._column("group.name", "TEXT", f"name of the {word['group']}", common="name"),
        )

    def _items(self) -> Table:
        word = self._words
        return self._table(
            "items",
            f"the {word['items']}",
            self._key("item", word["item"]),
            self._column("item.name", "TEXT", f"name of the {word['item']}", common="item_name"),
            self._reference("item.group", "groups", word["group"]),
            self._column("item.price", "REAL", f"{word['price']} in euros"),
        )

    def _header_columns(self, role: str) -> list[Column]:
        word = self._words
        says = "YYYY-MM-DD HH:MM" if self._domain.clocked and role == "event" else "YYYY-MM-DD"
        columns = [
            self._key("header" if self._domain.lines and role == "event" else role, word["event"]),
            self._reference(f"{role}.person", "people", word["person"]),
            self._column(f"{role}.day", "TEXT", f"when the {word['event']} was, {says}", common="day"),
        ]
        if self._domain.status_table:
            return [*columns, self._reference(f"{role}.status", "statuses", "status")]
        statuses = ", ".join(self._domain.statuses)
        return [*columns, self._column(f"{role}.status", "TEXT", f"one of: {statuses}", common="status")]

    def _events(self) -> Table:
        word, domain = self._words, self._domain
        if domain.lines:
            columns = [
                self._key("event", word["line"]),
                self._reference("event.header", "headers", word["event"]),
            ]
        else:
            columns = self._header_columns("event")
        columns.append(self._reference("event.item", "items", word["item"]))
        columns.append(self._column("event.units", "INTEGER", word["units"]))
        if domain.amounts is Amounts.PRODUCT:
            says = (
                f"what one of the {word['units']} was charged at, in euros; {word['amount']} are {word['units']} "
                "times this"
            )
            columns.append(self._column("event.unit_price", "REAL", says))
        elif domain.amounts is Amounts.CENTS:
            columns.append(self._column("event.amount", "INTEGER", f"{word['amount']} in cents"))
        else:
            columns.append(self._column("event.amount", "REAL", f"{word['amount']} in euros"))
        says = f"{word['score']}, 1 to 5; NULL where none was given"
        columns.append(self._column("event.score", "INTEGER", says, nullable=True))
        about = f"what is in the {word['events']}, line by line" if domain.lines else f"the {word['events']}"
        return self._table("events", about, *columns)

    def _archive(self) -> Table:
        word = self._words
        says = f"{word['events']} of former years; they are not in any other table, and count only where it is said"
        return self._table("archive", says, *self._header_columns("archived"))

    def _staff(self) -> Table:
        return self._table(
            "staff",
            "who works here",
            self._key("employee", "employee"),
            self._column("employee.name", "TEXT", "first and last name", common="name"),
            self._column("employee.city", "TEXT", "where they live", common="city"),
            self._column("employee.hired", "TEXT", "since when they work here, YYYY-MM-DD", common="hired"),
        )

    def _table(self, role: str, says: str, *columns: Column) -> Table:
        return Table(role, self._names[role], says, columns)

    def _key(self, role: str, noun: str) -> Column:
        name = "id" if self._bare_keys else self._pointer(noun)
        return Column(f"{role}.id", name, "INTEGER", f"number of the {noun}", key=True)

    def _reference(self, role: str, table: str, noun: str) -> Column:
        key = "id" if self._bare_keys else self._pointer(noun)
        return Column(
            role,
            self._pointer(noun),
            "INTEGER",
            f"number of the {noun}",
            references=f"{self._names[table]}.{key}",
        )

    def _column(
        self, role: str, type_: str, says: str, *, common: str | None = None, nullable: bool = False
    ) -> Column:
        options = _COMMON[common] if common else self._domain.columns[role]
        return Column(role, self._source.choice(options), type_, says, nullable=nullable)

    def _pointer(self, noun: str) -> str:
        return f"{noun.replace(' ', '_')}_{self._suffix}"
