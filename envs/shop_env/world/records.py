"""What the shop has on record. Money is in cents."""

from dataclasses import dataclass, field
from datetime import date

from .words import Category, Status, Tier


@dataclass(slots=True)
class Variant:
    """One kind of a product that lies in the warehouse."""

    sku: str
    product_id: str
    option: str
    price: int
    stock: int


@dataclass(slots=True)
class Product:
    """A product, in one or more variants."""

    id: str
    name: str
    category: Category
    final_sale: bool
    skus: list[str]


@dataclass(frozen=True, slots=True)
class Address:
    """Where an order goes."""

    street: str
    postcode: str
    city: str


@dataclass(slots=True)
class Customer:
    """Somebody with an account.

    Attributes:
        notes: the kinds of notes on the account that mean something.
    """

    id: str
    name: str
    email: str
    postcode: str
    phone: str
    tier: Tier
    address: Address
    methods: list[str]
    notes: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Line:
    """One line of an order.

    Attributes:
        unit_price: what one was paid.
        returned: it was sent back.
    """

    number: int
    sku: str
    quantity: int
    unit_price: int
    returned: bool = False


@dataclass(slots=True)
class Order:
    """An order.

    Attributes:
        refunds: what went back, by method.
        charges: what was taken beside the price, by method.
        credit: what was given for a late delivery.
    """

    id: str
    customer_id: str
    placed: date
    status: Status
    promised: date
    delivered: date | None
    address: Address
    payment: str
    shipping_fee: int
    lines: list[Line]
    coupon: str | None = None
    discount: int = 0
    refunds: dict[str, int] = field(default_factory=dict)
    charges: dict[str, int] = field(default_factory=dict)
    credit: int = 0
    escalations: set[str] = field(default_factory=set)

    @property
    def items_total(self) -> int:
        """What is in it, before a discount and without shipping."""
        return sum(line.quantity * line.unit_price for line in self.lines)

    @property
    def paid(self) -> int:
        """What was paid for it altogether."""
        return self.items_total + self.shipping_fee - self.discount


@dataclass(frozen=True, slots=True)
class Coupon:
    """A coupon of so many percent off what is in an order."""

    code: str
    percent: int
    minimum: int
    expires: date


@dataclass(slots=True)
class Records:
    """Everything that the shop has on record, by id."""

    today: date
    customers: dict[str, Customer]
    products: dict[str, Product]
    variants: dict[str, Variant]
    orders: dict[str, Order]
    coupons: dict[str, Coupon]

    def product_of(self, sku: str) -> Product:
        """Return the product that a variant is of."""
        return self.products[self.variants[sku].product_id]
