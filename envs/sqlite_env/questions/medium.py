"""Questions on joins and groups."""

# ruff: noqa: SIM905 - words in a row are read more easily than a list of them

import random
from collections import Counter, defaultdict
from fractions import Fraction

from ..world.records import DatabaseContents, Transaction
from .answers import number, pairs, sequence, text, texts
from .family import Draw, QuestionLevel, family, headers, single

MEDIUM = QuestionLevel.MEDIUM

MONTHS = "January February March April May June July August September October November December".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


@family(
    "units_of_item",
    MEDIUM,
    "How many {units} does the {item} '{ITEM}' come to in all {events} together?",
    "Add up the {units} of the {item} '{ITEM}' over all {events}.",
    "What is the total of {units} for the {item} '{ITEM}'?",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], source: random.Random) -> Draw:
    item = source.choice(events).item
    return Draw(number(sum(event.units for event in events if event.item == item)), {"ITEM": item.name})


@family(
    "amount_in_month",
    MEDIUM,
    "What is the total of {amount}, in euros, from all {events} dated in {MONTH} {YEAR}?",
    "Add up the {amount} of all {events} of {MONTH} {YEAR}, in euros.",
    "How many euros of {amount} did {MONTH} {YEAR} bring?",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], source: random.Random) -> Draw:
    day = source.choice(events).day
    cents = sum(e.amount for e in events if (e.day.year, e.day.month) == (day.year, day.month))
    return Draw(number(Fraction(cents, 100), 2), {"MONTH": MONTHS[day.month - 1], "YEAR": str(day.year)})


@family(
    "never_used",
    MEDIUM,
    "List the names of the {items} that have never been {used}.",
    "Which {items} has nobody ever {used}?",
    "Name every {item} that does not occur in any of the {events}.",
)
def _(world: DatabaseContents, events: tuple[Transaction, ...], _source: random.Random) -> Draw:
    used = {event.item.id for event in events}
    return Draw(texts([item.name for item in world.items if item.id not in used]))


@family(
    "idle_in_city",
    MEDIUM,
    "How many {people} from {CITY} have no {events} at all?",
    "Count the {people} living in {CITY} without a single {event}.",
    "In {CITY}, how many {people} live for whom there is not one {event}?",
)
def _(world: DatabaseContents, events: tuple[Transaction, ...], source: random.Random) -> Draw | None:
    city = source.choice(world.people).city
    busy = {event.person.id for event in events}
    found = sum(person.city == city and person.id not in busy for person in world.people)
    return Draw(number(found), {"CITY": city}) if found else None


@family(
    "at_least",
    MEDIUM,
    "How many {people} have at least {COUNT} {events}?",
    "Count the {people} with {COUNT} or more {events}.",
    "For how many {people} are there no fewer than {COUNT} {events}?",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], source: random.Random) -> Draw | None:
    each = _events_of_people(events)
    least = source.randint(3, 7)
    found = sum(count >= least for count in each.values())
    return Draw(number(found), {"COUNT": str(least)}) if found > 1 else None


@family(
    "average_score",
    MEDIUM,
    "What is the average {score} of the {item} '{ITEM}', leaving out where none was given?",
    "Average the {score} of the {item} '{ITEM}' over those that were given.",
    "How high is the mean {score} that the {item} '{ITEM}' was given?",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], source: random.Random) -> Draw | None:
    item = source.choice(events).item
    scores = [event.score for event in events if event.item == item and event.score is not None]
    if len(scores) < 3:
        return None
    return Draw(number(Fraction(sum(scores), len(scores)), 2), {"ITEM": item.name})


@family(
    "top_items",
    MEDIUM,
    "Which {COUNT} {items} have the most {units} in total? Put the one with the most first; where two have as many, "
    "go by the alphabet.",
    "List the top {COUNT} {items} by total {units}, greatest first, and by name where they are equal.",
    "Rank the {items} by their total of {units}, highest first and alphabetically where equal, and give the first "
    "{COUNT}.",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], source: random.Random) -> Draw:
    totals: Counter[str] = Counter()
    for event in events:
        totals[event.item.name] += event.units
    count = source.randint(3, 5)
    ranked = sorted(totals, key=lambda name: (-totals[name], name))
    return Draw(sequence(ranked[:count]), {"COUNT": str(count)})


@family(
    "busiest_month",
    MEDIUM,
    "Which month of {YEAR} had the most {events}? Give it as YYYY-MM; of months with as many, the earliest.",
    "In {YEAR}, which month saw the greatest number of {events} (as YYYY-MM, the earliest if several did)?",
    "Give the month of {YEAR} with the most {events}, written YYYY-MM; the first of them where there is a tie.",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], source: random.Random) -> Draw:
    year = source.choice(events).day.year
    each: dict[str, set[int]] = defaultdict(set)
    for event in events:
        if event.day.year == year:
            each[f"{event.day:%Y-%m}"].add(event.header)
    best = min(each, key=lambda month: (-len(each[month]), month))
    return Draw(text(best), {"YEAR": str(year)})


@family(
    "different_items",
    MEDIUM,
    "How many different {items} has {PERSON} {used}?",
    "Count the distinct {items} that {PERSON} has {used}.",
    "{PERSON} has {used} how many {items}, each counted once?",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], source: random.Random) -> Draw:
    person = source.choice(events).person
    found = {event.item.id for event in events if event.person == person}
    return Draw(number(len(found)), {"PERSON": person.name})


@family(
    "on_weekday",
    MEDIUM,
    "How many {events} were on a {WEEKDAY}?",
    "Count the {events} whose date is a {WEEKDAY}.",
    "On {WEEKDAY}s, how many {events} were there altogether?",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], source: random.Random) -> Draw:
    weekday = source.choice(events).day.weekday()
    found = headers(event for event in events if event.day.weekday() == weekday)
    return Draw(number(found), {"WEEKDAY": WEEKDAYS[weekday]})


@family(
    "best_city",
    MEDIUM,
    "The {people} of which city account for the highest total {amount}?",
    "Taking all {people} of a city together, from which city is the total of {amount} the highest?",
    "Add up the {amount} by the city of the {person}: which city comes first?",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], _source: random.Random) -> Draw | None:
    totals: Counter[str] = Counter()
    for event in events:
        totals[event.person.city] += event.amount
    name = single(totals)
    return Draw(text(name)) if name else None


@family(
    "events_by_group",
    MEDIUM,
    "For each {group}, in how many {events} of {YEAR} does it occur? Leave out those without any.",
    "Give each {group} with the number of {events} in {YEAR} that had one of its {items}; only those that have some.",
    "Count the {events} of {YEAR} by {group}, and list each {group} that has any with its number.",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], source: random.Random) -> Draw:
    year = source.choice(events).day.year
    each: dict[str, set[int]] = defaultdict(set)
    for event in events:
        if event.day.year == year:
            each[event.item.group.name].add(event.header)
    return Draw(pairs([(name, len(found)) for name, found in each.items()]), {"YEAR": str(year)})


def _events_of_people(events: tuple[Transaction, ...]) -> dict[int, int]:
    each: dict[int, set[int]] = defaultdict(set)
    for event in events:
        each[event.person.id].add(event.header)
    return {person: len(found) for person, found in each.items()}
