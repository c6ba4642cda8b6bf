"""The customer's wordings, and the records in the form that tools return."""

import random
from typing import Any, Final

from .cases import CustomerRequest, Kind, Scenario
from .records import Coupon, Customer, CustomerTopic, Order, Product, Records

PHRASINGS: Final[dict[Kind, tuple[str, ...]]] = {
    "return": (
        "I would like to send back the {THINGS} from {REF}.",
        "Can I return the {THINGS} from {REF}?",
        "About {REF}: I do not want to keep the {THINGS} and want my money back.",
        "I need to give back the {THINGS} that came with {REF}.",
    ),
    "exchange": (
        "Could you swap the {PRODUCT} from {REF} for the one in {OPTION}?",
        "I want to exchange the {PRODUCT} from {REF} for one in {OPTION}.",
        "I should have ordered the {PRODUCT} from {REF} in {OPTION}. Please exchange it for me.",
    ),
    "cancel": (
        "Please cancel {REF}.",
        "I do not need {REF} any more, can you stop it?",
        "Call off {REF} for me, please.",
    ),
    "address": (
        "I am moving. Please send {REF} to my new address.",
        "Can you change where {REF} goes?",
        "{REF} has to go to another address than the one you have.",
    ),
    "coupon": (
        "Please put the coupon {CODE} on {REF}.",
        "I forgot to use {CODE} for {REF}. Can you add it?",
        "Is it possible to take the discount of {CODE} off {REF}?",
    ),
    "late": (
        "{REF} came late. Do I get something for that?",
        "I waited too long for {REF} and want some credit for it.",
        "Your delivery of {REF} took more time than you promised. What will you do about it?",
    ),
    "total": (
        "How much did I pay for {REF} altogether?",
        "What was the total of {REF}, with shipping?",
        "Tell me what {REF} came to in the end, all included.",
    ),
}
"""The phrasings of requests by kind; the last of each is held out for validation and test."""

OTHER_METHOD: Final = "Please put the money on my {METHOD}, not on what I paid with."
BY_NUMBER: Final = "order {ORDER}"
BY_PRODUCT: Final = "the order with the {PRODUCT}"
OF_MINE: Final = "one of my orders"

_WHY: Final = {
    "changed_mind": ("I simply changed my mind.", "I find that I do not need it after all."),
    "damaged": ("It was broken when I unpacked it.", "It arrived damaged."),
    "wrong_item": ("It is not what I ordered.", "You sent me something else than I ordered."),
    None: ("There is no particular reason.",),
}
_FALLBACK: Final = {
    "refund": ("Then I would rather have my money back.", "In that case please refund me."),
    "keep": ("Then I will keep what I have.", "In that case leave it as it is."),
}
_UNKNOWN: Final = {
    "email": "I am not sure which email address you have.",
    "postcode": "I do not know the postcode that I gave you.",
    "phone": "I do not have my phone number at hand.",
}
_KNOWN: Final = {
    "email": "My email address is {}",
    "postcode": "The postcode is {}",
    "phone": "My phone number is {}",
}


def word_request(
    request: CustomerRequest,
    records: Records,
    caller: Customer,
    source: random.Random,
    *,
    held_out: bool,
    by_number: bool,
) -> str:
    """Word a request.

    Args:
        request: The request.
        records: The shop's records.
        caller: The customer, who may ask for a refund to another payment method.
        source: The source of randomness.
        held_out: Whether to use the phrasing that does not occur in training.
        by_number: Whether to refer to the order by its number.
    """
    order = records.orders[request.order_id]
    *usual, held_out_phrasing = PHRASINGS[request.kind]
    names = [records.product_of(order.lines[number - 1].sku).name for number in request.lines]
    ref = BY_NUMBER
    if not by_number:
        # A request about lines names their products anyway.
        ref = OF_MINE if request.lines else BY_PRODUCT
    ref = ref.replace("{ORDER}", order.id).replace("{PRODUCT}", request.product)
    option = records.variants[request.new_sku].option if request.new_sku else ""
    text = held_out_phrasing if held_out else source.choice(usual)
    slots = {
        "THINGS": " and the ".join(names),
        "PRODUCT": request.product,
        "OPTION": option,
        "CODE": request.code or "",
    }
    for name, value in slots.items():
        text = text.replace(f"{{{name}}}", value)
    text = text.replace("{REF}", ref)
    if request.kind in ("return", "cancel") and source.random() < 0.3:
        other_methods = [method for method in caller.methods if method != order.payment]
        text += " " + OTHER_METHOD.replace("{METHOD}", source.choice(other_methods))
    return text[0].upper() + text[1:]


