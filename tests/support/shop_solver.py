"""A rule-based policy that parses requests and policies, calls tools, and earns nearly the full reward."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import Any, Final

from tool_policies import Call, SolverError, ToolUser

from envs.shop_env.world.cases import Kind
from envs.shop_env.world.speech import BY_NUMBER, BY_PRODUCT, OF_MINE, PHRASINGS

_SLOT: Final = re.compile(r"\{([A-Z]+)\}")
_OTHER_METHOD: Final = re.compile(r" Please put the money on my \S+, not on what I paid with\.$")


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A parsed request, with the details that the customer mentioned."""

    number: int
    kind: Kind
    order: str | None
    products: tuple[str, ...]
    option: str | None
    code: str | None


def parse_requests(task: str) -> list[ParsedRequest]:
    """Parse the requests in a task.

    Raises:
        SolverError: A request has an unknown form.
    """
    return [
        _parse_request(int(number), text)
        for number, text in re.findall(r"^Request (\d+): (.+)$", task, re.MULTILINE)
    ]


def _policy_numbers(text: str, pattern: str) -> tuple[int, ...]:
    """Return the numbers in a policy's text that match the groups of a pattern."""
    if (match := re.search(pattern, text)) is None:
        raise SolverError(f"expected a policy like {pattern!r}, got {text!r}")
    return tuple(int(number) for number in match.groups())


def _parse_request(number: int, text: str) -> ParsedRequest:
    text = _OTHER_METHOD.sub("", text)
    for kind, pattern in _compile_patterns():
        if (match := pattern.fullmatch(text)) is not None:
            return _make_request(number, kind, match.groupdict())
    raise SolverError(f"expected a request of a known form, got {text!r}")


def _make_request(number: int, kind: Kind, slots: Mapping[str, str]) -> ParsedRequest:
    order = re.fullmatch(r"order (O\d+)", slots["REF"], re.IGNORECASE)
    by_product = re.fullmatch(r"the order with the (.+)", slots["REF"], re.IGNORECASE)
    products: tuple[str, ...] = tuple(by_product.groups()) if by_product else ()
    if "THINGS" in slots:
        products = tuple(slots["THINGS"].split(" and the "))
    elif "PRODUCT" in slots:
        products = (slots["PRODUCT"],)
    return ParsedRequest(
        number, kind, order[1].upper() if order else None, products, slots.get("OPTION"), slots.get("CODE")
    )


@cache
def _compile_patterns() -> tuple[tuple[Kind, "re.Pattern[str]"], ...]:
    refs = "|".join(
        _SLOT.sub(".+?", ref.replace("{ORDER}", "{O}")) for ref in (BY_NUMBER, BY_PRODUCT, OF_MINE)
    )
    patterns = []
    for kind, phrasings in PHRASINGS.items():
        for phrasing in phrasings:
            parts = _SLOT.split(phrasing)
            regex = "".join(
                (f"(?P<{piece}>{refs})" if piece == "REF" else f"(?P<{piece}>.+?)")
                if index % 2
                else re.escape(piece)
                for index, piece in enumerate(parts)
            )
            # Ignore case: a sentence may begin with the reference to the order.
            patterns.append((kind, re.compile(regex, re.IGNORECASE)))
    return tuple(patterns)


_FACTS: Final = {
    "email": r"My email address is (.+)\.",
    "postcode": r"The postcode is (.+)\.",
    "phone": r"My phone number is (.+)\.",
}
_FAULTY: Final = {
    "broken": "damaged",
    "damaged": "damaged",
    "not what I ordered": "wrong_item",
    "else than": "wrong_item",
}


