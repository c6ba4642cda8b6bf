"""Questions that take windows, comparisons within groups, or several steps."""

import random
from collections import Counter, defaultdict
from datetime import date
from fractions import Fraction
from itertools import pairwise

from ..world.records import DatabaseContents, Transaction
from .answers import number, pairs, text, texts
from .family import Draw, QuestionLevel, family, headers, single

HARD = QuestionLevel.HARD
ORDINALS = ("first", "second", "third")


@family(
    "rank_in_group",
    HARD,
    "Within the {group} '{GROUP}', which {item} has the {NTH} highest total {amount}?",
    "Rank the {items} of the {group} '{GROUP}' by total {amount}, highest first: which one is {NTH}?",
    "By total {amount}, which {item} is the {NTH} in the {group} '{GROUP}'?",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], source: random.Random) -> Draw | None:
    group, place = source.choice(events).item.group, source.randint(1, 2)
    totals: Counter[str] = Counter()
    for event in events:
        if event.item.group == group:
            totals[event.item.name] += event.amount
    ranked = totals.most_common()
    if len(ranked) <= place or len(set(totals.values())) < len(totals):
        return None
    return Draw(text(ranked[place][0]), {"GROUP": group.name, "NTH": ORDINALS[place]})


@family(
    "best_of_each_group",
    HARD,
    "For each {group}, what is the highest total of {units} that one of its {items} has? Leave out each {group} "
    "without {events}.",
    "Total the {units} of each {item}, and give for every {group} that occurs the greatest of these totals.",
    "Of the totals of {units} by {item}, which is the greatest in each {group} that has any {events}?",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], _source: random.Random) -> Draw:
    totals: Counter[tuple[str, int]] = Counter()
    for event in events:
        totals[event.item.group.name, event.item.id] += event.units
    best: dict[str, int] = {}
    for (name, _), total in totals.items():
        best[name] = max(total, best.get(name, 0))
    return Draw(pairs(list(best.items())))


@family(
    "longest_gap",
    HARD,
    "Which {person} had the longest time, in days, between two {events} that followed one another?",
    "Between consecutive {events} of the same {person}, whose pause was the longest? Give the name.",
    "Who waited the most days from one of their {events} to their next?",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], _source: random.Random) -> Draw | None:
    days: dict[str, set[date]] = defaultdict(set)
    for event in events:
        days[event.person.name].add(event.day)
    gaps: dict[str, int] = {}
    for name, found in days.items():
        ordered = sorted(found)
        pauses = [(after - before).days for before, after in pairwise(ordered)]
        if pauses:
            gaps[name] = max(pauses)
    longest = single(gaps)
    return Draw(text(longest)) if longest else None


@family(
    "above_group_average",
    HARD,
    "How many {items} have a {price} above the average {price} of their own {group}?",
    "Count the {items} whose {price} is higher than the mean {price} in the {group} they belong to.",
    "In their own {group}, how many {items} are dearer than its average, by {price}?",
    counts_events=False,
)
def _(world: DatabaseContents, _events: tuple[Transaction, ...], _source: random.Random) -> Draw | None:
    found = 0
    for group in world.groups:
        prices = [item.price for item in world.items if item.group == group]
        mean = Fraction(sum(prices), len(prices))
        if any(abs(price - mean) < 1 for price in prices):
            return None  # where a float may fall on either side
        found += sum(price > mean for price in prices)
    return Draw(number(found))


@family(
    "amount_of_largest_city",
    HARD,
    "What is the total of {amount} in {YEAR}, in euros, from the {people} of the city in which the most {people} live?",
    "Take the city with the greatest number of {people}. How many euros of {amount} came from there in {YEAR}?",
    "Add up the {amount} of {YEAR}, in euros, from the {people} of the city with the most {people}: what is the sum?",
)
def _(world: DatabaseContents, events: tuple[Transaction, ...], source: random.Random) -> Draw | None:
    city = single(Counter(person.city for person in world.people))
    if city is None:
        return None
    year = source.choice(events).day.year
    cents = sum(e.amount for e in events if e.person.city == city and e.day.year == year)
    return Draw(number(Fraction(cents, 100), 2), {"YEAR": str(year)}) if cents else None


@family(
    "used_both",
    HARD,
    "Which {people} have {used} both '{ITEM}' and '{OTHER}'? List their names.",
    "Name the {people} that have {used} '{ITEM}' as well as '{OTHER}', on whichever days.",
    "List everybody who has {used} each of the two, '{ITEM}' and '{OTHER}'.",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], source: random.Random) -> Draw | None:
    first, second = source.choice(events).item, source.choice(events).item
    both = {e.person.name for e in events if e.item == first} & {
        e.person.name for e in events if e.item == second
    }
    if first == second or not both:
        return None
    return Draw(texts(sorted(both)), {"ITEM": first.name, "OTHER": second.name})


