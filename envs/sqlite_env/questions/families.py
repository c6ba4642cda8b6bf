"""The question families: the phrasings of each, and the computation of its answer from records, without SQL."""

# ruff: noqa: SIM905 - a string of words is easier to read than a list of them

from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import date
from fractions import Fraction
from functools import partial
from itertools import pairwise
from random import Random

from openenv_core.worlds import Level

from ..world.records import DatabaseContents, Transaction
from .answers import number, pairs, sequence, text, texts
from .asking import Draw, Events, family

easy, medium, hard = (partial(family, level) for level in Level)

MONTHS = "January February March April May June July August September October November December".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
ORDINALS = ("first", "second", "third")


def count_headers(events: Iterable[Transaction]) -> int:
    """Return the number of events, counting the lines of one header once."""
    return len({event.header for event in events})


def count_headers_by_person(events: Iterable[Transaction]) -> Counter[int]:
    """Return the number of events of each person, by the person's id."""
    return Counter(person for person, _ in {(event.person.id, event.header) for event in events})


def find_unique_maximum(scores: dict[str, int]) -> str | None:
    """Return the name with the highest score; None if it is not unique."""
    ranked = sorted(scores.values(), reverse=True)
    if not ranked or ranked[:1] == ranked[1:2]:
        return None
    return max(scores, key=lambda name: scores[name])


# Easy: one table or one join.


@easy(
    "How many {people} live in {CITY}?",
    "What is the number of {people} whose city is {CITY}?",
    "Count the {people} from {CITY}.",
    "{CITY} is home to how many {people}?",
    counts_events=False,
)
def _count_in_city(world: DatabaseContents, _events: Events, source: Random) -> Draw:
    city = source.choice(world.people).city
    return Draw(number(sum(person.city == city for person in world.people)), {"CITY": city})


@easy(
    "How many {people} have no email address on file?",
    "For how many {people} is the email address missing?",
    "Count the {people} that cannot be reached by email, because no address is on file.",
    "Of how many {people} is no email address known?",
    counts_events=False,
)
def _missing_email(world: DatabaseContents, _events: Events, _source: Random) -> Draw:
    return Draw(number(sum(person.email is None for person in world.people)))


@easy(
    "Which {item} of the {group} '{GROUP}' has the highest {price}?",
    "Name the {item} with the highest {price} in the {group} '{GROUP}'.",
    "In the {group} '{GROUP}', the {price} of which {item} is the highest?",
    "What is the name of the {item} that tops the {group} '{GROUP}' by {price}?",
    counts_events=False,
)
def _dearest_item(world: DatabaseContents, _events: Events, source: Random) -> Draw:
    group = source.choice(world.groups)
    items = [item for item in world.items if item.group == group]
    return Draw(text(max(items, key=lambda item: item.price).name), {"GROUP": group.name})


@easy(
    "How many {items} have a {price} from {LOW} to {HIGH} euros, both included?",
    "Count the {items} whose {price} is at least {LOW} and at most {HIGH} euros.",
    "The {price} of how many {items} lies between {LOW} and {HIGH} euros, ends included?",
    counts_events=False,
)
def _items_between(world: DatabaseContents, _events: Events, source: Random) -> Draw | None:
    low = source.randrange(5, 150)
    high = low + source.randrange(20, 100)
    prices = [item.price for item in world.items]
    matching = sum(low * 100 <= price <= high * 100 for price in prices)
    # Reject prices exactly at a bound, where floats may err and readers may disagree.
    if matching < 2 or any(price in (low * 100, high * 100) for price in prices):
        return None
    return Draw(number(matching), {"LOW": str(low), "HIGH": str(high)})


@easy(
    "How many {people} {joined} in {YEAR}?",
    "Count the {people} that {joined} in the year {YEAR}.",
    "In {YEAR}, how many {people} {joined}?",
    counts_events=False,
)
def _joined_in_year(world: DatabaseContents, _events: Events, source: Random) -> Draw | None:
    year = source.choice(world.people).joined.year
    matching = sum(person.joined.year == year for person in world.people)
    return Draw(number(matching), {"YEAR": str(year)}) if matching > 1 else None


