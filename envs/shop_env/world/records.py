"""The shop's records, its enumerated values, and lists of fictitious names. Amounts of money are in cents."""

# ruff: noqa: SIM905 - a string of words is easier to read than a list of them

from dataclasses import dataclass, field
from datetime import date
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

Status: TypeAlias = Literal["pending", "processing", "shipped", "delivered", "cancelled"]
"""The status of an order, in chronological order."""

Category: TypeAlias = Literal["electronics", "furniture", "clothing", "kitchen", "toys"]
Tier: TypeAlias = Literal["basic", "gold"]

ReturnReason: TypeAlias = Literal["changed_mind", "damaged", "wrong_item"]
"""The reason of a return."""

Topic: TypeAlias = Literal[
    "identity",
    "returns",
    "exchanges",
    "refunds",
    "cancellations",
    "addresses",
    "coupons",
    "late_delivery",
    "replies",
]
"""The topics of policies."""

CustomerTopic: TypeAlias = Literal[
    "name", "email", "postcode", "phone", "order", "reason", "fallback", "address"
]
"""The topics that a customer can be asked about."""

Decision: TypeAlias = Literal["done", "partly", "refused", "escalated"]

Ground: TypeAlias = Literal[
    "none",
    "window_over",
    "final_sale",
    "not_delivered",
    "already_done",
    "out_of_stock",
    "too_late",
    "bad_address",
    "expired",
    "below_minimum",
    "coupon_used",
    "not_late",
    "not_your_order",
    "not_verified",
    "over_limit",
]
"""Why a request was not granted, or only in part."""

NoteKind: TypeAlias = Literal["suspicious", "other"]

STORE_CREDIT: Final = "store_credit"
GIFT_CARD: Final = "gift_card"
OPEN_STATUSES: Final[tuple[Status, ...]] = ("pending", "processing")
"""The statuses of orders that have not been shipped."""

TOPICS: Final[tuple[Topic, ...]] = get_args(Topic)
CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)


@dataclass(slots=True)
class ProductVariant:
    """A variant of a product, with its stock."""

    sku: str
    product_id: str
    option: str
    price: int
    stock: int


@dataclass(slots=True)
class Product:
    """A product with one or more variants."""

    id: str
    name: str
    category: Category
    final_sale: bool
    skus: list[str]


class PostalAddress(NamedTuple):
    """A postal address."""

    street: str
    postcode: str
    city: str


@dataclass(slots=True)
class Customer:
    """A customer's account.

    Attributes:
        methods: the payment methods.
        notes: the kinds of notes on the account, except "other".
    """

    id: str
    name: str
    email: str
    postcode: str
    phone: str
    tier: Tier
    address: PostalAddress
    methods: list[str]
    notes: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Line:
    """One line of an order.

    Attributes:
        unit_price: the price paid per unit, in cents.
        returned: whether it has been returned.
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
        payment: the payment method.
        refunds: amounts refunded, by payment method.
        charges: amounts charged in addition to the price, by payment method.
        credit: the credit given for a late delivery.
        escalations: the reasons for which it was escalated.
    """

    id: str
    customer_id: str
    placed: date
    status: Status
    promised: date
    delivered: date | None
    address: PostalAddress
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
        """The total of all lines, before discount and without shipping."""
        return sum(line.quantity * line.unit_price for line in self.lines)

    @property
    def paid(self) -> int:
        """The total amount paid."""
        return self.items_total + self.shipping_fee - self.discount


@dataclass(frozen=True, slots=True)
class Coupon:
    """A coupon for a percentage off the items of an order."""

    code: str
    percent: int
    minimum: int
    expires: date


@dataclass(slots=True)
class Records:
    """All records of the shop, by id."""

    today: date
    customers: dict[str, Customer]
    products: dict[str, Product]
    variants: dict[str, ProductVariant]
    orders: dict[str, Order]
    coupons: dict[str, Coupon]

    def product_of(self, sku: str) -> Product:
        """Return the product of a variant."""
        return self.products[self.variants[sku].product_id]


FIRST_NAMES: Final = (
    "Ada Amir Anna Bela Boris Carla Chen Clara Dario Dina Edgar Elif Emma Farid Felix Greta Hana Hugo Ines Ivan Jana "
    "Jonas Kaya Lars Lena Luca Maja Marek Mina Nadia Nils Noor Olga Omar Paula Pavel Rosa Selma Tariq Vera Yusuf Zoe"
).split()

LAST_NAMES: Final = (
    "Abbott Adler Baker Berg Castro D'Angelo Dahl Dubois Fischer Fontana Garcia Grant Haas Hansen Ito Jansen Keller "
    "Kim Kovacs Lang Lindqvist Lopez Marsh Moreau Nowak O'Brien Okafor Olsen Patel Petrov Rossi Sato Silva Tanaka Vogel"
).split()

CITIES: Final = "Aldbury Brackwater Castlebay Dunmore Eastfield Fairhaven Greystone Highmoor Ivyport".split()
STREETS: Final = "Mill Lane|Station Road|High Street|Orchard Way|Church Hill|Harbour View|Elm Avenue".split(
    "|"
)

PRODUCTS: Final[dict[Category, tuple[str, ...]]] = {
    "electronics": ("Radio", "Headphones", "Camera", "Speaker", "Tablet"),
    "furniture": ("Armchair", "Bookshelf", "Desk", "Wardrobe", "Stool"),
    "clothing": ("Jacket", "Scarf", "Sweater", "Raincoat", "Boots"),
    "kitchen": ("Kettle", "Toaster", "Pan Set", "Teapot", "Blender"),
    "toys": ("Train Set", "Puzzle", "Dollhouse", "Kite", "Building Blocks"),
}

BRANDS: Final = "Aurora Birch Cobalt Drift Ember Fjord Grove Haven Iris Juno".split()
COLOURS: Final = ("black", "blue", "green", "red", "white", "yellow")
SIZES: Final = ("size S", "size M", "size L", "size XL")
