"""What a database is about, as plain records: what answers are worked out from, without any SQL."""

from dataclasses import dataclass
from datetime import date

from .domain import Domain
from .naming import Naming


@dataclass(frozen=True, slots=True)
class Person:
    """A customer, a member, a patient, ..."""

    id: int
    name: str
    city: str
    joined: date
    email: str | None


@dataclass(frozen=True, slots=True)
class Group:
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
    group: Group
    price: int


@dataclass(frozen=True, slots=True)
class Event:
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
class World:
    """Everything that a database holds.

    Attributes:
        today: the day on which the question is asked; nothing is later.
    """

    domain: Domain
    naming: Naming
    today: date
    people: tuple[Person, ...]
    groups: tuple[Group, ...]
    items: tuple[Item, ...]
    events: tuple[Event, ...]
    archive: tuple[Archived, ...]
    staff: tuple[Employee, ...]
