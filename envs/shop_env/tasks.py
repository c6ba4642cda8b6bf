"""Generation of tasks from numbers: a shop, a customer, and the customer's requests."""

import random
from dataclasses import dataclass, replace
from typing import Final, get_args

from openenv_core.worlds import Level

from .world.cases import CASES, TWO_ITEM_CASES, CaseMaker, CustomerRequest, Kind, Scenario
from .world.speech import word_request

CALLS: Final = 40
"""The default number of tool calls in an episode."""

_KINDS: Final[tuple[Kind, ...]] = (*get_args(Kind), "return", "return", "exchange")


_REQUESTS: Final = {Level.EASY: 1, Level.MEDIUM: 2, Level.HARD: 3}
"""The number of requests by level."""


@dataclass(frozen=True, slots=True)
class ShopTaskSpec:
    """One task, including its hidden parts."""

    scenario: Scenario
    level: Level

    def text(self, calls: int) -> str:
        """Return the prompt of the task for an episode with `calls` tool calls."""
        scenario = self.scenario
        requests = "\n".join(
            f"Request {number}: {request.wording}" for number, request in enumerate(scenario.requests, 1)
        )
        return (
            f"You are at the customer desk of a shop; today is {scenario.records.today.isoformat()}. "
            f"A customer writes:\n\n{requests}\n\n"
            "Do what the policies of the shop say, and nothing else. get_policy tells them: begin with 'identity' and "
            "'replies'. ask_customer asks the customer. Answer each request with reply, then finish. What counts is "
            f"what is on record at the end and what was answered. You have {calls} calls in all."
        )


def make_task(number: int, *, held_out: bool, level: Level | None = None) -> ShopTaskSpec:
    """Generate the task of a number.

    Args:
        number: The number of the task, which together with the level determines it.
        held_out: Whether to use phrasings that do not occur in training.
        level: The difficulty, which sets the number of requests; None derives it from the number as well.
    """
    source = random.Random(f"shop {number}")
    level = level or source.choice(list(Level))
    maker = CaseMaker(source)
    customer = maker.customer
    requests: list[CustomerRequest] = []
    while len(requests) < _REQUESTS[level]:
        kind = source.choice(_KINDS)
        make, case_weights = CASES[kind]
        cases = dict(case_weights)
        if any(len(each.lines) > 1 for each in requests):
            # At most one request for several items: more would need more calls than an episode should take.
            cases = {case: share for case, share in case_weights.items() if case not in TWO_ITEM_CASES}
        (case,) = source.choices(list(cases), list(cases.values()))
        if (request := make(maker, case)) is not None:
            requests.append(request)
    _add_other_orders(maker)
    impostor = source.random() < 0.07
    if not impostor and source.random() < 0.2:
        maker.add_customer(customer.name)
    by_number = [source.random() < 0.5 or "foreign" in each.case for each in requests]
    worded_requests = [
        replace(
            each,
            wording=word_request(each, maker.records, customer, source, held_out=held_out, by_number=known),
        )
        for each, known in zip(requests, by_number, strict=True)
    ]
    return ShopTaskSpec(
        Scenario(
            maker.records,
            maker.policy,
            customer.id,
            tuple(worded_requests),
            impostor,
            _draw_known_facts(maker, impostor),
            tuple(known or source.random() < 0.5 for known in by_number),
        ),
        level,
    )


def _add_other_orders(maker: CaseMaker) -> None:
    """Add distractors: orders of the customer with other products, and orders of other customers."""
    source = maker.source
    for _ in range(2):
        if (product := maker.take_product()) is not None:
            maker.add_order(maker.customer, [product], "delivered", delivered_days=source.randint(1, 80))
    all_products = list(maker.records.products.values())
    other_customers = [
        customer for customer in maker.records.customers.values() if customer is not maker.customer
    ]
    for _ in range(12):
        products = source.sample(all_products, source.randint(1, 3))
        if source.random() < 0.6:
            maker.add_order(
                source.choice(other_customers), products, "delivered", delivered_days=source.randint(1, 80)
            )
        else:
            maker.add_order(
                source.choice(other_customers), products, source.choice(("pending", "processing", "shipped"))
            )


def _draw_known_facts(maker: CaseMaker, impostor: bool) -> dict[str, str | None]:
    """Return the email, postcode and phone that the caller gives; one of them may be unknown to them."""
    source, customer = maker.source, maker.customer
    known_facts: dict[str, str | None] = {
        "email": customer.email,
        "postcode": customer.postcode,
        "phone": customer.phone,
    }
    if impostor:
        # An impostor knows the email address, guesses the postcode wrongly, and has no phone number.
        postcode = customer.postcode
        while postcode == customer.postcode:
            postcode = f"{source.randint(10000, 99999)}"
        known_facts["postcode"] = postcode
        known_facts["phone"] = None
    elif source.random() < 0.4:
        known_facts[source.choice(sorted(known_facts))] = None
    return known_facts
