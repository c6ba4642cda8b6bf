"""What a domain is: its words, and the few ways in which domains store the same things differently."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Amounts(StrEnum):
    """How what an event came to is stored."""

    COLUMN = "column"
    """A column of euros."""
    CENTS = "cents"
    """A column of whole cents."""
    PRODUCT = "product"
    """Nowhere: units times the price of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """One kind of database.

    Attributes:
        name: its key.
        about: what the database is of, as in "a database of ...".
        words: the nouns and verbs that questions and descriptions are made of.
        tables: by role, the names that a table may have.
        columns: by role, the names that a column may have, where they are the domain's own.
        groups: names of groups.
        first: first words of the items' names.
        second: their other words.
        statuses: of events; the last is the one of events that came to nothing.
        units: from and to.
        amounts: how amounts are stored.
        lines: an event is a line of a header, which has the person, the day and the status.
        clocked: days are stored with the time.
        status_table: statuses are numbers, with a table of their own.
    """

    name: str
    about: str
    words: Mapping[str, str]
    tables: Mapping[str, tuple[str, ...]]
    columns: Mapping[str, tuple[str, ...]]
    groups: tuple[str, ...]
    first: tuple[str, ...]
    second: tuple[str, ...]
    statuses: tuple[str, ...]
    units: tuple[int, int]
    amounts: Amounts = Amounts.COLUMN
    lines: bool = False
    clocked: bool = False
    status_table: bool = False
    all_words: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "all_words", {**self.words, "void": self.statuses[-1]})
