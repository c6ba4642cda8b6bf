"""A policy by rules: reads requests and policies, calls tools, and earns nearly everything."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import Any, Final

from openenv_core.worlds import Call, SolverError, ToolUser

from .world.cases import Kind
from .world.speech import BY_NUMBER, BY_PRODUCT, OF_MINE, PHRASINGS

_SLOT: Final = re.compile(r"\{([A-Z]+)\}")
_OTHER_METHOD: Final = re.compile(r" Please put the money on my \S+, not on what I paid with\.$")


@dataclass(frozen=True, slots=True)
class Wish:
    """A request as it was understood: what was said of it."""

    number: int
    kind: Kind
    order: str | None
    products: tuple[str, ...]
    option: str | None
    code: str | None


def wishes(task: str) -> list[Wish]:
    """Read the requests in a task. SolverError: one is put in a way that is not known."""
    return [
        _wish(int(number), text) for number, text in re.findall(r"^Request (\d+): (.+)$", task, re.MULTILINE)
    ]


def _policy_numbers(text: str, pattern: str) -> tuple[int, ...]:
    """Return the numbers that a policy has where the pattern has groups."""
    if (match := re.search(pattern, text)) is None:
        raise SolverError(f"expected a policy like {pattern!r}, got {text!r}")
    return tuple(int(number) for number in match.groups())


def _wish(number: int, text: str) -> Wish:
    text = _OTHER_METHOD.sub("", text)
    for kind, pattern in _patterns():
        if (match := pattern.fullmatch(text)) is not None:
            return _read(number, kind, match.groupdict())
    raise SolverError(f"expected a request of a known form, got {text!r}")


def _read(number: int, kind: Kind, slots: Mapping[str, str]) -> Wish:
    order = re.fullmatch(r"order (O\d+)", slots["REF"], re.IGNORECASE)
    by_product = re.fullmatch(r"the order with the (.+)", slots["REF"], re.IGNORECASE)
    products: tuple[str, ...] = tuple(by_product.groups()) if by_product else ()
    if "THINGS" in slots:
        products = tuple(slots["THINGS"].split(" and the "))
    elif "PRODUCT" in slots:
        products = (slots["PRODUCT"],)
    return Wish(
        number, kind, order[1].upper() if order else None, products, slots.get("OPTION"), slots.get("CODE")
    )


@cache
def _patterns() -> tuple[tuple[Kind, "re.Pattern[str]"], ...]:
    refs = "|".join(
        _SLOT.sub(".+?", ref.replace("{ORDER}", "{O}")) for ref in (BY_NUMBER, BY_PRODUCT, OF_MINE)
    )
    patterns = []
    for kind, phrasings in PHRASINGS.items():
        for phrasing in phrasings:
            parts = _SLOT.split(phrasing)
            regex = "".join(
                (f"(?P<{piece}>{refs})" if piece == "REF" else f"(?P<{piece}>.+?)")
                if place % 2
                else re.escape(piece)
                for place, piece in enumerate(parts)
            )
            # Sentences begin with a capital, which may be that of the order.
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


class Talk(ToolUser):
    """One conversation."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._policies: dict[str, str] = {}
        self._products: dict[str, dict[str, Any]] = {}

    def policy(self, topic: str) -> str:
        """Return a policy, read once."""
        if topic not in self._policies:
            self._policies[topic] = self.use("get_policy", topic=topic)["text"]
        return self._policies[topic]

    def product(self, product_id: str) -> dict[str, Any]:
        """Return a product, looked up once."""
        if product_id not in self._products:
            self._products[product_id] = self.use("get_product", product_id=product_id)
        return self._products[product_id]

    def ask(self, topic: str, request: int = 1) -> str:
        """Ask the customer."""
        answer: str = self.use("ask_customer", topic=topic, request=request)
        return answer

    def facts(self, most: int) -> dict[str, str]:
        """Ask for what identifies somebody, until so many facts are known."""
        known: dict[str, str] = {}
        for topic, pattern in _FACTS.items():
            if len(known) < most and (match := re.fullmatch(pattern, self.ask(topic))):
                known[topic] = match[1]
        return known

    def reason(self, request: int) -> str:
        """Ask why something is sent back."""
        answer = self.ask("reason", request)
        return next((reason for mark, reason in _FAULTY.items() if mark in answer), "changed_mind")

    def wants_money(self, request: int) -> bool:
        """Ask for a fallback: the money, or what there is."""
        answer = self.ask("fallback", request)
        return "money back" in answer or "refund" in answer

    def new_address(self, request: int) -> dict[str, str]:
        """Ask for an address."""
        answer = self.ask("address", request)
        if (match := re.fullmatch(r"Please send it to (.+), (\S+) (\S+)\.", answer)) is None:
            raise SolverError(f"expected an address, got {answer!r}")
        return dict(zip(("street", "postcode", "city"), match.groups(), strict=True))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a request is answered with."""

    decision: str
    ground: str = "none"
    cents: int = 0


class _Handler:
    """Handles the requests of a customer who was verified."""

    def __init__(self, talk: Talk, account: dict[str, Any], today: date) -> None:
        self._talk = talk
        self._gold = account["tier"] == "gold"
        self._today = today

    def handle(self, wish: Wish, order_id: str | None) -> Outcome:
        """Do what is right, and return what to answer."""
        if order_id is None:
            return Outcome("refused", "not_your_order")
        order = self._talk.use("get_order", order_id=order_id)
        match wish.kind:
            case "return":
                return self._return(wish, order)
            case "exchange":
                return self._exchange(wish, order)
            case "cancel":
                return self._cancel(order)
            case "address":
                return self._address(wish, order)
            case "coupon":
                return self._coupon(wish, order)
            case "late":
                return self._late(order)
            case "total":
                return Outcome("done", cents=_paid(order))

    def _return(self, wish: Wish, order: dict[str, Any]) -> Outcome:
        lines = [line for line in order["lines"] if line["product"] in wish.products]
        if order["status"] != "delivered":
            return Outcome("refused", "not_delivered")
        if all(line["returned"] for line in lines):
            return Outcome("refused", "already_done")
        reason = self._talk.reason(wish.number)
        grounds = [self._against(line, order, reason) for line in lines]
        fine = [line for line, ground in zip(lines, grounds, strict=True) if ground is None]
        against = next((ground for ground in grounds if ground), None)
        if not fine:
            return Outcome("refused", against or "none")
        cents = self._send_back(order, fine, reason)
        if cents > self._limit:
            self._talk.use("escalate", order_id=order["order_id"], reason="over_limit")
            return Outcome("escalated", "over_limit")
        self._refund(order, cents)
        return Outcome("partly" if against else "done", against or "none", cents)

    def _against(self, line: dict[str, Any], order: dict[str, Any], reason: str) -> str | None:
        text, age = self._talk.policy("returns"), self._age(order)
        if line["returned"]:
            return "already_done"
        if reason != "changed_mind":
            (days,) = _policy_numbers(text, r"can be sent back within (\d+) days, whatever it is")
            return "window_over" if age > days else None
        product = self._talk.product(line["product_id"])
        if product["final_sale"]:
            return "final_sale"
        usual, electronics, more = _policy_numbers(
            text, r"within (\d+) days of delivery, electronics within (\d+) days.* gold have (\d+) days more"
        )
        days = electronics if product["category"] == "electronics" else usual
        return "window_over" if age > days + more * self._gold else None

    def _send_back(self, order: dict[str, Any], lines: list[dict[str, Any]], reason: str) -> int:
        """Take lines back, and return what they are worth."""
        numbers = [line["line"] for line in lines]
        self._talk.use("return_items", order_id=order["order_id"], lines=numbers, reason=reason)
        (fee_percent,) = _policy_numbers(
            self._talk.policy("returns"), r"changed their mind, (\d+) percent of the price is kept"
        )
        cents = 0
        for line in lines:
            price = _cents(line["unit_price"]) * line["quantity"]
            furniture = (
                reason == "changed_mind" and self._talk.product(line["product_id"])["category"] == "furniture"
            )
            cents += price * (100 - fee_percent) // 100 if furniture else price
        return cents

    def _exchange(self, wish: Wish, order: dict[str, Any]) -> Outcome:
        (line,) = [line for line in order["lines"] if line["product"] in wish.products]
        (days,) = _policy_numbers(self._talk.policy("exchanges"), r"exchanged within (\d+) days of delivery")
        if self._age(order) > days:
            return Outcome("refused", "window_over")
        product = self._talk.product(line["product_id"])
        if product["final_sale"]:
            return Outcome("refused", "final_sale")
        (new,) = [variant for variant in product["variants"] if variant["option"] == wish.option]
        if self._talk.use("check_stock", sku=new["sku"])["in_stock"] < line["quantity"]:
            money = self._talk.wants_money(wish.number)
            if not money or self._against(line, order, "changed_mind"):
                return Outcome("refused", "out_of_stock")
            cents = self._send_back(order, [line], "changed_mind")
            self._refund(order, cents)
            return Outcome("partly", "out_of_stock", cents)
        self._talk.use("exchange_item", order_id=order["order_id"], line=line["line"], new_sku=new["sku"])
        back = (_cents(line["unit_price"]) - _cents(new["price"])) * line["quantity"]
        if back > 0:
            self._refund(order, back)
        elif back < 0:
            method = order["payment_method"]
            self._talk.use("charge_customer", order_id=order["order_id"], amount=-back / 100, method=method)
        return Outcome("done", cents=back)

    def _cancel(self, order: dict[str, Any]) -> Outcome:
        if not self._may(order, self._talk.policy("cancellations")):
            return Outcome("refused", "too_late")
        limit, cents = self._limit, _paid(order)
        self._talk.use("cancel_order", order_id=order["order_id"])
        if cents > limit:
            self._talk.use("escalate", order_id=order["order_id"], reason="over_limit")
            return Outcome("escalated", "over_limit")
        self._refund(order, cents)
        return Outcome("done", cents=cents)

    def _address(self, wish: Wish, order: dict[str, Any]) -> Outcome:
        if not self._may(order, self._talk.policy("addresses")):
            return Outcome("refused", "too_late")
        address = self._talk.new_address(wish.number)
        if address["street"].startswith("PO Box"):
            return Outcome("refused", "bad_address")
        self._talk.use("change_address", order_id=order["order_id"], **address)
        return Outcome("done")

    def _coupon(self, wish: Wish, order: dict[str, Any]) -> Outcome:
        self._talk.policy("coupons")
        if order["coupon"] is not None:
            return Outcome("refused", "coupon_used")
        coupon = self._talk.use("get_coupon", code=wish.code)
        if date.fromisoformat(coupon["last_day"]) < self._today:
            return Outcome("refused", "expired")
        if _cents(order["items_total"]) < _cents(coupon["minimum"]):
            return Outcome("refused", "below_minimum")
        if order["status"] != "pending":
            return Outcome("refused", "too_late")
        reply = self._talk.use("apply_coupon", order_id=order["order_id"], code=coupon["code"])
        return Outcome("done", cents=_cents(reply["discount"]))

    def _late(self, order: dict[str, Any]) -> Outcome:
        days, basic, gold = _policy_numbers(
            self._talk.policy("late_delivery"),
            r"delivered (\d+) or more days.* of (\d+) euros for it, or (\d+) euros",
        )
        waited = date.fromisoformat(order["delivered"]) - date.fromisoformat(order["promised"])
        if waited.days < days:
            return Outcome("refused", "not_late")
        if order["late_credit"]:
            return Outcome("refused", "already_done")
        amount = gold if self._gold else basic
        self._talk.use("give_credit", order_id=order["order_id"], amount=amount)
        return Outcome("done", cents=amount * 100)

    @property
    def _limit(self) -> int:
        (euros,) = _policy_numbers(self._talk.policy("refunds"), r"more than (\d+) euros for one request")
        return euros * 100

    def _refund(self, order: dict[str, Any], cents: int) -> None:
        self._talk.policy("refunds")
        method = order["payment_method"]
        method = "store_credit" if method == "gift_card" else method
        self._talk.use("issue_refund", order_id=order["order_id"], amount=cents / 100, method=method)

    def _age(self, order: dict[str, Any]) -> int:
        return (self._today - date.fromisoformat(order["delivered"])).days

    def _may(self, order: dict[str, Any], policy: str) -> bool:
        """Whether a policy that says 'while its status is ...' lets the order be changed."""
        allowed = policy.partition("while its status is ")[2].partition(",")[0].partition(";")[0]
        return order["status"] in allowed.split(" or ")


def _cents(euros: float) -> int:
    return round(euros * 100)


def _paid(order: dict[str, Any]) -> int:
    return _cents(order["items_total"]) + _cents(order["shipping_fee"]) - _cents(order["discount"])


def solve(task: str, call: Call) -> float:
    """Play a task to its end through the tools, and return the reward of it all."""
    talk = Talk(call)
    if (match := re.search(r"today is (\d{4}-\d\d-\d\d)", task)) is None:
        raise SolverError("expected the day in the task")
    wanted = wishes(task)
    talk.policy("identity")
    candidates = talk.use("find_customer", name=ask_name(talk))
    account = _find_verified(talk, candidates)
    if account is None:
        for candidate in candidates:
            text = "could not be verified"
            talk.use("add_note", customer_id=candidate["customer_id"], kind="suspicious", text=text)
        outcomes = [Outcome("refused", "not_verified") for _ in wanted]
    else:
        handler = _Handler(talk, account, date.fromisoformat(match[1]))
        outcomes = [handler.handle(wish, _order_of(talk, wish, account)) for wish in wanted]
    for wish, outcome in zip(wanted, outcomes, strict=True):
        talk.use(
            "reply",
            request=wish.number,
            decision=outcome.decision,
            ground=outcome.ground,
            amount=outcome.cents / 100,
        )
    talk.use("finish")
    return talk.total


def ask_name(talk: Talk) -> str:
    """Ask the customer's name."""
    return talk.ask("name").removeprefix("My name is ").removesuffix(".")


def _find_verified(talk: Talk, candidates: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the account of the customer; None where nobody of the name could be verified."""
    facts = talk.facts(2)
    if len(facts) < 2:
        return None
    for candidate in candidates:
        if talk.use("verify_identity", customer_id=candidate["customer_id"], **facts)["verified"]:
            account: dict[str, Any] = talk.use("get_customer", customer_id=candidate["customer_id"])
            return account
    return None


def _order_of(talk: Talk, wish: Wish, account: dict[str, Any]) -> str | None:
    """Return the order that is meant; None where it is none of this customer's."""
    mine = {order["order_id"]: order["products"] for order in account["orders"]}
    if wish.order is not None:
        return wish.order if wish.order in mine else None
    candidates: list[str] = [order for order, products in mine.items() if set(wish.products) <= set(products)]
    if len(candidates) == 1:
        return candidates[0]
    match = re.search(r"O\d+", talk.ask("order", wish.number))
    number = match[0] if match else ""
    return number if number in mine else None
