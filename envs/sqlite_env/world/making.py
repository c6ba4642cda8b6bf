"""Random generation of a database's contents."""

import random
from datetime import date, timedelta
from typing import Final

from .domains import CITIES, FIRST_NAMES, LAST_NAMES, MAIL_HOSTS, Amounts, Domain
from .records import (
    ArchivedTransaction,
    CategoryRecord,
    DatabaseContents,
    Employee,
    Item,
    Person,
    Transaction,
    draw_naming,
)

YEARS: Final = 3
"""How many years events go back."""

_FIRST_DAY: Final = date(2021, 6, 1)
_DAYS: Final = 1400
"""The range of days from the first day in which "today" is drawn."""

_UNUSED_ITEMS: Final = 4
_IDLE_PEOPLE: Final = 14


def make_world(domain: Domain, source: random.Random) -> DatabaseContents:
    """Draw the complete contents of a database of a domain."""
    naming = draw_naming(domain, source)
    today = _FIRST_DAY + timedelta(source.randrange(_DAYS))
    start = today - timedelta(365 * YEARS)
    people = _draw_people(source, start, today)
    groups = tuple(
        CategoryRecord(number, name)
        for number, name in enumerate(
            source.sample(domain.groups, source.randint(5, 7)), source.randint(1, 9) * 10
        )
    )
    items = _draw_items(domain, groups, source)
    events = _draw_events(domain, people, items, start, today, source)
    return DatabaseContents(
        domain=domain,
        naming=naming,
        today=today,
        people=people,
        groups=groups,
        items=items,
        events=events,
        archive=_draw_archive(domain, people, start, source),
        staff=_draw_staff(people, today, source),
    )


def _draw_people(source: random.Random, start: date, today: date) -> tuple[Person, ...]:
    cities = source.sample(CITIES, source.randint(6, 9))
    weights = [1 + 4 / (place + 1) for place in range(len(cities))]
    names: dict[str, None] = {}
    while len(names) < 45:
        names[f"{source.choice(FIRST_NAMES)} {source.choice(LAST_NAMES)}"] = None
    first = start - timedelta(900)
    span = (today - first).days
    number = source.randint(100, 900)
    people = []
    for name in names:
        number += source.randint(1, 4)
        # Skewed: most people joined long ago, and some recently.
        joined = first + timedelta(int(span * source.random() ** 1.6))
        mail = f"{name.lower().replace(' ', '.').replace(chr(39), '')}@{source.choice(MAIL_HOSTS)}"
        people.append(
            Person(
                number,
                name,
                source.choices(cities, weights)[0],
                joined,
                mail if source.random() > 0.22 else None,
            )
        )
    return tuple(people)


def _draw_items(
    domain: Domain, groups: tuple[CategoryRecord, ...], source: random.Random
) -> tuple[Item, ...]:
    count = source.randint(24, 34)
    all_names = [f"{first} {second}" for first in domain.first for second in domain.second]
    prices = source.sample(range(305, 25000, 5), count)
    # Each group gets at least two items; the rest are assigned at random.
    item_groups = [*groups, *groups, *source.choices(groups, k=count - 2 * len(groups))]
    source.shuffle(item_groups)
    number = source.randint(1000, 4000)
    return tuple(
        Item(number + place * 3, name, group, price)
        for place, (name, group, price) in enumerate(
            zip(source.sample(all_names, count), item_groups, prices, strict=True)
        )
    )


def _draw_events(
    domain: Domain,
    people: tuple[Person, ...],
    items: tuple[Item, ...],
    start: date,
    today: date,
    source: random.Random,
) -> tuple[Transaction, ...]:
    used_items = source.sample(items, len(items) - _UNUSED_ITEMS)
    weights = [1 + 5 / (place + 1) for place in range(len(used_items))]
    active_people = source.sample(people, len(people) - _IDLE_PEOPLE)
    days = sorted(source.randrange((today - start).days) for _ in range(source.randint(150, 210)))
    *valid_statuses, void = domain.statuses
    header = line = source.randint(5000, 9000)
    transactions: list[Transaction] = []
    for offset in days:
        day = start + timedelta(offset)
        members = [person for person in active_people if person.joined <= day]
        if not members:
            continue
        header += source.randint(1, 3)
        person = source.choice(members)
        status = void if source.random() < 0.14 else source.choice(valid_statuses)
        clock = f"{source.randint(8, 17):02d}:{source.randrange(0, 60, 5):02d}"
        line_count = source.randint(1, 3) if domain.lines else 1
        event_items = dict.fromkeys(source.choices(used_items, weights, k=line_count))
        for item in event_items:
            line = line + 1 if domain.lines else header
            units = source.randint(*domain.units)
            # The charged price is near the current one, but often differs.
            unit_price = max(100, item.price * source.choice((80, 90, 95, 100, 100, 105)) // 100)
            amount = units * unit_price if domain.amounts is Amounts.PRODUCT else unit_price
            score = source.randint(1, 5) if source.random() > 0.35 else None
            transactions.append(
                Transaction(line, header, person, item, day, clock, units, unit_price, amount, status, score)
            )
    return tuple(transactions)


def _draw_archive(
    domain: Domain, people: tuple[Person, ...], start: date, source: random.Random
) -> tuple[ArchivedTransaction, ...]:
    archived: list[ArchivedTransaction] = []
    number = source.randint(100, 900)
    for _ in range(70):
        day = start - timedelta(source.randint(1, 700))
        members = [person for person in people if person.joined <= day]
        if members:
            number += source.randint(1, 3)
            archived.append(
                ArchivedTransaction(number, source.choice(members), day, source.choice(domain.statuses))
            )
    return tuple(archived)


def _draw_staff(people: tuple[Person, ...], today: date, source: random.Random) -> tuple[Employee, ...]:
    # Two employees share their names with people in the database.
    names = [person.name for person in source.sample(people, 2)]
    names += [f"{source.choice(FIRST_NAMES)} {source.choice(LAST_NAMES)}" for _ in range(7)]
    cities = sorted({person.city for person in people})
    return tuple(
        Employee(number, name, source.choice(cities), today - timedelta(source.randint(30, 4000)))
        for number, name in enumerate(names, 1)
    )
