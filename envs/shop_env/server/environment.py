"""The environment: a conversation at the customer desk, scored by the changes to the shop's records.

The tools perform any possible action, right or wrong: a refund that a policy forbids goes through. They reject only
what is impossible: missing records, unverified accounts, refunding more than was paid.
"""

from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from pydantic import Field

from openenv_core.tools import ToolFailedError, tool
from openenv_core.worlds import Level, ToolWorld

from ..models import ShopObservation, ShopState
from ..tasks import CALLS, ShopTaskSpec, make_task
from ..world.records import (
    OPEN_STATUSES,
    STORE_CREDIT,
    Customer,
    CustomerTopic,
    Decision,
    Ground,
    Line,
    NoteKind,
    Order,
    PostalAddress,
    ProductVariant,
    Records,
    ReturnReason,
    Topic,
)
from ..world.rules import DeskReply, ExpectedOutcome, Fact, collect_facts, determine_outcomes, judge
from ..world.speech import answer_question, show_coupon, show_customer, show_order, show_product, to_euros

MAX_TRIES: Final = 5
"""The number of failed verifications in a conversation after which no further one is possible."""

MAX_CREDIT: Final = 10_000
"""The maximum late-delivery credit of an order, in cents."""

MAX_FOUND: Final = 10

Id: TypeAlias = Annotated[str, Field(max_length=40)]
Short: TypeAlias = Annotated[str, Field(max_length=200)]
Long: TypeAlias = Annotated[str, Field(max_length=2_000)]
Euros: TypeAlias = Annotated[float, Field(gt=0, le=100_000, description="in euros")]
Lines: TypeAlias = Annotated[
    list[int], Field(min_length=1, max_length=20, description="numbers of the order's lines")
]

T = TypeVar("T")

_READ_ONLY: Final = {"readOnlyHint": True, "openWorldHint": False}


