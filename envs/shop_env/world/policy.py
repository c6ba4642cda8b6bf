"""The shop's policies. Their figures differ from task to task, so that they have to be read."""

import random
from dataclasses import asdict, dataclass

from .records import Category, Tier, Topic


@dataclass(frozen=True, slots=True)
class ShopPolicy:
    """The figures of the policies.

    Attributes:
        days: the return window of most products, in days.
        electronics_days: the return window of electronics, in days.
        gold_days: additional days in the return window of gold customers.
        faulty_days: the return window of damaged or wrong items, in days.
        restocking_percent: the percentage of the price kept when furniture is returned after a change of mind.
        exchange_days: the exchange window, in days.
        refund_limit: in cents; a larger refund needs a supervisor.
        cancel_processing: whether orders can also be cancelled while processing.
        move_processing: whether addresses can also be changed while processing.
        late_days: the delay from which a delivery counts as late, in days.
        late_credit: the credit for a late delivery, in cents; gold customers get twice as much.
    """

    days: int
    electronics_days: int
    gold_days: int
    faulty_days: int
    restocking_percent: int
    exchange_days: int
    refund_limit: int
    cancel_processing: bool
    move_processing: bool
    late_days: int
    late_credit: int

    def return_window(self, category: Category, tier: Tier) -> int:
        """Return the number of days in which a product can be returned after a change of mind."""
        days = self.electronics_days if category == "electronics" else self.days
        return days + (self.gold_days if tier == "gold" else 0)

    def text(self, topic: Topic) -> str:
        """Return the text of the policy on a topic."""
        values = asdict(self) | {
            "refund_limit": self.refund_limit // 100,
            "cancel": _describe_statuses(self.cancel_processing),
            "move": _describe_statuses(self.move_processing),
            "late_credit": self.late_credit // 100,
            "late_credit_gold": self.late_credit // 50,
        }
        return _TEXTS[topic].format(**values)


def draw_policy(source: random.Random) -> ShopPolicy:
    """Draw the figures of the policies."""
    return ShopPolicy(
        days=source.choice((14, 20, 21, 28, 30)),
        electronics_days=source.choice((7, 10, 12)),
        gold_days=source.choice((5, 7, 10, 15)),
        faulty_days=source.choice((60, 75, 90)),
        restocking_percent=source.choice((5, 10, 15, 20)),
        exchange_days=source.choice((35, 40, 45)),
        refund_limit=source.choice((25000, 30000, 40000)),
        cancel_processing=source.random() < 0.5,
        move_processing=source.random() < 0.5,
        late_days=source.choice((2, 3, 4, 5)),
        late_credit=source.choice((500, 800, 1000, 1500)),
    )


def _describe_statuses(processing: bool) -> str:
    return "pending or processing" if processing else "pending"


_TEXTS: dict[Topic, str] = {
    "identity": (
        "Before anything is told of an account or changed in it, two of email, postcode and phone must "
        "match what is on record: ask the customer, then use verify_identity. Several customers may have "
        "the same name. Where two do not match for anybody of that name, do nothing of what is asked, add "
        "a note of the kind 'suspicious' to the account and refuse every request with the ground "
        "'not_verified'. Customers have a right to their own orders only; what they ask about somebody "
        "else's is refused with 'not_your_order'."
    ),
    "returns": (
        "What was delivered can be sent back within {days} days of delivery, electronics within "
        "{electronics_days} days; the last day counts. Customers of the tier gold have {gold_days} days "
        "more. What came damaged, or is not what was ordered, can be sent back within {faulty_days} days, "
        "whatever it is and whatever the tier. Products marked as final sale cannot be sent back, unless "
        "they came damaged or are not what was ordered. Of furniture that is sent back because somebody "
        "changed their mind, {restocking_percent} percent of the price is kept; nothing is kept "
        "otherwise. Shipping fees are not given back. Ask for the reason. Use return_items, then "
        "issue_refund for all that can be sent back together. Of several things, those that can are sent "
        "back, and the others are not."
    ),
    "exchanges": (
        "What was delivered can be exchanged within {exchange_days} days of delivery, the last day "
        "included and whatever the tier, for another variant of the same product that is in stock in the "
        "same quantity. Products marked as final sale cannot be exchanged. Where the new variant is "
        "dearer than what was paid, charge the difference to the payment method of the order with "
        "charge_customer; where it is cheaper, refund the difference. Where it is out of stock, ask the "
        "customer for a fallback: who would rather have the money back is treated as somebody who changed "
        "their mind about it, by the policy on returns (answer 'partly', ground 'out_of_stock'); where "
        "that policy forbids it, or the customer would rather keep it, refuse with 'out_of_stock'."
    ),
    "refunds": (
        "Money goes back to the payment method of the order and to no other, whatever the customer "
        "wishes; what was paid with a gift card goes back as store_credit. A refund of more than "
        "{refund_limit} euros for one request is for a supervisor: return or cancel, do not refund, "
        "escalate the order with 'over_limit' and answer 'escalated' with the ground 'over_limit' and the "
        "amount 0. Nothing is refunded twice."
    ),
    "cancellations": (
        "An order can be cancelled while its status is {cancel}, and only as a whole. Everything that was "
        "paid is refunded, the shipping fee included. Later it is 'too_late'."
    ),
    "addresses": (
        "The address of an order can be changed while its status is {move}; later it is 'too_late'. Ask "
        "for the new address. A PO box is no address that we deliver to: refuse it with 'bad_address'."
    ),
    "coupons": (
        "A coupon can be put on an order while its status is pending ('too_late' afterwards), if the "
        "order has none yet ('coupon_used'), the coupon has not expired (its last day counts; 'expired') "
        "and what is in the order comes to its minimum, without shipping ('below_minimum'). apply_coupon "
        "takes the discount off by itself."
    ),
    "late_delivery": (
        "An order that was delivered {late_days} or more days after the promised day was late: "
        "give_credit of {late_credit} euros for it, or {late_credit_gold} euros to customers of the tier "
        "gold, once an order ('already_done'). Below that it is 'not_late'."
    ),
    "replies": (
        "Answer each request with reply: 'done', 'partly' (some of it), 'refused' or 'escalated', with "
        "the ground unless it is done. The amount is what the customer gets back by the request, in "
        "euros: a refund, a credit, a discount; negative where the customer pays a difference; or the sum "
        "that was asked for; 0 otherwise. Until somebody is verified, nothing can be told but 'refused' with "
        "'not_verified'. What was sent back before is 'already_done', what has not been "
        "delivered 'not_delivered'. Then finish."
    ),
}