def answer_question(scenario: Scenario, topic: CustomerTopic, request: int) -> str:
    """Return the customer's answer to a question; the same question always has the same answer."""
    details = scenario.requests[request - 1]
    match topic:
        case "name":
            return f"My name is {scenario.records.customers[scenario.customer_id].name}."
        case "email" | "postcode" | "phone":
            fact = scenario.knows.get(topic)
            return _UNKNOWN[topic] if fact is None else f"{_KNOWN[topic].format(fact)}."
        case "order":
            if scenario.knows_numbers[request - 1]:
                return f"It is order {details.order_id}."
            return f"I do not have the number; it is the one with the {details.product}."
        case "reason":
            options = _WHY[details.why]
        case "fallback":
            options = (
                _FALLBACK[details.fallback] if details.kind == "exchange" else ("There is nothing else.",)
            )
        case "address":
            if details.address is None:
                return "You have my address."
            new = details.address
            return f"Please send it to {new.street}, {new.postcode} {new.city}."
    # The order's number, and thus the task, determines the wording.
    return options[int(details.order_id[1:]) % len(options)]


def to_euros(cents: int) -> float:
    """Return cents as euros."""
    return cents / 100


def show_customer(customer: Customer, orders: list[Order], records: Records) -> dict[str, Any]:
    """Return an account with its orders."""
    return {
        "customer_id": customer.id,
        "name": customer.name,
        "tier": customer.tier,
        "payment_methods": list(customer.methods),
        "orders": [
            {
                "order_id": order.id,
                "placed": order.placed.isoformat(),
                "status": order.status,
                "products": [records.product_of(line.sku).name for line in order.lines],
            }
            for order in orders
        ],
    }


def show_order(order: Order, records: Records) -> dict[str, Any]:
    """Return an order."""
    return {
        "order_id": order.id,
        "customer_id": order.customer_id,
        "status": order.status,
        "placed": order.placed.isoformat(),
        "promised": order.promised.isoformat(),
        "delivered": order.delivered.isoformat() if order.delivered else None,
        "address": f"{order.address.street}, {order.address.postcode} {order.address.city}",
        "payment_method": order.payment,
        "lines": [
            {
                "line": line.number,
                "product": records.product_of(line.sku).name,
                "product_id": records.variants[line.sku].product_id,
                "sku": line.sku,
                "option": records.variants[line.sku].option,
                "quantity": line.quantity,
                "unit_price": to_euros(line.unit_price),
                "returned": line.returned,
            }
            for line in order.lines
        ],
        "items_total": to_euros(order.items_total),
        "shipping_fee": to_euros(order.shipping_fee),
        "coupon": order.coupon,
        "discount": to_euros(order.discount),
        "refunds": {method: to_euros(cents) for method, cents in order.refunds.items()},
        "charges": {method: to_euros(cents) for method, cents in order.charges.items()},
        "late_credit": to_euros(order.credit),
    }


def show_product(product: Product, records: Records) -> dict[str, Any]:
    """Return a product with its variants, without their stock."""
    return {
        "product_id": product.id,
        "name": product.name,
        "category": product.category,
        "final_sale": product.final_sale,
        "variants": [
            {
                "sku": sku,
                "option": records.variants[sku].option,
                "price": to_euros(records.variants[sku].price),
            }
            for sku in product.skus
        ],
    }


def show_coupon(coupon: Coupon) -> dict[str, Any]:
    """Return a coupon."""
    return {
        "code": coupon.code,
        "percent": coupon.percent,
        "minimum": to_euros(coupon.minimum),
        "last_day": coupon.expires.isoformat(),
    }