@easy(
    "How many {people} have a last name that begins with a letter from {LETTER} to {LAST}, both included?",
    "Count the {people} whose last name starts with one of the letters {LETTER} to {LAST}.",
    "The last names of how many {people} have one of the letters {LETTER} to {LAST} as their first?",
    counts_events=False,
)
def _last_name_begins(world: DatabaseContents, _events: Events, source: Random) -> Draw | None:
    first, last = sorted(source.choice(world.people).name.split()[-1][0] for _ in range(2))
    matching = sum(first <= person.name.split()[-1][0] <= last for person in world.people)
    return Draw(number(matching), {"LETTER": first, "LAST": last}) if first < last else None


@easy(
    "List the names of the {items} whose name ends with the word '{WORD}'.",
    "Which {items} have '{WORD}' as the last word of their name?",
    "Name every {item} with a name of which '{WORD}' is the last word.",
    counts_events=False,
)
def _names_with_word(world: DatabaseContents, _events: Events, source: Random) -> Draw | None:
    word = source.choice(world.items).name.split()[-1]
    matching = [item.name for item in world.items if item.name.split()[-1] == word]
    return Draw(texts(matching), {"WORD": word}) if len(matching) > 1 else None


@easy(
    "Which {group} has the most {items}?",
    "To which {group} do the most {items} belong?",
    "Name the {group} with the greatest number of {items}.",
    counts_events=False,
)
def _largest_group(world: DatabaseContents, _events: Events, _source: Random) -> Draw | None:
    sizes = {group.name: sum(item.group == group for item in world.items) for group in world.groups}
    name = find_unique_maximum(sizes)
    return Draw(text(name)) if name else None


# Medium: joins and aggregation.


@medium(
    "How many {units} does the {item} '{ITEM}' come to in all {events} together?",
    "Add up the {units} of the {item} '{ITEM}' over all {events}.",
    "What is the total of {units} for the {item} '{ITEM}'?",
)
def _units_of_item(_world: DatabaseContents, events: Events, source: Random) -> Draw:
    item = source.choice(events).item
    return Draw(number(sum(event.units for event in events if event.item == item)), {"ITEM": item.name})


@medium(
    "What is the total of {amount}, in euros, from all {events} dated in {MONTH} {YEAR}?",
    "Add up the {amount} of all {events} of {MONTH} {YEAR}, in euros.",
    "How many euros of {amount} did {MONTH} {YEAR} bring?",
)
def _amount_in_month(_world: DatabaseContents, events: Events, source: Random) -> Draw:
    day = source.choice(events).day
    cents = sum(e.amount for e in events if (e.day.year, e.day.month) == (day.year, day.month))
    return Draw(number(Fraction(cents, 100), 2), {"MONTH": MONTHS[day.month - 1], "YEAR": str(day.year)})


@medium(
    "List the names of the {items} that have never been {used}.",
    "Which {items} has nobody ever {used}?",
    "Name every {item} that does not occur in any of the {events}.",
)
def _never_used(world: DatabaseContents, events: Events, _source: Random) -> Draw:
    used = {event.item.id for event in events}
    return Draw(texts([item.name for item in world.items if item.id not in used]))


@medium(
    "How many {people} from {CITY} have no {events} at all?",
    "Count the {people} living in {CITY} without a single {event}.",
    "In {CITY}, how many {people} live for whom there is not one {event}?",
)
def _idle_in_city(world: DatabaseContents, events: Events, source: Random) -> Draw | None:
    city = source.choice(world.people).city
    busy = {event.person.id for event in events}
    matching = sum(person.city == city and person.id not in busy for person in world.people)
    return Draw(number(matching), {"CITY": city}) if matching else None


@medium(
    "How many {people} have at least {COUNT} {events}?",
    "Count the {people} with {COUNT} or more {events}.",
    "For how many {people} are there no fewer than {COUNT} {events}?",
)
def _at_least(_world: DatabaseContents, events: Events, source: Random) -> Draw | None:
    each = count_headers_by_person(events)
    least = source.randint(3, 7)
    matching = sum(count >= least for count in each.values())
    return Draw(number(matching), {"COUNT": str(least)}) if matching > 1 else None


@medium(
    "What is the average {score} of the {item} '{ITEM}', leaving out where none was given?",
    "Average the {score} of the {item} '{ITEM}' over those that were given.",
    "How high is the mean {score} that the {item} '{ITEM}' was given?",
)
def _average_score(_world: DatabaseContents, events: Events, source: Random) -> Draw | None:
    item = source.choice(events).item
    scores = [event.score for event in events if event.item == item and event.score is not None]
    if len(scores) < 3:
        return None
    return Draw(number(Fraction(sum(scores), len(scores)), 2), {"ITEM": item.name})