class ShopEnvironment(ToolWorld[ShopTaskSpec, ShopState]):
    """The customer desk of a shop with written policies. A customer has one to three requests.

    The task determines the shop, the figures in its policies, and the customer's requests and answers. At the end, the
    records are compared with the expected ones, which are computed from the initial records and the policies before the
    first call, and which callers cannot see.
    """

    NAME = "shop"
    ABOUT = "The customer desk of a shop: requests to be handled by written policies."
    CALLS = CALLS

    def make_task(self, number: int, *, held_out: bool, level: Level | None = None) -> ShopTaskSpec:
        """Generate the task of a number."""
        return make_task(number, held_out=held_out, level=level)

    def begin_task(self, task: ShopTaskSpec, calls: int) -> ShopObservation:
        """Start the conversation, and return the task as the observation of the reset."""
        scenario = task.scenario
        self._initial_facts: dict[Fact, Any] = collect_facts(scenario.records)
        self._expected_outcomes: tuple[ExpectedOutcome, ...] = determine_outcomes(scenario)
        self._replies: dict[int, DeskReply] = {}
        self._verified_customers: set[str] = set()
        self._failed_tries = 0
        return ShopObservation(
            task=task.text(calls),
            requests=len(scenario.requests),
            difficulty=task.level.value,
            calls_left=calls,
        )

    def earned(self) -> float:
        """Return the reward of the conversation."""
        return judge(
            self._expected_outcomes, self._replies, self._initial_facts, collect_facts(self._records)
        ).reward

    # The tools. Their signatures and docstrings become the schemas and descriptions that the policy sees.

    @tool(annotations=_READ_ONLY)
    def get_policy(self, topic: Topic) -> dict[str, str]:
        """Read the policy on a topic."""
        return {"topic": topic, "text": self._current().scenario.policy.text(topic)}

    @tool(annotations=_READ_ONLY)
    def ask_customer(self, topic: CustomerTopic, request: int = 1) -> str:
        """Ask the customer about something.

        Args:
            topic: What to ask about; "fallback" is what they want where the first wish cannot be granted.
            request: The number of the request that it is about.
        """
        self._require_request(request)
        return answer_question(self._current().scenario, topic, request)

    @tool(annotations=_READ_ONLY)
    def find_customer(self, name: Short) -> list[dict[str, str]]:
        """Find accounts by the name of the customer, or a part of it."""
        search_text = _fold(name)
        customers = [
            customer
            for customer in self._records.customers.values()
            if search_text and search_text in _fold(customer.name)
        ]
        return [{"customer_id": customer.id, "name": customer.name} for customer in customers[:MAX_FOUND]]

    @tool
    def verify_identity(
        self,
        customer_id: Id,
        email: Short | None = None,
        postcode: Short | None = None,
        phone: Short | None = None,
    ) -> dict[str, bool]:
        """Compare what the customer told with an account. Give two of the three or more; all given must be right."""
        customer = self._require_customer(customer_id)
        if self._failed_tries >= MAX_TRIES:
            raise ToolFailedError(
                f"expected at most {MAX_TRIES} wrong tries in one conversation, got another; nobody is verified now"
            )
        pairs = ((email, customer.email), (postcode, customer.postcode), (phone, customer.phone))
        matches = [
            _remove_spaces(answer) == _remove_spaces(known) for answer, known in pairs if answer is not None
        ]
        if verified := len(matches) >= 2 and all(matches):
            self._verified_customers.add(customer.id)
        else:
            self._failed_tries += 1
        return {"verified": verified}

    @tool(annotations=_READ_ONLY)
    def get_customer(self, customer_id: Id) -> dict[str, Any]:
        """Look up an account that was verified, with a list of its orders."""
        customer = self._require_customer(customer_id)
        if customer.id not in self._verified_customers:
            raise ToolFailedError(f"expected verify_identity of {customer.id} first, got none that was right")
        orders = [order for order in self._records.orders.values() if order.customer_id == customer.id]
        orders.sort(key=lambda order: (order.placed, order.id))
        return show_customer(customer, orders, self._records)

    @tool(annotations=_READ_ONLY)
    def get_order(self, order_id: Id) -> dict[str, Any]:
        """Look up an order of a customer who was verified."""
        return show_order(self._require_order(order_id), self._records)

    @tool(annotations=_READ_ONLY)
    def search_products(self, text: Short) -> list[dict[str, Any]]:
        """Find products by a part of their name or by their category."""
        search_text, records = text.strip().casefold(), self._records
        products = [
            product
            for product in records.products.values()
            if search_text in product.name.casefold() or search_text == product.category
        ]
        return [show_product(product, records) for product in products[:MAX_FOUND]]

    @tool(annotations=_READ_ONLY)
    def get_product(self, product_id: Id) -> dict[str, Any]:
        """Look up a product: category, whether it is final sale, variants with their prices."""
        return show_product(_require(self._records.products, product_id, "id of a product"), self._records)

    @tool(annotations=_READ_ONLY)
    def check_stock(self, sku: Id) -> dict[str, Any]:
        """Tell how many of a variant are in stock."""
        variant = self._require_variant(sku)
        return {"sku": variant.sku, "in_stock": variant.stock}

    @tool(annotations=_READ_ONLY)
    def get_coupon(self, code: Id) -> dict[str, Any]:
        """Look up a coupon."""
        return show_coupon(_require(self._records.coupons, code, "code of a coupon"))

    @tool
    def return_items(self, order_id: Id, lines: Lines, reason: ReturnReason) -> dict[str, Any]:
        """Take lines of an order back. This gives no money back: issue_refund does."""
        order = self._require_order(order_id)
        if len(set(lines)) != len(lines):
            raise ToolFailedError(f"expected the numbers of lines, each once, got {lines}")
        returned_lines = [_require_line(order, number) for number in lines]
        _require_delivered(order)
        for line in returned_lines:
            line.returned = True
            if reason != "damaged":
                self._records.variants[line.sku].stock += line.quantity
        return {"returned": lines}

    @tool
    def exchange_item(self, order_id: Id, line: int, new_sku: Id) -> dict[str, Any]:
        """Exchange a line of an order for another variant. A difference in price is yours to refund or to charge."""
        order = self._require_order(order_id)
        item, new = _require_line(order, line), self._require_variant(new_sku)
        _require_delivered(order)
        old = self._records.variants[item.sku]
        if new.product_id != old.product_id or new.sku == old.sku:
            raise ToolFailedError(f"expected another variant of {old.product_id}, got {new.sku}")
        if new.stock < item.quantity:
            raise ToolFailedError(f"expected {item.quantity} of {new.sku} in stock, got {new.stock}")
        old.stock += item.quantity
        new.stock -= item.quantity
        item.sku = new.sku
        return {"line": item.number, "sku": item.sku, "quantity": item.quantity}

    @tool
    def cancel_order(self, order_id: Id) -> dict[str, Any]:
        """Cancel an order. This gives no money back: issue_refund does."""
        order = self._require_open_order(order_id)
        order.status = "cancelled"
        for line in order.lines:
            self._records.variants[line.sku].stock += line.quantity
        return {"order_id": order.id, "status": order.status}

    @tool
    def change_address(self, order_id: Id, street: Short, postcode: Short, city: Short) -> dict[str, Any]:
        """Send an order to another address."""
        order = self._require_open_order(order_id)
        if not all(field.strip() for field in (street, postcode, city)):
            raise ToolFailedError("expected a street, a postcode and a city, got one that is empty")
        order.address = PostalAddress(street, postcode, city)
        return {"order_id": order.id, "address": show_order(order, self._records)["address"]}

    @tool
    def apply_coupon(self, order_id: Id, code: Id) -> dict[str, Any]:
        """Put a coupon on an order; the discount is taken off by itself."""
        order = self._require_open_order(order_id)
        coupon = _require(self._records.coupons, code, "id of a coupon")
        if order.coupon is not None:
            raise ToolFailedError(f"expected an order without a coupon, {order.id} has {order.coupon}")
        order.coupon = coupon.code
        order.discount = order.items_total * coupon.percent // 100
        return {"order_id": order.id, "discount": to_euros(order.discount)}

    @tool
    def issue_refund(self, order_id: Id, amount: Euros, method: Short) -> dict[str, Any]:
        """Give money back for an order, by a payment method or as store_credit."""
        order, cents = self._require_order(order_id), _cents(amount)
        self._require_method(order, method)
        refundable = order.paid + sum(order.charges.values()) - sum(order.refunds.values())
        if cents > refundable:
            raise ToolFailedError(
                f"expected at most {refundable / 100:.2f} euros, which is left of {order.id}, got {cents / 100:.2f}"
            )
        return {"order_id": order.id, "refunds": _add(order.refunds, method, cents)}

    @tool
    def charge_customer(self, order_id: Id, amount: Euros, method: Short) -> dict[str, Any]:
        """Take more money for an order, by a payment method."""
        order, cents = self._require_order(order_id), _cents(amount)
        self._require_method(order, method)
        return {"order_id": order.id, "charges": _add(order.charges, method, cents)}

    @tool
    def give_credit(self, order_id: Id, amount: Euros) -> dict[str, Any]:
        """Give store credit for the late delivery of an order."""
        order, cents = self._require_order(order_id), _cents(amount)
        if order.credit + cents > MAX_CREDIT:
            raise ToolFailedError(f"expected at most {MAX_CREDIT // 100} euros of credit for an order")
        order.credit += cents
        return {"order_id": order.id, "late_credit": to_euros(order.credit)}

    @tool
    def escalate(self, order_id: Id, reason: Literal["over_limit", "other"]) -> str:
        """Hand an order to a supervisor."""
        self._require_order(order_id).escalations.add(reason)
        return "handed on"

    @tool
    def add_note(self, customer_id: Id, kind: NoteKind, text: Long) -> str:
        """Put a note on an account."""
        customer = self._require_customer(customer_id)
        if kind != "other":
            customer.notes.add(kind)
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
        self._require_request(request)
        # Any other ground would reveal something about an account, and "done" would claim a change to it.
        if not self._verified_customers and (decision, ground) != ("refused", "not_verified"):
            raise ToolFailedError(
                "expected verify_identity to be right before anything else than ('refused', 'not_verified') is told, "
                f"got ({decision!r}, {ground!r})"
            )
        self._replies[request] = DeskReply(decision, ground, round(amount * 100))
        return "told"

    @tool
    def finish(self) -> str:
        """End the conversation. Do this last, when each request is answered."""
        self._finished = True
        return "The conversation is over."

    @property
    def _records(self) -> Records:
        return self._current().scenario.records

    def _require_customer(self, customer_id: str) -> Customer:
        return _require(self._records.customers, customer_id, "id of a customer")

    def _require_variant(self, sku: str) -> ProductVariant:
        return _require(self._records.variants, sku, "id of a variant (sku)")

    def _require_order(self, order_id: str) -> Order:
        """Return an order of a verified customer.

        Raises:
            ToolFailedError: There is no such order, or its customer is not verified.
        """
        order = _require(self._records.orders, order_id, "id of an order")
        if order.customer_id not in self._verified_customers:
            raise ToolFailedError(f"expected an order of a verified customer, got {order.id}")
        return order

    def _require_open_order(self, order_id: str) -> Order:
        order = self._require_order(order_id)
        if order.status not in OPEN_STATUSES:
            raise ToolFailedError(
                f"expected an order that has not left ({', '.join(OPEN_STATUSES)}), got {order.id}, {order.status}"
            )
        return order

    def _require_request(self, request: int) -> None:
        count = len(self._current().scenario.requests)
        if not 1 <= request <= count:
            raise ToolFailedError(f"expected the number of a request, 1 to {count}, got {request}")

    def _require_method(self, order: Order, method: str) -> None:
        known = {order.payment, STORE_CREDIT, *self._records.customers[order.customer_id].methods}
        if method not in known:
            raise ToolFailedError(f"expected one of {', '.join(sorted(known))}, got {method!r:.40}")


