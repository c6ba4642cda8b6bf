"""The expected outcomes of requests, computed without the tools, and the scoring of a conversation against them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from .cases import CustomerRequest, Scenario
from .policy import ShopPolicy
from .records import GIFT_CARD, STORE_CREDIT, Customer, Decision, Ground, Line, Records

Fact: TypeAlias = tuple[str | int, ...]
"""The key of a fact about the records: `("stock", sku)`, `("line", order, number, "returned")`, ..."""


Changes: TypeAlias = dict[Fact, Any]


def collect_facts(records: Records) -> Changes:
    """Return all facts that tools can change, omitting empty values such as a zero discount."""
    return dict(_iter_facts(records))


def find_changes(before: Changes, after: Changes) -> Changes:
    """Return the changed facts with their new values; None for facts that no longer exist."""
    keys = [*before, *(fact for fact in after if fact not in before)]
    return {fact: after.get(fact) for fact in keys if before.get(fact) != after.get(fact)}


def _iter_facts(records: Records) -> Iterator[tuple[Fact, Any]]:
    for sku, variant in records.variants.items():
        yield ("stock", sku), variant.stock
    for customer in records.customers.values():
        for kind in customer.notes:
            yield ("note", customer.id, kind), True
    for order in records.orders.values():
        yield ("order", order.id, "status"), order.status
        yield (
            ("order", order.id, "address"),
            tuple(" ".join(field.split()).casefold() for field in order.address),
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


@dataclass(frozen=True, slots=True)
class DeskReply:
    """The reply to a request. The amount is in cents."""

    decision: Decision
    ground: Ground
    amount: int


@dataclass(frozen=True, slots=True)
class ExpectedOutcome:
    """The expected outcome of a request.

    Attributes:
        decision: the decision in the reply.
        ground: the ground in the reply.
        amount: the amount in the reply, in cents; negative if the customer pays.
        changes: the facts that must change, with their new values.
    """

    decision: Decision
    ground: Ground = "none"
    amount: int = 0
    changes: Changes = field(default_factory=dict)


def determine_outcomes(scenario: Scenario) -> tuple[ExpectedOutcome, ...]:
    """Return the expected outcome of each request."""
    if scenario.impostor:
        note: Changes = {("note", scenario.customer_id, "suspicious"): True}
        return tuple(ExpectedOutcome("refused", "not_verified", changes=note) for _ in scenario.requests)
    customer = scenario.records.customers[scenario.customer_id]
    return tuple(
        _OutcomeRules(scenario.records, scenario.policy, customer, request).determine()
        for request in scenario.requests
    )


class _OutcomeRules:
    def __init__(
        self, records: Records, policy: ShopPolicy, customer: Customer, request: CustomerRequest
    ) -> None:
        self._records = records
        self._policy = policy
        self._customer = customer
        self._request = request
        self._order = records.orders[request.order_id]
        self._lines = [line for line in self._order.lines if line.number in request.lines]

    def determine(self) -> ExpectedOutcome:
        if self._order.customer_id != self._customer.id:
            return ExpectedOutcome("refused", "not_your_order")
        match self._request.kind:
            case "return":
                return self._judge_return()
            case "exchange":
                return self._judge_exchange()
            case "cancel":
                return self._judge_cancellation()
            case "address":
                return self._judge_address_change()
            case "coupon":
                return self._judge_coupon()
            case "late":
                return self._judge_late_delivery()
            case "total":
                return ExpectedOutcome("done", amount=self._order.paid)

    def _judge_return(self) -> ExpectedOutcome:
        faulty = self._request.why != "changed_mind"
        grounds = {line.number: self._find_refusal(line, faulty) for line in self._lines}
        accepted = [line for line in self._lines if grounds[line.number] is None]
        against = next((ground for ground in grounds.values() if ground is not None), None)
        if not accepted:
            return ExpectedOutcome("refused", against or "none")
        amount = sum(self._refund_worth(line, faulty) for line in accepted)
        changes: Changes = {}
        for line in accepted:
            changes |= self._return_changes(line, restock=self._request.why != "damaged")
        if amount > self._policy.refund_limit:
            return ExpectedOutcome("escalated", "over_limit", 0, {**changes, self._escalation_fact: True})
        changes |= self._refund_change(amount)
        return ExpectedOutcome("partly" if against else "done", against or "none", amount, changes)

    def _find_refusal(self, line: Line, faulty: bool) -> Ground | None:
        if line.returned:
            return "already_done"
        if self._order.delivered is None:
            return "not_delivered"
        product, age = self._records.product_of(line.sku), self._days_since_delivery
        if faulty:
            return "window_over" if age > self._policy.faulty_days else None
        if product.final_sale:
            return "final_sale"
        window = self._policy.return_window(product.category, self._customer.tier)
        return "window_over" if age > window else None

    def _refund_worth(self, line: Line, faulty: bool) -> int:
        price = line.quantity * line.unit_price
        if faulty or self._records.product_of(line.sku).category != "furniture":
            return price
        return price - price * self._policy.restocking_percent // 100

    def _judge_exchange(self) -> ExpectedOutcome:
        (line,) = self._lines
        if self._days_since_delivery > self._policy.exchange_days:
            return ExpectedOutcome("refused", "window_over")
        if self._records.product_of(line.sku).final_sale:
            return ExpectedOutcome("refused", "final_sale")
        new = self._records.variants[self._request.new_sku or ""]
        if new.stock < line.quantity:
            if self._request.fallback == "keep" or self._find_refusal(line, False):
                return ExpectedOutcome("refused", "out_of_stock")
            amount = self._refund_worth(line, False)
            changes = self._return_changes(line, restock=True) | self._refund_change(amount)
            return ExpectedOutcome("partly", "out_of_stock", amount, changes)
        difference = (line.unit_price - new.price) * line.quantity
        old = self._records.variants[line.sku]
        changes = {
            ("line", self._order.id, line.number, "sku"): new.sku,
            ("stock", old.sku): old.stock + line.quantity,
            ("stock", new.sku): new.stock - line.quantity,
        }
        if difference > 0:
            changes |= self._refund_change(difference)
        elif difference < 0:
            method = self._order.payment
            changes["charge", self._order.id, method] = self._order.charges.get(method, 0) - difference
        return ExpectedOutcome("done", amount=difference, changes=changes)

    def _judge_cancellation(self) -> ExpectedOutcome:
        allowed = {"pending", "processing"} if self._policy.cancel_processing else {"pending"}
        if self._order.status not in allowed:
            return ExpectedOutcome("refused", "too_late")
        changes: Changes = {("order", self._order.id, "status"): "cancelled"}
        for line in self._order.lines:
            changes["stock", line.sku] = self._records.variants[line.sku].stock + line.quantity
        if self._order.paid > self._policy.refund_limit:
            return ExpectedOutcome("escalated", "over_limit", 0, {**changes, self._escalation_fact: True})
        return ExpectedOutcome(
            "done", amount=self._order.paid, changes=changes | self._refund_change(self._order.paid)
        )

    def _judge_address_change(self) -> ExpectedOutcome:
        allowed = {"pending", "processing"} if self._policy.move_processing else {"pending"}
        new = self._request.address
        if self._order.status not in allowed:
            return ExpectedOutcome("refused", "too_late")
        if new is None or new.street.startswith("PO Box"):
            return ExpectedOutcome("refused", "bad_address")
        folded_address = tuple(field.casefold() for field in new)
        return ExpectedOutcome("done", changes={("order", self._order.id, "address"): folded_address})

    def _judge_coupon(self) -> ExpectedOutcome:
        coupon = self._records.coupons[self._request.code or ""]
        if self._order.status != "pending":
            return ExpectedOutcome("refused", "too_late")
        if self._order.coupon is not None:
            return ExpectedOutcome("refused", "coupon_used")
        if coupon.expires < self._records.today:
            return ExpectedOutcome("refused", "expired")
        if self._order.items_total < coupon.minimum:
            return ExpectedOutcome("refused", "below_minimum")
        amount = self._order.items_total * coupon.percent // 100
        changes: Changes = {
            ("order", self._order.id, "coupon"): coupon.code,
            ("order", self._order.id, "discount"): amount,
        }
        return ExpectedOutcome("done", amount=amount, changes=changes)

    def _judge_late_delivery(self) -> ExpectedOutcome:
        if self._order.credit:
            return ExpectedOutcome("refused", "already_done")
        delivered = self._order.delivered
        if delivered is None or (delivered - self._order.promised).days < self._policy.late_days:
            return ExpectedOutcome("refused", "not_late")
        amount = self._policy.late_credit * (2 if self._customer.tier == "gold" else 1)
        return ExpectedOutcome("done", amount=amount, changes={("credit", self._order.id): amount})

    @property
    def _days_since_delivery(self) -> int:
        """The number of days since the delivery; 0 if it is not delivered."""
        return (self._records.today - (self._order.delivered or self._records.today)).days

    @property
    def _escalation_fact(self) -> Fact:
        return ("escalated", self._order.id, "over_limit")

    def _refund_change(self, amount: int) -> Changes:
        method = STORE_CREDIT if self._order.payment == GIFT_CARD else self._order.payment
        return {("refund", self._order.id, method): self._order.refunds.get(method, 0) + amount}

    def _return_changes(self, line: Line, *, restock: bool) -> Changes:
        changes: Changes = {("line", self._order.id, line.number, "returned"): True}
        if restock:
            changes["stock", line.sku] = self._records.variants[line.sku].stock + line.quantity
        return changes


RIGHT_PART: Final = 0.5
"""The maximum reward of an episode that is not completely right."""

WRONG_COST: Final = 0.25
"""The penalty for each wrong change."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a conversation.

    Attributes:
        right: the number of requests with the expected outcome and reply.
        requests: the number of requests.
        wrong: the number of changes that are unexpected or have the wrong value.
    """

    right: int
    requests: int
    wrong: int

    @property
    def reward(self) -> float:
        """1 if every request is right and nothing is wrong; else a share of `RIGHT_PART` less penalties, at least 0."""
        if self.right == self.requests and not self.wrong:
            return 1.0
        return max(0.0, RIGHT_PART * self.right / self.requests - WRONG_COST * self.wrong)


def judge(
    outcomes: tuple[ExpectedOutcome, ...], replies: dict[int, DeskReply], before: Changes, after: Changes
) -> Score:
    """Score the replies and the changed facts against the expected outcomes."""
    changes = find_changes(before, after)
    expected_changes: dict[Fact, Any] = {}
    for outcome in outcomes:
        expected_changes |= outcome.changes
    right = 0
    for number, outcome in enumerate(outcomes, 1):
        expected_reply = DeskReply(outcome.decision, outcome.ground, outcome.amount)
        is_as_expected = all(after.get(fact) == value for fact, value in outcome.changes.items())
        right += is_as_expected and replies.get(number) == expected_reply
    wrong = sum(
        fact not in expected_changes or expected_changes[fact] != value for fact, value in changes.items()
    )
    return Score(right, len(outcomes), wrong)