@medium(
    "Which {COUNT} {items} have the most {units} in total? Put the one with the most first; where two have as many, "
    "go by the alphabet.",
    "List the top {COUNT} {items} by total {units}, greatest first, and by name where they are equal.",
    "Rank the {items} by their total of {units}, highest first and alphabetically where equal, and give the first "
    "{COUNT}.",
)
def _top_items(_world: DatabaseContents, events: Events, source: Random) -> Draw:
    totals: Counter[str] = Counter()
    for event in events:
        totals[event.item.name] += event.units
    count = source.randint(3, 5)
    ranked = sorted(totals, key=lambda name: (-totals[name], name))
    return Draw(sequence(ranked[:count]), {"COUNT": str(count)})


@medium(
    "Which month of {YEAR} had the most {events}? Give it as YYYY-MM; of months with as many, the earliest.",
    "In {YEAR}, which month saw the greatest number of {events} (as YYYY-MM, the earliest if several did)?",
    "Give the month of {YEAR} with the most {events}, written YYYY-MM; the first of them where there is a tie.",
)
def _busiest_month(_world: DatabaseContents, events: Events, source: Random) -> Draw:
    year = source.choice(events).day.year
    each: dict[str, set[int]] = defaultdict(set)
    for event in events:
        if event.day.year == year:
            each[f"{event.day:%Y-%m}"].add(event.header)
    best = min(each, key=lambda month: (-len(each[month]), month))
    return Draw(text(best), {"YEAR": str(year)})


@medium(
    "How many different {items} has {PERSON} {used}?",
    "Count the distinct {items} that {PERSON} has {used}.",
    "{PERSON} has {used} how many {items}, each counted once?",
)
def _different_items(_world: DatabaseContents, events: Events, source: Random) -> Draw:
    person = source.choice(events).person
    matching = {event.item.id for event in events if event.person == person}
    return Draw(number(len(matching)), {"PERSON": person.name})


@medium(
    "How many {events} were on a {WEEKDAY}?",
    "Count the {events} whose date is a {WEEKDAY}.",
    "On {WEEKDAY}s, how many {events} were there altogether?",
)
def _on_weekday(_world: DatabaseContents, events: Events, source: Random) -> Draw:
    weekday = source.choice(events).day.weekday()
    matching = count_headers(event for event in events if event.day.weekday() == weekday)
    return Draw(number(matching), {"WEEKDAY": WEEKDAYS[weekday]})


@medium(
    "The {people} of which city account for the highest total {amount}?",
    "Taking all {people} of a city together, from which city is the total of {amount} the highest?",
    "Add up the {amount} by the city of the {person}: which city comes first?",
)
def _best_city(_world: DatabaseContents, events: Events, _source: Random) -> Draw | None:
    totals: Counter[str] = Counter()
    for event in events:
        totals[event.person.city] += event.amount
    name = find_unique_maximum(totals)
    return Draw(text(name)) if name else None


@medium(
    "For each {group}, in how many {events} of {YEAR} does it occur? Leave out those without any.",
    "Give each {group} with the number of {events} in {YEAR} that had one of its {items}; only those that have some.",
    "Count the {events} of {YEAR} by {group}, and list each {group} that has any with its number.",
)
def _events_by_group(_world: DatabaseContents, events: Events, source: Random) -> Draw:
    year = source.choice(events).day.year
    each: dict[str, set[int]] = defaultdict(set)
    for event in events:
        if event.day.year == year:
            each[event.item.group.name].add(event.header)
    return Draw(pairs([(name, len(matching)) for name, matching in each.items()]), {"YEAR": str(year)})


# Hard: window functions, comparisons within groups, several steps.


@hard(
    "Within the {group} '{GROUP}', which {item} has the {NTH} highest total {amount}?",
    "Rank the {items} of the {group} '{GROUP}' by total {amount}, highest first: which one is {NTH}?",
    "By total {amount}, which {item} is the {NTH} in the {group} '{GROUP}'?",
)
def _rank_in_group(_world: DatabaseContents, events: Events, source: Random) -> Draw | None:
    group, place = source.choice(events).item.group, source.randint(1, 2)
    totals: Counter[str] = Counter()
    for event in events:
        if event.item.group == group:
            totals[event.item.name] += event.amount
    ranked = totals.most_common()
    if len(ranked) <= place or len(set(totals.values())) < len(totals):
        return None
    return Draw(text(ranked[place][0]), {"GROUP": group.name, "NTH": ORDINALS[place]})