class DeskUser(ToolUser):
    """The tools of one conversation, with cached lookups."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._policies: dict[str, str] = {}
        self._products: dict[str, dict[str, Any]] = {}

    def get_policy(self, topic: str) -> str:
        """Return a policy's text, cached."""
        if topic not in self._policies:
            self._policies[topic] = self.use("get_policy", topic=topic)["text"]
        return self._policies[topic]

    def product(self, product_id: str) -> dict[str, Any]:
        """Return a product, cached."""
        if product_id not in self._products:
            self._products[product_id] = self.use("get_product", product_id=product_id)
        return self._products[product_id]

    def ask(self, topic: str, request: int = 1) -> str:
        """Ask the customer about a topic."""
        answer: str = self.use("ask_customer", topic=topic, request=request)
        return answer

    def collect_facts(self, count: int) -> dict[str, str]:
        """Ask for identifying facts until `count` of them are known."""
        answers: dict[str, str] = {}
        for topic, pattern in _FACTS.items():
            if len(answers) < count and (match := re.fullmatch(pattern, self.ask(topic))):
                answers[topic] = match[1]
        return answers

    def reason(self, request: int) -> str:
        """Ask for the reason of a return."""
        answer = self.ask("reason", request)
        return next((reason for word, reason in _FAULTY.items() if word in answer), "changed_mind")

    def prefers_refund(self, request: int) -> bool:
        """Ask for the fallback; return whether the customer prefers a refund to keeping the item."""
        answer = self.ask("fallback", request)
        return "money back" in answer or "refund" in answer

    def ask_address(self, request: int) -> dict[str, str]:
        """Ask for the new address."""
        answer = self.ask("address", request)
        if (match := re.fullmatch(r"Please send it to (.+), (\S+) (\S+)\.", answer)) is None:
            raise SolverError(f"expected an address, got {answer!r}")
        return dict(zip(("street", "postcode", "city"), match.groups(), strict=True))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The reply to a request."""

    decision: str
    ground: str = "none"
    cents: int = 0


class _Handler:
    """Handles the requests of a verified customer."""

    def __init__(self, desk: DeskUser, account: dict[str, Any], today: date) -> None:
        self._desk = desk
        self._gold = account["tier"] == "gold"
        self._today = today

    def handle(self, request: ParsedRequest, order_id: str | None) -> Outcome:
        """Do what the policies require, and return the reply."""
        if order_id is None:
            return Outcome("refused", "not_your_order")
        order = self._desk.use("get_order", order_id=order_id)
        match request.kind:
            case "return":
                return self._return(request, order)
            case "exchange":
                return self._exchange(request, order)
            case "cancel":
                return self._cancel(order)
            case "address":
                return self._change_address(request, order)
            case "coupon":
                return self._apply_coupon(request, order)
            case "late":
                return self._give_late_credit(order)
            case "total":
                return Outcome("done", cents=_paid(order))

    def _return(self, request: ParsedRequest, order: dict[str, Any]) -> Outcome:
        lines = [line for line in order["lines"] if line["product"] in request.products]
        if order["status"] != "delivered":
            return Outcome("refused", "not_delivered")
        if all(line["returned"] for line in lines):
            return Outcome("refused", "already_done")
        reason = self._desk.reason(request.number)
        grounds = [self._find_refusal(line, order, reason) for line in lines]
        accepted_lines = [line for line, ground in zip(lines, grounds, strict=True) if ground is None]
        against = next((ground for ground in grounds if ground), None)
        if not accepted_lines:
            return Outcome("refused", against or "none")
        cents = self._send_back(order, accepted_lines, reason)
        if cents > self._refund_limit:
            self._desk.use("escalate", order_id=order["order_id"], reason="over_limit")
            return Outcome("escalated", "over_limit")
        self._refund(order, cents)
        return Outcome("partly" if against else "done", against or "none", cents)

    def _find_refusal(self, line: dict[str, Any], order: dict[str, Any], reason: str) -> str | None:
        text, age = self._desk.get_policy("returns"), self._days_since_delivery(order)
        if line["returned"]:
            return "already_done"
        if reason != "changed_mind":
            (days,) = _policy_numbers(text, r"can be sent back within (\d+) days, whatever it is")
            return "window_over" if age > days else None
        product = self._desk.product(line["product_id"])
        if product["final_sale"]:
            return "final_sale"
        usual, electronics, more = _policy_numbers(
            text, r"within (\d+) days of delivery, electronics within (\d+) days.* gold have (\d+) days more"
        )
        days = electronics if product["category"] == "electronics" else usual
        return "window_over" if age > days + more * self._gold else None

    def _send_back(self, order: dict[str, Any], lines: list[dict[str, Any]], reason: str) -> int:
        """Return lines of an order, and return their refund in cents."""
        numbers = [line["line"] for line in lines]
        self._desk.use("return_items", order_id=order["order_id"], lines=numbers, reason=reason)
        (fee_percent,) = _policy_numbers(
            self._desk.get_policy("returns"), r"changed their mind, (\d+) percent of the price is kept"
        )
        cents = 0
        for line in lines:
            price = _cents(line["unit_price"]) * line["quantity"]
            furniture = (
                reason == "changed_mind" and self._desk.product(line["product_id"])["category"] == "furniture"
            )
            cents += price * (100 - fee_percent) // 100 if furniture else price
        return cents

    def _exchange(self, request: ParsedRequest, order: dict[str, Any]) -> Outcome:
        (line,) = [line for line in order["lines"] if line["product"] in request.products]
        (days,) = _policy_numbers(
            self._desk.get_policy("exchanges"), r"exchanged within (\d+) days of delivery"
        )
        if self._days_since_delivery(order) > days:
            return Outcome("refused", "window_over")
        product = self._desk.product(line["product_id"])
        if product["final_sale"]:
            return Outcome("refused", "final_sale")
        (new,) = [variant for variant in product["variants"] if variant["option"] == request.option]
        if self._desk.use("check_stock", sku=new["sku"])["in_stock"] < line["quantity"]:
            money = self._desk.prefers_refund(request.number)
            if not money or self._find_refusal(line, order, "changed_mind"):
                return Outcome("refused", "out_of_stock")
            cents = self._send_back(order, [line], "changed_mind")
            self._refund(order, cents)
            return Outcome("partly", "out_of_stock", cents)
        self._desk.use("exchange_item", order_id=order["order_id"], line=line["line"], new_sku=new["sku"])
        difference = (_cents(line["unit_price"]) - _cents(new["price"])) * line["quantity"]
        if difference > 0:
            self._refund(order, difference)
        elif difference < 0:
            method = order["payment_method"]
            self._desk.use(
                "charge_customer", order_id=order["order_id"], amount=-difference / 100, method=method
            )
        return Outcome("done", cents=difference)

    def _cancel(self, order: dict[str, Any]) -> Outcome:
        if not self._is_allowed(order, self._desk.get_policy("cancellations")):
            return Outcome("refused", "too_late")
        limit, cents = self._refund_limit, _paid(order)
        self._desk.use("cancel_order", order_id=order["order_id"])
        if cents > limit:
            self._desk.use("escalate", order_id=order["order_id"], reason="over_limit")
            return Outcome("escalated", "over_limit")
        self._refund(order, cents)
        return Outcome("done", cents=cents)

    def _change_address(self, request: ParsedRequest, order: dict[str, Any]) -> Outcome:
        if not self._is_allowed(order, self._desk.get_policy("addresses")):
            return Outcome("refused", "too_late")
        address = self._desk.ask_address(request.number)
        if address["street"].startswith("PO Box"):
            return Outcome("refused", "bad_address")
        self._desk.use("change_address", order_id=order["order_id"], **address)
        return Outcome("done")

    def _apply_coupon(self, request: ParsedRequest, order: dict[str, Any]) -> Outcome:
        self._desk.get_policy("coupons")
        if order["coupon"] is not None:
            return Outcome("refused", "coupon_used")
        coupon = self._desk.use("get_coupon", code=request.code)
        if date.fromisoformat(coupon["last_day"]) < self._today:
            return Outcome("refused", "expired")
        if _cents(order["items_total"]) < _cents(coupon["minimum"]):
            return Outcome("refused", "below_minimum")
        if order["status"] != "pending":
            return Outcome("refused", "too_late")
        reply = self._desk.use("apply_coupon", order_id=order["order_id"], code=coupon["code"])
        return Outcome("done", cents=_cents(reply["discount"]))

    def _give_late_credit(self, order: dict[str, Any]) -> Outcome:
        days, basic, gold = _policy_numbers(
            self._desk.get_policy("late_delivery"),
            r"delivered (\d+) or more days.* of (\d+) euros for it, or (\d+) euros",
        )
        delay = date.fromisoformat(order["delivered"]) - date.fromisoformat(order["promised"])
        if delay.days < days:
            return Outcome("refused", "not_late")
        if order["late_credit"]:
            return Outcome("refused", "already_done")
        amount = gold if self._gold else basic
        self._desk.use("give_credit", order_id=order["order_id"], amount=amount)
        return Outcome("done", cents=amount * 100)

    @property
    def _refund_limit(self) -> int:
        (euros,) = _policy_numbers(self._desk.get_policy("refunds"), r"more than (\d+) euros for one request")
        return euros * 100

    def _refund(self, order: dict[str, Any], cents: int) -> None:
        self._desk.get_policy("refunds")
        method = order["payment_method"]
        method = "store_credit" if method == "gift_card" else method
        self._desk.use("issue_refund", order_id=order["order_id"], amount=cents / 100, method=method)

    def _days_since_delivery(self, order: dict[str, Any]) -> int:
        return (self._today - date.fromisoformat(order["delivered"])).days

    def _is_allowed(self, order: dict[str, Any], policy: str) -> bool:
        """Return whether a policy of the form 'while its status is ...' allows a change of the order."""
        allowed = policy.partition("while its status is ")[2].partition(",")[0].partition(";")[0]
        return order["status"] in allowed.split(" or ")


def _cents(euros: float) -> int:
    return round(euros * 100)


def _paid(order: dict[str, Any]) -> int:
    return _cents(order["items_total"]) + _cents(order["shipping_fee"]) - _cents(order["discount"])


def solve(task: str, call: Call) -> float:
    """Solve a task through the tools, and return the total reward."""
    desk = DeskUser(call)
    if (match := re.search(r"today is (\d{4}-\d\d-\d\d)", task)) is None:
        raise SolverError("expected the day in the task")
    requests = parse_requests(task)
    desk.get_policy("identity")
    candidates = desk.use("find_customer", name=ask_name(desk))
    account = _find_verified(desk, candidates)
    if account is None:
        for candidate in candidates:
            text = "could not be verified"
            desk.use("add_note", customer_id=candidate["customer_id"], kind="suspicious", text=text)
        outcomes = [Outcome("refused", "not_verified") for _ in requests]
    else:
        handler = _Handler(desk, account, date.fromisoformat(match[1]))
        outcomes = [handler.handle(request, _order_of(desk, request, account)) for request in requests]
    for request, outcome in zip(requests, outcomes, strict=True):
        desk.use(
            "reply",
            request=request.number,
            decision=outcome.decision,
            ground=outcome.ground,
            amount=outcome.cents / 100,
        )
    desk.use("finish")
    return desk.total


def ask_name(desk: DeskUser) -> str:
    """Ask for the customer's name."""
    return desk.ask("name").removeprefix("My name is ").removesuffix(".")


def _find_verified(desk: DeskUser, candidates: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the customer's account; None if no account of that name could be verified."""
    facts = desk.collect_facts(2)
    if len(facts) < 2:
        return None
    for candidate in candidates:
        if desk.use("verify_identity", customer_id=candidate["customer_id"], **facts)["verified"]:
            account: dict[str, Any] = desk.use("get_customer", customer_id=candidate["customer_id"])
            return account
    return None


def _order_of(desk: DeskUser, request: ParsedRequest, account: dict[str, Any]) -> str | None:
    """Return the id of the order that a request refers to; None if it is not one of this customer's."""
    own_orders = {order["order_id"]: order["products"] for order in account["orders"]}
    if request.order is not None:
        return request.order if request.order in own_orders else None
    candidates: list[str] = [
        order for order, products in own_orders.items() if set(request.products) <= set(products)
    ]
    if len(candidates) == 1:
        return candidates[0]
    match = re.search(r"O\d+", desk.ask("order", request.number))
    number = match[0] if match else ""
    return number if number in own_orders else None
