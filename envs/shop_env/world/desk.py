"""What the tools of the desk do to the records.

They do what can be done, whether it is right or not: a refund that a policy forbids goes through. What they refuse is
what could not happen: things that are not there, accounts that were not verified, more money back than was paid.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from ..models import ImpossibleRequestError
from .records import (
    OPEN,
    STORE_CREDIT,
    Customer,
    Decision,
    Ground,
    Line,
    NoteKind,
    Order,
    PostalAddress,
    ProductVariant,
    Records,
    Why,
)

T = TypeVar("T")

TRIES: Final = 5
"""How often the facts about somebody may be wrong before nobody is verified any more."""

MAX_CREDIT: Final = 10_000
"""In cents, for one order."""

_FOUND: Final = 10


@dataclass(frozen=True, slots=True)
class DeskReply:
    """What a request was answered with. The amount is in cents."""

    decision: Decision
    ground: Ground
    amount: int


class Desk:
    """The desk during one conversation.

    Args:
        records: What the shop has on record; it is changed.
        requests: How many things the customer asks for.
    """

    def __init__(self, records: Records, requests: int) -> None:
        self.records = records
        self.replies: dict[int, DeskReply] = {}
        self._requests = requests
        self._verified: set[str] = set()
        self._wrong = 0

    def find_customer(self, name: str) -> list[dict[str, str]]:
        """Return who has a name, with no more than that."""
        wanted = _folded(name)
        found = [one for one in self.records.customers.values() if wanted and wanted in _folded(one.name)]
        return [{"customer_id": one.id, "name": one.name} for one in found[:_FOUND]]

    def verify(self, customer_id: str, **told: str | None) -> bool:
        """Compare what somebody tells with what is on record; two have to be right and none wrong."""
        customer = self.customer(customer_id)
        if self._wrong >= TRIES:
            raise ImpossibleRequestError(
                f"expected at most {TRIES} wrong tries in one conversation, got another; nobody is verified now"
            )
        given = {name: said for name, said in told.items() if said is not None}
        right = [_bare(said) == _bare(getattr(customer, name)) for name, said in given.items()]
        if len(right) >= 2 and all(right):
            self._verified.add(customer.id)
            return True
        self._wrong += 1
        return False

    def customer(self, customer_id: str) -> Customer:
        """Return an account."""
        return self._known(self.records.customers, customer_id, "customer")

    def account(self, customer_id: str) -> Customer:
        """Return an account that is verified."""
        customer = self.customer(customer_id)
        if customer.id not in self._verified:
            raise ImpossibleRequestError(
                f"expected verify_identity of {customer.id} first, got none that was right"
            )
        return customer

    def orders_of(self, customer: Customer) -> list[Order]:
        """Return somebody's orders, the oldest first."""
        found = [order for order in self.records.orders.values() if order.customer_id == customer.id]
        return sorted(found, key=lambda order: (order.placed, order.id))

    def order(self, order_id: str) -> Order:
        """Return an order of somebody who is verified."""
        order = self._known(self.records.orders, order_id, "order")
        if order.customer_id not in self._verified:
            raise ImpossibleRequestError(
                f"expected an order of a customer who is verified, got {order.id}, which is not"
            )
        return order

    def variant(self, sku: str) -> ProductVariant:
        """Return a variant."""
        return self._known(self.records.variants, sku, "variant (sku)")

    def return_items(self, order_id: str, numbers: list[int], why: Why) -> list[Line]:
        """Take lines of an order back."""
        order = self.order(order_id)
        if not numbers or len(set(numbers)) != len(numbers):
            raise ImpossibleRequestError(f"expected the numbers of lines, each once, got {numbers[:20]}")
        lines = [self._line(order, number) for number in numbers]
        self._need_delivered(order)
        for line in lines:
            line.returned = True
            if why != "damaged":
                self.records.variants[line.sku].stock += line.quantity
        return lines

    def exchange(self, order_id: str, number: int, new_sku: str) -> Line:
        """Exchange a line of an order for another variant of its product."""
        order = self.order(order_id)
        line, new = self._line(order, number), self.variant(new_sku)
        self._need_delivered(order)
        old = self.records.variants[line.sku]
        if new.product_id != old.product_id or new.sku == old.sku:
            raise ImpossibleRequestError(f"expected another variant of {old.product_id}, got {new.sku}")
        if new.stock < line.quantity:
            raise ImpossibleRequestError(f"expected {line.quantity} of {new.sku} in stock, got {new.stock}")
        old.stock += line.quantity
        new.stock -= line.quantity
        line.sku = new.sku
        return line

    def cancel(self, order_id: str) -> Order:
        """Cancel an order that has not left."""
        order = self._open(order_id)
        order.status = "cancelled"
        for line in order.lines:
            self.records.variants[line.sku].stock += line.quantity
        return order

    def change_address(self, order_id: str, new: PostalAddress) -> Order:
        """Send an order that has not left to another address."""
        order = self._open(order_id)
        if not all(part.strip() for part in (new.street, new.postcode, new.city)):
            raise ImpossibleRequestError("expected a street, a postcode and a city, got one that is empty")
        order.address = new
        return order

    def apply_coupon(self, order_id: str, code: str) -> Order:
        """Take a coupon's discount off an order that has not left."""
        order = self._open(order_id)
        coupon = self._known(self.records.coupons, code, "coupon")
        if order.coupon is not None:
            raise ImpossibleRequestError(
                f"expected an order without a coupon, got {order.id}, which has {order.coupon}"
            )
        order.coupon = coupon.code
        order.discount = order.items_total * coupon.percent // 100
        return order

    def refund(self, order_id: str, euros: float, method: str) -> Order:
        """Give money back for an order."""
        order, cents = self.order(order_id), _cents(euros)
        self._need_method(order, method)
        left = order.paid + sum(order.charges.values()) - sum(order.refunds.values())
        if cents > left:
            raise ImpossibleRequestError(
                f"expected at most {left / 100:.2f} euros, which is left of {order.id}, got {cents / 100:.2f}"
            )
        order.refunds[method] = order.refunds.get(method, 0) + cents
        return order

    def charge(self, order_id: str, euros: float, method: str) -> Order:
        """Take more money for an order."""
        order, cents = self.order(order_id), _cents(euros)
        self._need_method(order, method)
        order.charges[method] = order.charges.get(method, 0) + cents
        return order

    def give_credit(self, order_id: str, euros: float) -> Order:
        """Give store credit for a late order."""
        order, cents = self.order(order_id), _cents(euros)
        if order.credit + cents > MAX_CREDIT:
            raise ImpossibleRequestError(
                f"expected at most {MAX_CREDIT // 100} euros of credit for an order, got more"
            )
        order.credit += cents
        return order

    def escalate(self, order_id: str, reason: str) -> None:
        """Hand an order to a supervisor."""
        self.order(order_id).escalations.add(reason)

    def add_note(self, customer_id: str, kind: NoteKind) -> None:
        """Put a note on an account, verified or not."""
        customer = self.customer(customer_id)
        if kind != "other":
            customer.notes.add(kind)

    def reply(self, request: int, decision: Decision, ground: Ground, euros: float) -> None:
        """Answer a request, or answer it anew."""
        if not 1 <= request <= self._requests:
            raise ImpossibleRequestError(
                f"expected the number of a request, 1 to {self._requests}, got {request}"
            )
        if not math.isfinite(euros) or abs(euros) > 1_000_000:
            raise ImpossibleRequestError("expected an amount in euros, got one that is none")
        # Every other ground tells something of an account, and "done" says that it was changed.
        if not self._verified and (decision, ground) != ("refused", "not_verified"):
            raise ImpossibleRequestError(
                "expected verify_identity to be right before anything else than ('refused', 'not_verified') is told, "
                f"got ({decision!r}, {ground!r})"
            )
        self.replies[request] = DeskReply(decision, ground, round(euros * 100))

    def _open(self, order_id: str) -> Order:
        order = self.order(order_id)
        if order.status not in OPEN:
            raise ImpossibleRequestError(
                f"expected an order that has not left ({', '.join(OPEN)}), got {order.id}, {order.status}"
            )
        return order

    def _need_delivered(self, order: Order) -> None:
        if order.status != "delivered":
            raise ImpossibleRequestError(
                f"expected an order that was delivered, got {order.id}, which is {order.status}"
            )

    def _need_method(self, order: Order, method: str) -> None:
        known = {order.payment, STORE_CREDIT, *self.records.customers[order.customer_id].methods}
        if method not in known:
            raise ImpossibleRequestError(
                f"expected one of the methods {', '.join(sorted(known))}, got {method!r:.40}"
            )

    def _line(self, order: Order, number: int) -> Line:
        for line in order.lines:
            if line.number == number:
                if line.returned:
                    raise ImpossibleRequestError(
                        f"expected a line that was not sent back, got {number} of {order.id}"
                    )
                return line
        raise ImpossibleRequestError(f"expected a line of {order.id}, 1 to {len(order.lines)}, got {number}")

    def _known(self, there: dict[str, T], key: str, what: str) -> T:
        found = there.get(key.strip().upper() if len(key) < 100 else "")
        if found is None:
            raise ImpossibleRequestError(f"expected the id of a {what} that there is, got {key!r:.40}")
        return found


def _cents(euros: float) -> int:
    if not math.isfinite(euros) or not 0 < euros <= 100_000:
        raise ImpossibleRequestError("expected an amount above 0, in euros, got one that is none")
    cents = round(euros * 100)
    if cents == 0 or abs(cents - euros * 100) > 1e-6 * max(1.0, cents):
        raise ImpossibleRequestError(
            f"expected an amount in euros with at most two decimals, got {euros!r:.40}"
        )
    return cents


def _folded(text: str) -> str:
    return " ".join(text[:200].split()).casefold()


def _bare(text: str) -> str:
    return "".join(_characters(text[:200])).casefold()


def _characters(text: str) -> Iterable[str]:
    return (one for one in text if not one.isspace())