def _require_delivered(order: Order) -> None:
    if order.status != "delivered":
        raise ToolFailedError(f"expected an order that was delivered, got {order.id}, {order.status}")


def _require_line(order: Order, number: int) -> Line:
    """Return a line of an order.

    Raises:
        ToolFailedError: There is no such line, or it has been returned.
    """
    item = next((line for line in order.lines if line.number == number), None)
    if item is None:
        raise ToolFailedError(f"expected a line of {order.id}, 1 to {len(order.lines)}, got {number}")
    if item.returned:
        raise ToolFailedError(f"expected a line that was not sent back, got {number} of {order.id}")
    return item


def _require(records: dict[str, T], key: str, kind: str) -> T:
    record = records.get(key.strip().upper())
    if record is None:
        raise ToolFailedError(f"expected the {kind} that there is, got {key!r:.40}")
    return record


def _add(amounts: dict[str, int], method: str, cents: int) -> dict[str, float]:
    """Add cents to the amount of a payment method, and return all amounts in euros."""
    amounts[method] = amounts.get(method, 0) + cents
    return {name: to_euros(amount) for name, amount in amounts.items()}


def _cents(amount: float) -> int:
    cents = round(amount * 100)
    if cents == 0 or abs(cents - amount * 100) > 1e-6 * max(1.0, cents):
        raise ToolFailedError(f"expected an amount in euros with at most two decimals, got {amount!r:.40}")
    return cents


def _fold(text: str) -> str:
    return " ".join(text.split()).casefold()


def _remove_spaces(text: str) -> str:
    return "".join(text.split()).casefold()
