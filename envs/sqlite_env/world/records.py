"""What a database is about, as plain records; the names of its tables, and the tables themselves."""

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


@dataclass(frozen=True, slots=True)
class Person:
    """A customer, a member, a patient, ..."""

    id: int
    name: str
    city: str
    joined: date
    email: str | None


@dataclass(frozen=True, slots=True)
class CategoryRecord:
    """A category, a genre, a department, ..."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class Item:
    """A product, a book, a treatment, ...

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
        id: of the line where there are lines.
        header: what is counted: the order that the line belongs to; otherwise the same as `id`.
        clock: the time of day, where the domain keeps it.
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
class Archived:
    """An event of former years, of which less is kept."""

    id: int
    person: Person
    day: date
    status: str


@dataclass(frozen=True, slots=True)
class Employee:
    """Somebody who has a name and a city and whom no question is about."""

    id: int
    name: str
    city: str
    hired: date


@dataclass(frozen=True, slots=True)
class DatabaseContents:
    """Everything that a database holds.

    Attributes:
        today: the day on which the question is asked; nothing is later.
    """

    domain: Domain
    naming: Naming
    today: date
    people: tuple[Person, ...]
    groups: tuple[CategoryRecord, ...]
    items: tuple[Item, ...]
    events: tuple[Transaction, ...]
    archive: tuple[Archived, ...]
    staff: tuple[Employee, ...]


def write_database(world: DatabaseContents) -> sqlite3.Connection:
    """Make a database of everything in a world. Whoever asked for it closes it."""
    connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
    connection.execute("PRAGMA journal_mode = OFF")
    connection.execute("BEGIN")
    for table in world.naming.values():
        connection.execute(f"CREATE TABLE {table.name} ({', '.join(_declared(table))})")
        marks = ", ".join("?" for _ in table.columns)
        connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", _rows(world, table))
    connection.execute("COMMIT")
    return connection


def _declared(table: Table) -> Iterator[str]:
    for column in table.columns:
        said = f"{column.name} {column.type}"
        if column.key:
            said += " PRIMARY KEY"
        elif not column.nullable:
            said += " NOT NULL"
        if column.references:
            target, _, key = column.references.partition(".")
            said += f" REFERENCES {target} ({key})"
        yield said


def _rows(world: DatabaseContents, table: Table) -> Iterator[tuple[Any, ...]]:
    for record in _records(world, table.role):
        yield tuple(_value(world, record, column) for column in table.columns)


def _records(world: DatabaseContents, table: str) -> Iterable[Any]:
    match table:
        case "headers":
            return {event.header: event for event in world.events}.values()
        case "statuses":
            return enumerate(world.domain.statuses, 1)
        case "people" | "groups" | "items" | "events" | "archive" | "staff":
            found: Iterable[Any] = getattr(world, table)
            return found
    raise ValueError(f"expected the role of a table, got {table!r}")


def _value(world: DatabaseContents, record: Any, column: Column) -> Any:
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