@family(
    "greatest_growth",
    HARD,
    "Which {group} had the greatest increase of {units} from {YEAR} to {NEXT}?",
    "From {YEAR} to {NEXT}, the {units} of which {group} grew the most, in absolute numbers?",
    "Compare the {units} of {YEAR} with those of {NEXT}: which {group} gained the most?",
)
def _(world: DatabaseContents, events: tuple[Transaction, ...], _source: random.Random) -> Draw | None:
    year = world.today.year - 2  # the events of both years are there whole
    change: Counter[str] = Counter()
    for event in events:
        sign = {year: -1, year + 1: 1}.get(event.day.year, 0)
        change[event.item.group.name] += sign * event.units
    name = single(change)
    if name is None or change[name] <= 0:
        return None
    return Draw(text(name), {"YEAR": str(year), "NEXT": str(year + 1)})


@family(
    "share_of_status",
    HARD,
    "What percentage of all {events} of {YEAR}, whatever their status, have the status '{STATUS}'?",
    "Of all {events} in {YEAR}, how many percent have the status '{STATUS}'?",
    "How large is the share of {events} with the status '{STATUS}' among all those of {YEAR}, in percent?",
    counts_events=False,
)
def _(world: DatabaseContents, _events: tuple[Transaction, ...], source: random.Random) -> Draw:
    chosen = source.choice(world.events)
    year = [event for event in world.events if event.day.year == chosen.day.year]
    share = Fraction(100 * headers(e for e in year if e.status == chosen.status), headers(year))
    return Draw(number(share, 1), {"YEAR": str(chosen.day.year), "STATUS": chosen.status})


@family(
    "with_archive",
    HARD,
    "How many {events} does {PERSON} have, those of the archive included?",
    "Counting the archive too, how many {events} of {PERSON} are there?",
    "Add the {events} of {PERSON} that are archived to those that are not: how many is that?",
)
def _(world: DatabaseContents, events: tuple[Transaction, ...], source: random.Random) -> Draw | None:
    person = source.choice(world.archive).person
    void = world.domain.statuses[-1]
    valid_only = len(events) < len(world.events)
    old = sum(one.person == person and not (valid_only and one.status == void) for one in world.archive)
    new = headers(event for event in events if event.person == person)
    return Draw(number(old + new), {"PERSON": person.name}) if old and new else None


@family(
    "soon_after_joining",
    HARD,
    "How many {people} had their first {event} within {DAYS} days of the day on which they {joined}? An {event} "
    "exactly {DAYS} days later counts.",
    "Count the {people} whose earliest {event} was at most {DAYS} days after they {joined}.",
    "From the day on which they {joined} to their first {event}, no more than {DAYS} days passed for how many "
    "{people}?",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], source: random.Random) -> Draw | None:
    days = source.choice((60, 90, 120, 180, 240, 365))
    waits: dict[int, int] = {}
    for event in events:
        wait = (event.day - event.person.joined).days
        waits[event.person.id] = min(wait, waits.get(event.person.id, wait))
    found = sum(wait <= days for wait in waits.values())
    return Draw(number(found), {"DAYS": str(days)}) if found > 2 else None


@family(
    "running_total",
    HARD,
    "On which date did the total of {amount} since the beginning of {YEAR} first reach {SUM} euros? Give it as "
    "YYYY-MM-DD.",
    "Add up the {amount} of {YEAR} day by day: on which day (YYYY-MM-DD) did the sum come to {SUM} euros or more?",
    "In {YEAR}, what was the first day, as YYYY-MM-DD, by whose end {amount} had reached {SUM} euros in all?",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], source: random.Random) -> Draw | None:
    year = source.choice(events).day.year
    each: Counter[date] = Counter()
    for event in events:
        if event.day.year == year:
            each[event.day] += event.amount
    whole = sum(each.values())
    if whole <= 20000:
        return None
    wanted = source.randrange(1, 1 + whole // 10000) * 10000
    total = 0
    for day in sorted(each):
        total += each[day]
        if total >= wanted:
            break
    # A sum of floats may fall short of a bound that whole cents just reach.
    slots = {"YEAR": str(year), "SUM": str(wanted // 100)}
    return Draw(text(day.isoformat()), slots) if total > wanted else None


@family(
    "above_average_people",
    HARD,
    "How many {people} have more {events} than the average number among those {people} that have any?",
    "Take the {people} with {events}, and the mean number of {events} they have. How many of them are above it?",
    "Among {people} with at least one {event}, how many have more of them than these {people} have on average?",
)
def _(_world: DatabaseContents, events: tuple[Transaction, ...], _source: random.Random) -> Draw:
    each = Counter(person for person, _ in {(event.person.id, event.header) for event in events})
    return Draw(number(sum(count * len(each) > each.total() for count in each.values())))