@hard(
    "For each {group}, what is the highest total of {units} that one of its {items} has? Leave out each {group} "
    "without {events}.",
    "Total the {units} of each {item}, and give for every {group} that occurs the greatest of these totals.",
    "Of the totals of {units} by {item}, which is the greatest in each {group} that has any {events}?",
)
def _best_of_each_group(_world: DatabaseContents, events: Events, _source: Random) -> Draw:
    totals: Counter[tuple[str, int]] = Counter()
    for event in events:
        totals[event.item.group.name, event.item.id] += event.units
    best: dict[str, int] = {}
    for (name, _), total in totals.items():
        best[name] = max(total, best.get(name, 0))
    return Draw(pairs(list(best.items())))


@hard(
    "Which {person} had the longest time, in days, between two {events} that followed one another?",
    "Between consecutive {events} of the same {person}, whose pause was the longest? Give the name.",
    "Who waited the most days from one of their {events} to their next?",
)
def _longest_gap(_world: DatabaseContents, events: Events, _source: Random) -> Draw | None:
    days: dict[str, set[date]] = defaultdict(set)
    for event in events:
        days[event.person.name].add(event.day)
    gaps: dict[str, int] = {}
    for name, matching in days.items():
        ordered = sorted(matching)
        pauses = [(after - before).days for before, after in pairwise(ordered)]
        if pauses:
            gaps[name] = max(pauses)
    longest = find_unique_maximum(gaps)
    return Draw(text(longest)) if longest else None


@hard(
    "How many {items} have a {price} above the average {price} of their own {group}?",
    "Count the {items} whose {price} is higher than the mean {price} in the {group} they belong to.",
    "In their own {group}, how many {items} are dearer than its average, by {price}?",
    counts_events=False,
)
def _above_group_average(world: DatabaseContents, _events: Events, _source: Random) -> Draw | None:
    matching = 0
    for group in world.groups:
        prices = [item.price for item in world.items if item.group == group]
        mean = Fraction(sum(prices), len(prices))
        if any(abs(price - mean) < 1 for price in prices):
            return None  # with floats, the price may fall on either side of the mean
        matching += sum(price > mean for price in prices)
    return Draw(number(matching))


@hard(
    "What is the total of {amount} in {YEAR}, in euros, from the {people} of the city in which the most {people} live?",
    "Take the city with the greatest number of {people}. How many euros of {amount} came from there in {YEAR}?",
    "Add up the {amount} of {YEAR}, in euros, from the {people} of the city with the most {people}: what is the sum?",
)
def _amount_of_largest_city(world: DatabaseContents, events: Events, source: Random) -> Draw | None:
    city = find_unique_maximum(Counter(person.city for person in world.people))
    if city is None:
        return None
    year = source.choice(events).day.year
    cents = sum(e.amount for e in events if e.person.city == city and e.day.year == year)
    return Draw(number(Fraction(cents, 100), 2), {"YEAR": str(year)}) if cents else None


@hard(
    "Which {people} have {used} both '{ITEM}' and '{OTHER}'? List their names.",
    "Name the {people} that have {used} '{ITEM}' as well as '{OTHER}', on whichever days.",
    "List everybody who has {used} each of the two, '{ITEM}' and '{OTHER}'.",
)
def _used_both(_world: DatabaseContents, events: Events, source: Random) -> Draw | None:
    first, second = source.choice(events).item, source.choice(events).item
    both = {e.person.name for e in events if e.item == first} & {
        e.person.name for e in events if e.item == second
    }
    if first == second or not both:
        return None
    return Draw(texts(sorted(both)), {"ITEM": first.name, "OTHER": second.name})


