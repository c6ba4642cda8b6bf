"""Records into the tables of an SQLite database in memory."""

import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

from .naming import Column, Table
from .records import World


def write_database(world: World) -> sqlite3.Connection:
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


def _rows(world: World, table: Table) -> Iterator[tuple[Any, ...]]:
    for record in _records(world, table.role):
        yield tuple(_value(world, record, column) for column in table.columns)


def _records(world: World, table: str) -> Iterable[Any]:
    match table:
        case "headers":
            return {event.header: event for event in world.events}.values()
        case "statuses":
            return enumerate(world.domain.statuses, 1)
        case "people" | "groups" | "items" | "events" | "archive" | "staff":
            found: Iterable[Any] = getattr(world, table)
            return found
    raise ValueError(f"expected the role of a table, got {table!r}")


def _value(world: World, record: Any, column: Column) -> Any:
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
