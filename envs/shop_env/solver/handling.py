"""What is done for a request, by the policies as they are worded."""

from dataclasses import dataclass
from datetime import date
from typing import Any

from .talk import Talk
from .understanding import Wish, policy_numbers


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a request is answered with."""

    decision: str
    ground: str = "none"
    cents: int = 0


class Handler:
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
        why = self._talk.reason(wish.number)
        grounds = [self._against(line, order, why) for line in lines]
        fine = [line for line, ground in zip(lines, grounds, strict=True) if ground is None]
        against = next((ground for ground in grounds if ground), None)
        if not fine:
            return Outcome("refused", against or "none")
        cents = self._send_back(order, fine, why)
        if cents > self._limit:
            self._talk.use("escalate", order_id=order["order_id"], reason="over_limit")
            return Outcome("escalated", "over_limit")
        self._refund(order, cents)
        return Outcome("partly" if against else "done", against or "none", cents)

    def _against(self, line: dict[str, Any], order: dict[str, Any], why: str) -> str | None:
        text, age = self._talk.policy("returns"), self._age(order)
        if line["returned"]:
            return "already_done"
        if why != "changed_mind":
            (days,) = policy_numbers(text, r"can be sent back within (\d+) days, whatever it is")
            return "window_over" if age > days else None
        product = self._talk.product(line["product_id"])
        if product["final_sale"]:
            return "final_sale"
        usual, electronics, more = policy_numbers(
            text, r"within (\d+) days of delivery, electronics within (\d+) days.* gold have (\d+) days more"
        )
        days = electronics if product["category"] == "electronics" else usual
        return "window_over" if age > days + more * self._gold else None

    def _send_back(self, order: dict[str, Any], lines: list[dict[str, Any]], why: str) -> int:
        """Take lines back, and return what they are worth."""
        numbers = [line["line"] for line in lines]
        self._talk.use("return_items", order_id=order["order_id"], lines=numbers, reason=why)
        (kept,) = policy_numbers(
            self._talk.policy("returns"), r"changed their mind, (\d+) percent of the price is kept"
        )
        cents = 0
        for line in lines:
            price = _cents(line["unit_price"]) * line["quantity"]
            furniture = (
                why == "changed_mind" and self._talk.product(line["product_id"])["category"] == "furniture"
            )
            cents += price * (100 - kept) // 100 if furniture else price
        return cents

    def _exchange(self, wish: Wish, order: dict[str, Any]) -> Outcome:
        (line,) = [line for line in order["lines"] if line["product"] in wish.products]
        (days,) = policy_numbers(self._talk.policy("exchanges"), r"exchanged within (\d+) days of delivery")
        if self._age(order) > days:
            return Outcome("refused", "window_over")
        product = self._talk.product(line["product_id"])
        if product["final_sale"]:
            return Outcome("refused", "final_sale")
        (new,) = [one for one in product["variants"] if one["option"] == wish.option]
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
        seen = self._talk.use("apply_coupon", order_id=order["order_id"], code=coupon["code"])
        return Outcome("done", cents=_cents(seen["discount"]))

    def _late(self, order: dict[str, Any]) -> Outcome:
        days, basic, gold = policy_numbers(
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
        (euros,) = policy_numbers(self._talk.policy("refunds"), r"more than (\d+) euros for one request")
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