@hard(
    "Which {group} had the greatest increase of {units} from {YEAR} to {NEXT}?",
    "From {YEAR} to {NEXT}, the {units} of which {group} grew the most, in absolute numbers?",
    "Compare the {units} of {YEAR} with those of {NEXT}: which {group} gained the most?",
)
def _greatest_growth(world: DatabaseContents, events: Events, _source: Random) -> Draw | None:
    year = world.today.year - 2  # the data covers both years completely
    change: Counter[str] = Counter()
    for event in events:
        sign = {year: -1, year + 1: 1}.get(event.day.year, 0)
        change[event.item.group.name] += sign * event.units
    name = find_unique_maximum(change)
    if name is None or change[name] <= 0:
        return None
    return Draw(text(name), {"YEAR": str(year), "NEXT": str(year + 1)})


@hard(
    "What percentage of all {events} of {YEAR}, whatever their status, have the status '{STATUS}'?",
    "Of all {events} in {YEAR}, how many percent have the status '{STATUS}'?",
    "How large is the share of {events} with the status '{STATUS}' among all those of {YEAR}, in percent?",
    counts_events=False,
)
def _share_of_status(world: DatabaseContents, _events: Events, source: Random) -> Draw:
    chosen = source.choice(world.events)
    year = [event for event in world.events if event.day.year == chosen.day.year]
    share = Fraction(100 * count_headers(e for e in year if e.status == chosen.status), count_headers(year))
    return Draw(number(share, 1), {"YEAR": str(chosen.day.year), "STATUS": chosen.status})


@hard(
    "How many {events} does {PERSON} have, those of the archive included?",
    "Counting the archive too, how many {events} of {PERSON} are there?",
    "Add the {events} of {PERSON} that are archived to those that are not: how many is that?",
)
def _with_archive(world: DatabaseContents, events: Events, source: Random) -> Draw | None:
    person = source.choice(world.archive).person
    void = world.domain.statuses[-1]
    valid_only = len(events) < len(world.events)
    old = sum(entry.person == person and not (valid_only and entry.status == void) for entry in world.archive)
    new = count_headers(event for event in events if event.person == person)
    return Draw(number(old + new), {"PERSON": person.name}) if old and new else None


@hard(
    "How many {people} had their first {event} within {DAYS} days of the day on which they {joined}? An {event} "
    "exactly {DAYS} days later counts.",
    "Count the {people} whose earliest {event} was at most {DAYS} days after they {joined}.",
    "From the day on which they {joined} to their first {event}, no more than {DAYS} days passed for how many "
    "{people}?",
)
def _soon_after_joining(_world: DatabaseContents, events: Events, source: Random) -> Draw | None:
    days = source.choice((60, 90, 120, 180, 240, 365))
    waits: dict[int, int] = {}
    for event in events:
        wait = (event.day - event.person.joined).days
        waits[event.person.id] = min(wait, waits.get(event.person.id, wait))
    matching = sum(wait <= days for wait in waits.values())
    return Draw(number(matching), {"DAYS": str(days)}) if matching > 2 else None


@hard(
    "On which date did the total of {amount} since the beginning of {YEAR} first reach {SUM} euros? Give it as "
    "YYYY-MM-DD.",
    "Add up the {amount} of {YEAR} day by day: on which day (YYYY-MM-DD) did the sum come to {SUM} euros or more?",
    "In {YEAR}, what was the first day, as YYYY-MM-DD, by whose end {amount} had reached {SUM} euros in all?",
)
def _running_total(_world: DatabaseContents, events: Events, source: Random) -> Draw | None:
    year = source.choice(events).day.year
    each: Counter[date] = Counter()
    for event in events:
        if event.day.year == year:
            each[event.day] += event.amount
    year_total = sum(each.values())
    if year_total <= 20000:
        return None
    bound = source.randrange(1, 1 + year_total // 10000) * 10000
    total = 0
    for day in sorted(each):
        total += each[day]
        if total >= bound:
            break
    # Reject a total exactly at the bound, of which a sum of floats may fall short.
    slots = {"YEAR": str(year), "SUM": str(bound // 100)}
    return Draw(text(day.isoformat()), slots) if total > bound else None


@hard(
    "How many {people} have more {events} than the average number among those {people} that have any?",
    "Take the {people} with {events}, and the mean number of {events} they have. How many of them are above it?",
    "Among {people} with at least one {event}, how many have more of them than these {people} have on average?",
)
def _above_average_people(_world: DatabaseContents, events: Events, _source: Random) -> Draw:
    each = count_headers_by_person(events)
    return Draw(number(sum(count * len(each) > each.total() for count in each.values())))
