"""Generation of customers' requests: some can be granted, some only in part, and some not at all."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal, TypeAlias

from .making import Maker
from .policy import ShopPolicy, draw_policy
from .records import (
    GIFT_CARD,
    STORE_CREDIT,
    Coupon,
    Order,
    PostalAddress,
    Product,
    Records,
    ReturnReason,
    Status,
)

Kind: TypeAlias = Literal["return", "exchange", "cancel", "address", "coupon", "late", "total"]
Fallback: TypeAlias = Literal["refund", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerRequest:
    """One request of a customer.

    Attributes:
        kind: the kind of request.
        case: the case of its kind as which it was generated; for statistics.
        order_id: the order that it concerns.
        lines: the numbers of the order's lines that it concerns.
        why: the reason of a return.
        new_sku: the variant to exchange the item for.
        fallback: what the customer wants if that variant is out of stock.
        address: the new address.
        code: the coupon's code.
        product: the name of a product in the order, by which the customer may refer to the order.
        wording: the request in the customer's words.
    """

    kind: Kind
    case: str
    order_id: str
    lines: tuple[int, ...] = ()
    why: ReturnReason | None = None
    new_sku: str | None = None
    fallback: Fallback = "keep"
    address: PostalAddress | None = None
    code: str | None = None
    product: str = ""
    wording: str = ""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A task's content: the shop, the caller and the requests.

    Attributes:
        impostor: whether the caller is not the person whose name they give.
        knows: the caller's answers for email, postcode and phone; None if they do not know it.
        knows_numbers: for each request, whether the caller knows the order's number.
    """

    records: Records
    policy: ShopPolicy
    customer_id: str
    requests: tuple[CustomerRequest, ...]
    impostor: bool = False
    knows: dict[str, str | None] = field(default_factory=dict)
    knows_numbers: tuple[bool, ...] = ()


TWO_ITEM_CASES: Final = ("two", "partly", "big")
"""Cases of a return of two items; "big" has two only if another product is left."""


class CaseMaker(Maker):
    """Draws a shop, its policies and a customer, and has what that customer's requests are generated from.

    Attributes:
        unused_products: products that no request of this customer concerns yet.
    """

    def __init__(self, source: random.Random) -> None:
        super().__init__(source)
        self.policy = draw_policy(source)
        self.customer = source.choice(list(self.records.customers.values()))
        products = list(self.records.products.values())
        self.unused_products = source.sample(products, len(products))

    def take_product(self, *, final_sale: bool = False) -> Product | None:
        """Take a matching product from the unused ones; None if there is none left."""
        for product in self.unused_products:
            if product.final_sale == final_sale:
                self.unused_products.remove(product)
                return product
        return None

    def return_window(self, product: Product) -> int:
        """Return the number of days in which the customer can return a product after a change of mind."""
        return self.policy.return_window(product.category, self.customer.tier)

    def draw_within(self, limit: int) -> int:
        """Draw a number of days up to a limit, often the limit itself."""
        return limit if self.source.random() < 0.3 else self.source.randint(1, limit)

    def draw_beyond(self, limit: int) -> int:
        """Draw a number of days beyond a limit, often by just one."""
        return limit + (1 if self.source.random() < 0.4 else self.source.randint(2, 9))


def _make_return(maker: CaseMaker, case: str) -> CustomerRequest | None:
    source, policy = maker.source, maker.policy
    product = maker.take_product(
        final_sale=case == "final_sale" or (case == "faulty" and source.random() < 0.3)
    )
    if product is None:
        return None
    products = [product]
    if case in TWO_ITEM_CASES and (other := maker.take_product(final_sale=case == "partly")):
        products.append(other)
    elif case in ("two", "partly"):
        return None
    shortest_window = min(maker.return_window(bought) for bought in products)
    faulty = case.startswith("faulty")
    days = maker.draw_within(shortest_window)
    if case == "over":
        days = maker.draw_beyond(shortest_window)
    elif case == "faulty":
        days = (
            maker.draw_beyond(shortest_window)
            if source.random() < 0.6
            else maker.draw_within(policy.faulty_days)
        )
    elif case == "faulty_over":
        days = maker.draw_beyond(policy.faulty_days)
    order = maker.add_order(
        maker.customer, products, "shipped" if case == "transit" else "delivered", delivered_days=days
    )
    if case == "big":
        _exceed_refund_limit(maker, order)
    if case == "already":
        order.lines[0].returned = True
        method = STORE_CREDIT if order.payment == GIFT_CARD else order.payment
        order.refunds[method] = order.lines[0].quantity * order.lines[0].unit_price
    return CustomerRequest(
        kind="return",
        case=case,
        order_id=order.id,
        lines=tuple(range(1, len(products) + 1)),
        why=source.choice(("damaged", "wrong_item")) if faulty else "changed_mind",
        product=product.name,
    )


def _make_exchange(maker: CaseMaker, case: str) -> CustomerRequest | None:
    policy = maker.policy
    product = maker.take_product(final_sale=case == "final_sale")
    if product is None:
        return None
    limit, window = policy.exchange_days, maker.return_window(product)
    days = maker.draw_within(limit)
    if case == "over":
        days = maker.draw_beyond(limit)
    elif case == "fallback_refund":
        days = maker.draw_within(min(limit, window))
    elif case == "fallback_over":
        if window >= limit:
            return None
        days = maker.source.randint(window + 1, limit)
    order = maker.add_order(maker.customer, [product], "delivered", delivered_days=days)
    (line,) = order.lines
    new = maker.source.choice([sku for sku in product.skus if sku != line.sku])
    if case.startswith("fallback"):
        maker.records.variants[new].stock = line.quantity - 1
    return CustomerRequest(
        kind="exchange",
        case=case,
        order_id=order.id,
        lines=(1,),
        new_sku=new,
        fallback="keep" if case == "fallback_keep" else "refund",
        product=product.name,
    )


