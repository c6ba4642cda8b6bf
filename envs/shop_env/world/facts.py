"""The state of the shop as single facts, so that two states can be compared."""

from collections.abc import Iterator
from typing import Any, TypeAlias

from .records import Records

Fact: TypeAlias = tuple[str | int, ...]
"""What a fact is about: `("stock", sku)`, `("line", order, number, "returned")`, ..."""


def facts(records: Records) -> dict[Fact, Any]:
    """Return all that can be changed, without what is as good as absent."""
    return dict(_facts(records))


def differences(before: dict[Fact, Any], after: dict[Fact, Any]) -> dict[Fact, Any]:
    """Return the facts that are different, with what they are now; None where there is nothing any more."""
    keys = [*before, *(fact for fact in after if fact not in before)]
    return {fact: after.get(fact) for fact in keys if before.get(fact) != after.get(fact)}


def _facts(records: Records) -> Iterator[tuple[Fact, Any]]:
    for sku, variant in records.variants.items():
        yield ("stock", sku), variant.stock
    for customer in records.customers.values():
        for kind in customer.notes:
            yield ("note", customer.id, kind), True
    for order in records.orders.values():
        yield ("order", order.id, "status"), order.status
        address = order.address
        yield (
            ("order", order.id, "address"),
            tuple(
                " ".join(part.split()).casefold() for part in (address.street, address.postcode, address.city)
            ),
        )
        if order.coupon:
            yield ("order", order.id, "coupon"), order.coupon
        if order.discount:
            yield ("order", order.id, "discount"), order.discount
        if order.credit:
            yield ("credit", order.id), order.credit
        for line in order.lines:
            yield ("line", order.id, line.number, "sku"), line.sku
            if line.returned:
                yield ("line", order.id, line.number, "returned"), True
        for method, cents in order.refunds.items():
            yield ("refund", order.id, method), cents
        for method, cents in order.charges.items():
            yield ("charge", order.id, method), cents
        for reason in order.escalations:
            yield ("escalated", order.id, reason), True
