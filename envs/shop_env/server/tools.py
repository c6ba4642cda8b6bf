"""The tools of the desk: callers are told of them by their types and docstrings."""

from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field

from openenv_core.errors import EpisodeOverError
from openenv_core.tools import ToolEnvironment, ToolFailedError, tool

from ..models import ShopState
from ..tasks import ShopTaskSpec
from ..world.desk import Desk
from ..world.records import Asked, Decision, Ground, NoteKind, PostalAddress, Topic, Why
from ..world.speech import answer, euros, shown_coupon, shown_customer, shown_order, shown_product

MOST_FOUND: Final = 10

Id: TypeAlias = Annotated[str, Field(max_length=40)]
Short: TypeAlias = Annotated[str, Field(max_length=200)]
Long: TypeAlias = Annotated[str, Field(max_length=2_000)]
Euros: TypeAlias = Annotated[float, Field(gt=0, le=100_000, description="in euros")]

_READS: Final = {"readOnlyHint": True, "openWorldHint": False}


class DeskTools(ToolEnvironment[ShopState]):
    """What can be done at the desk; the episode around it is the environment's."""

    _task: ShopTaskSpec | None = None
    _desk: Desk | None = None
    _finished = False

    @tool(annotations=_READS)
    def get_policy(self, topic: Topic) -> dict[str, str]:
        """Read the policy on a topic."""
        return {"topic": topic, "text": self._asked().scenario.policy.text(topic)}

    @tool(annotations=_READS)
    def ask_customer(self, topic: Asked, request: int = 1) -> str:
        """Ask the customer about something.

        Args:
            topic: What to ask about; "fallback" is what they want where the first wish cannot be granted.
            request: The number of the request that it is about.
        """
        scenario = self._asked().scenario
        if not 1 <= request <= len(scenario.requests):
            raise ToolFailedError(
                f"expected the number of a request, 1 to {len(scenario.requests)}, got {request}"
            )
        return answer(scenario, topic, request)

    @tool(annotations=_READS)
    def find_customer(self, name: Short) -> list[dict[str, str]]:
        """Find accounts by the name of the customer, or a part of it."""
        return self._at_desk().find_customer(name)

    @tool
    def verify_identity(
        self,
        customer_id: Id,
        email: Short | None = None,
        postcode: Short | None = None,
        phone: Short | None = None,
    ) -> dict[str, bool]:
        """Compare what the customer told with an account. Give two of the three or more; all given must be right."""
        found = self._at_desk().verify(customer_id, email=email, postcode=postcode, phone=phone)
        return {"verified": found}

    @tool(annotations=_READS)
    def get_customer(self, customer_id: Id) -> dict[str, Any]:
        """Look up an account that was verified, with a list of its orders."""
        desk = self._at_desk()
        customer = desk.account(customer_id)
        return shown_customer(customer, desk.orders_of(customer), desk.records)

    @tool(annotations=_READS)
    def get_order(self, order_id: Id) -> dict[str, Any]:
        """Look up an order of a customer who was verified."""
        desk = self._at_desk()
        return shown_order(desk.order(order_id), desk.records)

    @tool(annotations=_READS)
    def search_products(self, text: Short) -> list[dict[str, Any]]:
        """Find products by a part of their name or by their category."""
        wanted, records = text.strip().casefold(), self._at_desk().records
        found = [
            one
            for one in records.products.values()
            if wanted in one.name.casefold() or wanted == one.category
        ]
        return [shown_product(one, records) for one in found[:MOST_FOUND]]

    @tool(annotations=_READS)
    def get_product(self, product_id: Id) -> dict[str, Any]:
        """Look up a product: category, whether it is final sale, variants with their prices."""
        records = self._at_desk().records
        product = records.products.get(product_id.strip().upper())
        if product is None:
            raise ToolFailedError(f"expected the id of a product that there is, got {product_id!r}")
        return shown_product(product, records)

    @tool(annotations=_READS)
    def check_stock(self, sku: Id) -> dict[str, Any]:
        """Tell how many of a variant are in stock."""
        variant = self._at_desk().variant(sku)
        return {"sku": variant.sku, "in_stock": variant.stock}

    @tool(annotations=_READS)
    def get_coupon(self, code: Id) -> dict[str, Any]:
        """Look up a coupon."""
        coupon = self._at_desk().records.coupons.get(code.strip().upper())
        if coupon is None:
            raise ToolFailedError(f"expected the code of a coupon that there is, got {code!r}")
        return shown_coupon(coupon)

    @tool
    def return_items(
        self,
        order_id: Id,
        lines: Annotated[
            list[int], Field(min_length=1, max_length=20, description="numbers of the order's lines")
        ],
        reason: Why,
    ) -> dict[str, Any]:
        """Take lines of an order back. This gives no money back: issue_refund does."""
        desk = self._at_desk()
        returned = desk.return_items(order_id, lines, reason)
        return {"returned": [line.number for line in returned]}

    @tool
    def exchange_item(self, order_id: Id, line: int, new_sku: Id) -> dict[str, Any]:
        """Exchange a line of an order for another variant. A difference in price is yours to refund or to charge."""
        desk = self._at_desk()
        exchanged = desk.exchange(order_id, line, new_sku)
        return {"line": exchanged.number, "sku": exchanged.sku, "quantity": exchanged.quantity}

    @tool
    def cancel_order(self, order_id: Id) -> dict[str, Any]:
        """Cancel an order. This gives no money back: issue_refund does."""
        order = self._at_desk().cancel(order_id)
        return {"order_id": order.id, "status": order.status}

    @tool
    def change_address(self, order_id: Id, street: Short, postcode: Short, city: Short) -> dict[str, Any]:
        """Send an order to another address."""
        desk = self._at_desk()
        order = desk.change_address(order_id, PostalAddress(street, postcode, city))
        return {"order_id": order.id, "address": shown_order(order, desk.records)["address"]}

    @tool
    def apply_coupon(self, order_id: Id, code: Id) -> dict[str, Any]:
        """Put a coupon on an order; the discount is taken off by itself."""
        order = self._at_desk().apply_coupon(order_id, code)
        return {"order_id": order.id, "discount": euros(order.discount)}

    @tool
    def issue_refund(self, order_id: Id, amount: Euros, method: Short) -> dict[str, Any]:
        """Give money back for an order, by a payment method or as store_credit."""
        order = self._at_desk().refund(order_id, amount, method)
        return {
            "order_id": order.id,
            "refunds": {name: euros(cents) for name, cents in order.refunds.items()},
        }

    @tool
    def charge_customer(self, order_id: Id, amount: Euros, method: Short) -> dict[str, Any]:
        """Take more money for an order, by a payment method."""
        order = self._at_desk().charge(order_id, amount, method)
        return {
            "order_id": order.id,
            "charges": {name: euros(cents) for name, cents in order.charges.items()},
        }

    @tool
    def give_credit(self, order_id: Id, amount: Euros) -> dict[str, Any]:
        """Give store credit for the late delivery of an order."""
        order = self._at_desk().give_credit(order_id, amount)
        return {"order_id": order.id, "late_credit": euros(order.credit)}

    @tool
    def escalate(self, order_id: Id, reason: Literal["over_limit", "other"]) -> str:
        """Hand an order to a supervisor."""
        self._at_desk().escalate(order_id, reason)
        return "handed on"

    @tool
    def add_note(self, customer_id: Id, kind: NoteKind, text: Long) -> str:
        """Put a note on an account."""
        self._at_desk().add_note(customer_id, kind)
        return "noted"

    @tool
    def reply(
        self,
        request: int,
        decision: Decision,
        ground: Ground = "none",
        amount: Annotated[float, Field(ge=-100_000, le=100_000)] = 0.0,
        message: Long = "",
    ) -> str:
        """Answer a request. The last answer to a request is the one that counts.

        Args:
            request: Its number.
            decision: What became of it.
            ground: Why it was not done, or not wholly.
            amount: What the customer gets back by it, or asked for, in euros; negative where they pay.
            message: What to tell the customer beside that, in words.
        """
        self._at_desk().reply(request, decision, ground, amount)
        return "told"

    @tool
    def finish(self) -> str:
        """End the conversation. Do this last, when each request is answered."""
        self._finished = True
        return "The conversation is over."

    def _asked(self) -> ShopTaskSpec:
        if self._task is None:
            raise EpisodeOverError(
                "expected reset() before the task is asked for, got none; call reset() first"
            )
        return self._task

    def _at_desk(self) -> Desk:
        if self._desk is None:
            raise EpisodeOverError("expected reset() before the first call, got a call; call reset() first")
        return self._desk