def _make_cancellation(maker: CaseMaker, case: str) -> CustomerRequest | None:
    order = _make_open_order(maker, case)
    if order is not None and case == "big":
        _exceed_refund_limit(maker, order)
    return _make_request(maker, order, "cancel", case)


def _make_address_change(maker: CaseMaker, case: str) -> CustomerRequest | None:
    request = _make_request(maker, _make_open_order(maker, case), "address", case)
    if request is None:
        return None
    new = maker.draw_address()
    if case == "po_box":
        new = PostalAddress(f"PO Box {maker.source.randint(10, 999)}", new.postcode, new.city)
    return CustomerRequest(
        kind="address", case=case, order_id=request.order_id, address=new, product=request.product
    )


def _make_coupon_request(maker: CaseMaker, case: str) -> CustomerRequest | None:
    source, records = maker.source, maker.records
    order = _make_open_order(maker, case)
    if order is None:
        return None
    total = order.items_total
    coupon = Coupon(
        code=f"{source.choice(('EXTRA', 'FRIEND', 'BONUS'))}{len(records.coupons)}{source.choice('GHJKMN')}",
        percent=source.choice((5, 10, 15, 20)),
        minimum=total + source.choice((100, 900)) if case == "minimum" else total - source.choice((0, 500)),
        expires=records.today
        + timedelta(-source.choice((1, 12)) if case == "expired" else source.choice((0, 20))),
    )
    records.coupons[coupon.code] = coupon
    if case == "used":
        order.coupon = source.choice(sorted(code for code in records.coupons if code != coupon.code))
        order.discount = total // 100 * records.coupons[order.coupon].percent
    request = _make_request(maker, order, "coupon", case)
    return request and CustomerRequest(
        kind="coupon", case=case, order_id=order.id, code=coupon.code, product=request.product
    )


def _make_late_delivery(maker: CaseMaker, case: str) -> CustomerRequest | None:
    source, limit = maker.source, maker.policy.late_days
    product = maker.take_product()
    if product is None:
        return None
    days_late = limit - source.choice((1, 1, 2)) if case == "in_time" else limit + source.choice((0, 0, 1, 4))
    order = maker.add_order(
        maker.customer, [product], "delivered", delivered_days=source.randint(2, 50), days_late=days_late
    )
    if case == "already":
        order.credit = maker.policy.late_credit
    return CustomerRequest(kind="late", case=case, order_id=order.id, product=product.name)


def _make_total_question(maker: CaseMaker, case: str) -> CustomerRequest | None:
    return _make_request(maker, _make_open_order(maker, case), "total", case)


CASES: Final[dict[Kind, tuple[Callable[[CaseMaker, str], CustomerRequest | None], dict[str, int]]]] = {
    "return": (
        _make_return,
        {"fine": 3, "two": 2, "faulty": 2, "partly": 2, "big": 1}
        | {"over": 1, "faulty_over": 1, "final_sale": 1, "already": 1, "transit": 1},
    ),
    "exchange": (
        _make_exchange,
        {"fine": 6, "fallback_refund": 2}
        | {"over": 1, "final_sale": 1, "fallback_keep": 1, "fallback_over": 1},
    ),
    "cancel": (_make_cancellation, {"pending": 4, "processing": 2, "big": 2, "shipped": 1, "foreign": 1}),
    "address": (
        _make_address_change,
        {"pending": 5, "processing": 2, "shipped": 1, "po_box": 1, "foreign": 1},
    ),
    "coupon": (_make_coupon_request, {"pending": 4, "expired": 1, "minimum": 1, "used": 1, "processing": 1}),
    "late": (_make_late_delivery, {"fine": 5, "in_time": 1, "already": 1}),
    "total": (_make_total_question, {"pending": 3, "shipped": 3, "foreign": 1}),
}
"""By kind: a function that generates a request and its order, or returns None if this shop lacks what it needs; and the
cases with their weights.

Cases that need only a reply are rare, so that always refusing with the commonest ground earns little.
"""


def _make_open_order(maker: CaseMaker, case: str) -> Order | None:
    """Add an order that has not been delivered; in the case "foreign", one of another customer."""
    source, records = maker.source, maker.records
    product = maker.take_product()
    if product is None:
        return None
    owner = maker.customer
    if case == "foreign":
        owner = source.choice(
            [customer for customer in records.customers.values() if customer.name != owner.name]
        )
    products = [product]
    if source.random() < 0.4 and (other := maker.take_product()):
        products.append(other)
    statuses: dict[str, Status] = {"processing": "processing", "shipped": "shipped"}
    return maker.add_order(owner, products, statuses.get(case, "pending"))


def _make_request(maker: CaseMaker, order: Order | None, kind: Kind, case: str) -> CustomerRequest | None:
    if order is None:
        return None
    product = maker.records.product_of(order.lines[0].sku)
    return CustomerRequest(kind=kind, case=case, order_id=order.id, product=product.name)


def _exceed_refund_limit(maker: CaseMaker, order: Order) -> None:
    """Enlarge an order until its refund exceeds the limit, even after a restocking fee."""
    while order.items_total * 3 < maker.policy.refund_limit * 4:
        order.lines[0].quantity += 1
