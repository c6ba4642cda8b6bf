"""The contents of a database as plain records, its table and column names, and writing them to SQLite."""

import random
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, Final

from .domains import Amounts, Domain

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
        role: what the column holds, independent of its name.
        name: its name in this database.
        type: its SQL type.
        description: its description for the policy.
        nullable: whether it may be NULL.
        key: whether it is the primary key.
        references: the referenced column, as "table.column".
    """

    role: str
    name: str
    type: str
    description: str
    nullable: bool = False
    key: bool = False
    references: str | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """One table."""

    role: str
    name: str
    description: str
    columns: tuple[Column, ...]


Naming = Mapping[str, Table]
"""The tables of one database by role."""


def draw_naming(domain: Domain, source: random.Random) -> dict[str, Table]:
    """Draw the names of one database's tables and columns."""
    return _Namer(domain, source).tables()


class _Namer:
    """Draws names. The order of the draws must never change, because it determines the task of each number."""

    def __init__(self, domain: Domain, source: random.Random) -> None:
        self._domain = domain
        self._source = source
        self._words = domain.all_words
        self._names = {role: source.choice(options) for role, options in sorted(domain.tables.items())}
        self._short_key_names = source.random() < 0.4
        self._suffix = source.choice(("id", "no", "ref"))

    def tables(self) -> dict[str, Table]:
        domain, column = self._domain, self._make_column
        tables = [
            self._make_table(
                "people",
                "the {people}",
                self._make_key("person", "{person}"),
                column("person.name", "TEXT", "first and last name of the {person}", common="name"),
                column("person.city", "TEXT", "where the {person} lives", common="city"),
                column("person.joined", "TEXT", "the day on which the {person} {joined}, YYYY-MM-DD"),
                column(
                    "person.email",
                    "TEXT",
                    "email address; NULL where none is on file",
                    "email",
                    nullable=True,
                ),
            ),
            self._make_table(
                "groups",
                "the {groups} that {items} belong to",
                self._make_key("group", "{group}"),
                column("group.name", "TEXT", "name of the {group}", common="name"),
            ),
            self._make_table(
                "items",
                "the {items}",
                self._make_key("item", "{item}"),
                column("item.name", "TEXT", "name of the {item}", common="item_name"),
                self._make_reference("item.group", "groups", "{group}"),
                column("item.price", "REAL", "{price} in euros"),
            ),
        ]
        if domain.status_table:
            key, name = (
                self._make_key("status", "status"),
                column("status.name", "TEXT", "the status in words", "name"),
            )
            tables.append(self._make_table("statuses", "what the status numbers of {events} mean", key, name))
        if domain.lines:
            about = "{events}, without what is in them"
            tables.append(self._make_table("headers", about, *self._make_header_columns("event")))
            first_columns = [
                self._make_key("event", "{line}"),
                self._make_reference("event.header", "headers", "{event}"),
            ]
        else:
            first_columns = self._make_header_columns("event")
        item, units = (
            self._make_reference("event.item", "items", "{item}"),
            column("event.units", "INTEGER", "{units}"),
        )
        amount = {
            Amounts.PRODUCT: (
                "event.unit_price",
                "REAL",
                "what one of the {units} was charged at, in euros; {amount} are {units} times this",
            ),
            Amounts.CENTS: ("event.amount", "INTEGER", "{amount} in cents"),
            Amounts.COLUMN: ("event.amount", "REAL", "{amount} in euros"),
        }[domain.amounts]
        score = "{score}, 1 to 5; NULL where none was given"
        measure_columns = (column(*amount), column("event.score", "INTEGER", score, nullable=True))
        about = "what is in the {events}, line by line" if domain.lines else "the {events}"
        tables.append(self._make_table("events", about, *first_columns, item, units, *measure_columns))
        about = "{events} of former years; they are not in any other table, and count only where it is said"
        tables.append(self._make_table("archive", about, *self._make_header_columns("archived")))
        tables.append(
            self._make_table(
                "staff",
                "who works here",
                self._make_key("employee", "employee"),
                column("employee.name", "TEXT", "first and last name", common="name"),
                column("employee.city", "TEXT", "where they live", common="city"),
                column("employee.hired", "TEXT", "since when they work here, YYYY-MM-DD", common="hired"),
            )
        )
        return {table.role: table for table in tables}

    def _make_header_columns(self, role: str) -> list[Column]:
        domain, is_event = self._domain, role == "event"
        day_format = "YYYY-MM-DD HH:MM" if domain.clocked and is_event else "YYYY-MM-DD"
        columns = [
            self._make_key("header" if domain.lines and is_event else role, "{event}"),
            self._make_reference(f"{role}.person", "people", "{person}"),
            self._make_column(f"{role}.day", "TEXT", f"when the {{event}} was, {day_format}", common="day"),
        ]
        if domain.status_table:
            return [*columns, self._make_reference(f"{role}.status", "statuses", "status")]
        description = f"one of: {', '.join(domain.statuses)}"
        return [*columns, self._make_column(f"{role}.status", "TEXT", description, common="status")]

    def _make_table(self, role: str, description: str, *columns: Column) -> Table:
        return Table(role, self._names[role], description.format(**self._words), columns)

    def _make_key(self, role: str, noun: str) -> Column:
        noun = noun.format(**self._words)
        name = "id" if self._short_key_names else self._key_name(noun)
        return Column(f"{role}.id", name, "INTEGER", f"number of the {noun}", key=True)

    def _make_reference(self, role: str, table: str, noun: str) -> Column:
        noun = noun.format(**self._words)
        key = "id" if self._short_key_names else self._key_name(noun)
        target = f"{self._names[table]}.{key}"
        return Column(role, self._key_name(noun), "INTEGER", f"number of the {noun}", references=target)

    def _make_column(
        self, role: str, type_: str, description: str, common: str | None = None, *, nullable: bool = False
    ) -> Column:
        options = _COMMON[common] if common else self._domain.columns[role]
        return Column(
            role, self._source.choice(options), type_, description.format(**self._words), nullable=nullable
        )

    def _key_name(self, noun: str) -> str:
        return f"{noun.replace(' ', '_')}_{self._suffix}"


