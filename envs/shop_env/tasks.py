"""Tasks from numbers: a shop, a customer who calls, and what they want."""

import random
from dataclasses import dataclass, replace
from typing import Final, get_args

from openenv_core.worlds import Level

from .world.cases import CASES, SEVERAL, CaseMaker, CustomerRequest, Kind, Scenario
from .world.making import Maker
from .world.policy import draw_policy
from .world.speech import word_request

CALLS: Final = 40
"""How many calls an episode has, unless reset says otherwise."""

_KINDS: Final[tuple[Kind, ...]] = (*get_args(Kind), "return", "return", "exchange")


_REQUESTS: Final = {Level.EASY: 1, Level.MEDIUM: 2, Level.HARD: 3}
"""How many things a customer asks for."""


@dataclass(frozen=True, slots=True)
class ShopTaskSpec:
    """One task, with all that is hidden of it."""

    scenario: Scenario
    level: Level

    def text(self, calls: int) -> str:
        """Put the task into words."""
        scenario = self.scenario
        requests = "\n".join(
            f"Request {number}: {request.says}" for number, request in enumerate(scenario.requests, 1)
        )
        return (
            f"You are at the customer desk of a shop; today is {scenario.records.today.isoformat()}. "
            f"A customer writes:\n\n{requests}\n\n"
            "Do what the policies of the shop say, and nothing else. get_policy tells them: begin with 'identity' and "
            "'replies'. ask_customer asks the customer. Answer each request with reply, then finish. What counts is "
            f"what is on record at the end and what was answered. You have {calls} calls in all."
        )


def make_task(number: int, *, held_out: bool, level: Level | None = None) -> ShopTaskSpec:
    """Make the task of a number.

    Args:
        number: Decides everything, together with the level.
        held_out: Let the customer speak in a way that they never do in training.
        level: How much the customer asks for; None leaves that to the number as well.
    """
    source = random.Random(f"shop {number}")
    level = level or source.choice(list(Level))
    maker = Maker(source)
    policy = draw_policy(source)
    customer = source.choice(list(maker.records.customers.values()))
    products = source.sample(list(maker.records.products.values()), len(maker.records.products))
    bench = CaseMaker(maker, policy, customer, products)
    requests: list[CustomerRequest] = []
    while len(requests) < _REQUESTS[level]:
        kind = source.choice(_KINDS)
        make, often = CASES[kind]
        cases = dict(often)
        if any(len(each.lines) > 1 for each in requests):
            # One of several things is enough: more take more calls than an episode is meant to.
            cases = {case: share for case, share in often.items() if case not in SEVERAL}
        (case,) = source.choices(list(cases), list(cases.values()))
        if (request := make(bench, case)) is not None:
            requests.append(request)
    _fill(bench)
    impostor = source.random() < 0.07
    if not impostor and source.random() < 0.2:
        maker.customer(customer.name)
    by_number = [source.random() < 0.5 or "foreign" in each.case for each in requests]
    worded = [
        replace(
            each, says=word_request(each, maker.records, customer, source, held_out=held_out, by_number=known)
        )
        for each, known in zip(requests, by_number, strict=True)
    ]
    return ShopTaskSpec(
        Scenario(
            maker.records,
            policy,
            customer.id,
            tuple(worded),
            impostor,
            _knows(bench, impostor),
            tuple(known or source.random() < 0.5 for known in by_number),
        ),
        level,
    )


def _fill(bench: CaseMaker) -> None:
    """Add orders that nobody asks about: of the customer, with other things, and of others."""
    maker, source = bench.maker, bench.maker.source
    for _ in range(2):
        if (product := bench.take()) is not None:
            maker.order(bench.customer, [product], "delivered", delivered_days=source.randint(1, 80))
    everything = list(maker.records.products.values())
    strangers = [customer for customer in maker.records.customers.values() if customer is not bench.customer]
    for _ in range(12):
        products = source.sample(everything, source.randint(1, 3))
        if source.random() < 0.6:
            maker.order(source.choice(strangers), products, "delivered", delivered_days=source.randint(1, 80))
        else:
            maker.order(
                source.choice(strangers), products, source.choice(("pending", "processing", "shipped"))
            )


def _knows(bench: CaseMaker, impostor: bool) -> dict[str, str | None]:
    """Return what the caller says of email, postcode and phone; one of them they may not know."""
    source, customer = bench.maker.source, bench.customer
    knows: dict[str, str | None] = {
        "email": customer.email,
        "postcode": customer.postcode,
        "phone": customer.phone,
    }
    if impostor:
        # An address can be found out; the rest is guessed.
        digits = customer.postcode
        while digits == customer.postcode:
            digits = f"{source.randint(10000, 99999)}"
        knows["postcode"] = digits
        knows["phone"] = None
    elif source.random() < 0.4:
        knows[source.choice(sorted(knows))] = None
    return knows
