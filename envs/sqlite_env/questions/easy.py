"""Questions on one table, or on one join."""

import random

from ..world.records import DatabaseContents, Transaction
from .answers import number, text, texts
from .family import Draw, QuestionLevel, family, single

EASY = QuestionLevel.EASY


@family(
    "count_in_city",
    EASY,
    "How many {people} live in {CITY}?",
    "What is the number of {people} whose city is {CITY}?",
    "Count the {people} from {CITY}.",
    "{CITY} is home to how many {people}?",
    counts_events=False,
)
def _(world: DatabaseContents, _events: tuple[Transaction, ...], source: random.Random) -> Draw:
    city = source.choice(world.people).city
    return Draw(number(sum(person.city == city for person in world.people)), {"CITY": city})


@family(
    "missing_email",
    EASY,
    "How many {people} have no email address on file?",
    "For how many {people} is the email address missing?",
    "Count the {people} that cannot be reached by email, because no address is on file.",
    "Of how many {people} is no email address known?",
    counts_events=False,
)
def _(world: DatabaseContents, _events: tuple[Transaction, ...], _source: random.Random) -> Draw:
    return Draw(number(sum(person.email is None for person in world.people)))


@family(
    "dearest_item",
    EASY,
    "Which {item} of the {group} '{GROUP}' has the highest {price}?",
    "Name the {item} with the highest {price} in the {group} '{GROUP}'.",
    "In the {group} '{GROUP}', the {price} of which {item} is the highest?",
    "What is the name of the {item} that tops the {group} '{GROUP}' by {price}?",
    counts_events=False,
)
def _(world: DatabaseContents, _events: tuple[Transaction, ...], source: random.Random) -> Draw:
    group = source.choice(world.groups)
    items = [item for item in world.items if item.group == group]
    return Draw(text(max(items, key=lambda item: item.price).name), {"GROUP": group.name})


@family(
    "items_between",
    EASY,
    "How many {items} have a {price} from {LOW} to {HIGH} euros, both included?",
    "Count the {items} whose {price} is at least {LOW} and at most {HIGH} euros.",
    "The {price} of how many {items} lies between {LOW} and {HIGH} euros, ends included?",
    counts_events=False,
)
def _(world: DatabaseContents, _events: tuple[Transaction, ...], source: random.Random) -> Draw | None:
    low = source.randrange(5, 150)
    high = low + source.randrange(20, 100)
    prices = [item.price for item in world.items]
    found = sum(low * 100 <= price <= high * 100 for price in prices)
    # A price at an end, to the cent, is where floats and readers differ.
    if found < 2 or any(price in (low * 100, high * 100) for price in prices):
        return None
    return Draw(number(found), {"LOW": str(low), "HIGH": str(high)})


@family(
    "joined_in_year",
    EASY,
    "How many {people} {joined} in {YEAR}?",
    "Count the {people} that {joined} in the year {YEAR}.",
    "In {YEAR}, how many {people} {joined}?",
    counts_events=False,
)
def _(world: DatabaseContents, _events: tuple[Transaction, ...], source: random.Random) -> Draw | None:
    year = source.choice(world.people).joined.year
    found = sum(person.joined.year == year for person in world.people)
    return Draw(number(found), {"YEAR": str(year)}) if found > 1 else None


@family(
    "last_name_begins",
    EASY,
    "How many {people} have a last name that begins with a letter from {LETTER} to {LAST}, both included?",
    "Count the {people} whose last name starts with one of the letters {LETTER} to {LAST}.",
    "The last names of how many {people} have one of the letters {LETTER} to {LAST} as their first?",
    counts_events=False,
)
def _(world: DatabaseContents, _events: tuple[Transaction, ...], source: random.Random) -> Draw | None:
    first, last = sorted(source.choice(world.people).name.split()[-1][0] for _ in range(2))
    found = sum(first <= person.name.split()[-1][0] <= last for person in world.people)
    return Draw(number(found), {"LETTER": first, "LAST": last}) if first < last else None


@family(
    "names_with_word",
    EASY,
    "List the names of the {items} whose name ends with the word '{WORD}'.",
    "Which {items} have '{WORD}' as the last word of their name?",
    "Name every {item} with a name of which '{WORD}' is the last word.",
    counts_events=False,
)
def _(world: DatabaseContents, _events: tuple[Transaction, ...], source: random.Random) -> Draw | None:
    word = source.choice(world.items).name.split()[-1]
    found = [item.name for item in world.items if item.name.split()[-1] == word]
    return Draw(texts(found), {"WORD": word}) if len(found) > 1 else None


@family(
    "largest_group",
    EASY,
    "Which {group} has the most {items}?",
    "To which {group} do the most {items} belong?",
    "Name the {group} with the greatest number of {items}.",
    counts_events=False,
)
def _(world: DatabaseContents, _events: tuple[Transaction, ...], _source: random.Random) -> Draw | None:
    sizes = {group.name: sum(item.group == group for item in world.items) for group in world.groups}
    name = single(sizes)
    return Draw(text(name)) if name else None