@dataclass(frozen=True, slots=True)
class Person:
    """A customer, member, patient, ..."""

    id: int
    name: str
    city: str
    joined: date
    email: str | None


@dataclass(frozen=True, slots=True)
class CategoryRecord:
    """A category, genre, department, ..."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class Item:
    """A product, book, treatment, ...

    Attributes:
        price: in cents.
    """

    id: int
    name: str
    group: CategoryRecord
    price: int


@dataclass(frozen=True, slots=True)
class Transaction:
    """A loan, a visit, or one line of an order.

    Attributes:
        id: the number of the event, or of the line in domains with lines.
        header: the number by which events are counted: that of the line's order; without lines, the same as `id`.
        clock: the time of day, stored only if the domain is `clocked`.
        unit_price: in cents.
        amount: in cents.
    """

    id: int
    header: int
    person: Person
    item: Item
    day: date
    clock: str
    units: int
    unit_price: int
    amount: int
    status: str
    score: int | None


@dataclass(frozen=True, slots=True)
class ArchivedTransaction:
    """An event of earlier years, with fewer fields."""

    id: int
    person: Person
    day: date
    status: str


@dataclass(frozen=True, slots=True)
class Employee:
    """An employee: a distractor, about whom no question is asked."""

    id: int
    name: str
    city: str
    hired: date


@dataclass(frozen=True, slots=True)
class DatabaseContents:
    """Everything that a database holds.

    Attributes:
        today: the day on which the question is asked; no date in the database is later.
    """

    domain: Domain
    naming: Naming
    today: date
    people: tuple[Person, ...]
    groups: tuple[CategoryRecord, ...]
    items: tuple[Item, ...]
    events: tuple[Transaction, ...]
    archive: tuple[ArchivedTransaction, ...]
    staff: tuple[Employee, ...]


def write_database(world: DatabaseContents) -> sqlite3.Connection:
    """Create an in-memory database with the contents. The caller closes it."""
    connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
    connection.execute("PRAGMA journal_mode = OFF")
    connection.execute("BEGIN")
    for table in world.naming.values():
        connection.execute(f"CREATE TABLE {table.name} ({', '.join(_declare_columns(table))})")
        placeholders = ", ".join("?" for _ in table.columns)
        connection.executemany(f"INSERT INTO {table.name} VALUES ({placeholders})", _iter_rows(world, table))
    connection.execute("COMMIT")
    return connection


def _declare_columns(table: Table) -> Iterator[str]:
    for column in table.columns:
        declaration = f"{column.name} {column.type}"
        if column.key:
            declaration += " PRIMARY KEY"
        elif not column.nullable:
            declaration += " NOT NULL"
        if column.references:
            target, _, key = column.references.partition(".")
            declaration += f" REFERENCES {target} ({key})"
        yield declaration


def _iter_rows(world: DatabaseContents, table: Table) -> Iterator[tuple[Any, ...]]:
    for record in _select_records(world, table.role):
        yield tuple(_column_value(world, record, column) for column in table.columns)


def _select_records(world: DatabaseContents, table: str) -> Iterable[Any]:
    match table:
        case "headers":
            return {event.header: event for event in world.events}.values()
        case "statuses":
            return enumerate(world.domain.statuses, 1)
        case "people" | "groups" | "items" | "events" | "archive" | "staff":
            records: Iterable[Any] = getattr(world, table)
            return records
    raise ValueError(f"expected the role of a table, got {table!r}")


def _column_value(world: DatabaseContents, record: Any, column: Column) -> Any:
    role = column.role
    field = role.partition(".")[2]
    match role:
        case "status.id":
            return record[0]
        case "status.name":
            return record[1]
        case "header.id" | "event.header":
            return record.header
        case "item.group":
            return record.group.id
        case "event.item" | "event.person" | "archived.person":
            return getattr(record, field).id
        case "event.day" if world.domain.clocked:
            return f"{record.day.isoformat()} {record.clock}"
        case "event.day" | "archived.day" | "person.joined" | "employee.hired":
            return getattr(record, field).isoformat()
        case "event.status" | "archived.status" if world.domain.status_table:
            return world.domain.statuses.index(record.status) + 1
        case "item.price" | "event.unit_price":
            return getattr(record, field) / 100
        case "event.amount" if column.type == "REAL":
            return record.amount / 100
    return getattr(record, field)
