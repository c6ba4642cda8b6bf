"""The words that have a meaning to the shop: they are in the schemas of tools, and in the policies."""

from typing import Final, Literal, TypeAlias, get_args

Status: TypeAlias = Literal["pending", "processing", "shipped", "delivered", "cancelled"]
"""Of an order, in the order in which they come."""

Category: TypeAlias = Literal["electronics", "furniture", "clothing", "kitchen", "toys"]
Tier: TypeAlias = Literal["basic", "gold"]

Why: TypeAlias = Literal["changed_mind", "damaged", "wrong_item"]
"""Why something is sent back."""

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
"""What there are policies about."""

Asked: TypeAlias = Literal["name", "email", "postcode", "phone", "order", "reason", "fallback", "address"]
"""What a customer can be asked about."""

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
"""Why a request was not done, or not wholly."""

NoteKind: TypeAlias = Literal["suspicious", "other"]

STORE_CREDIT: Final = "store_credit"
GIFT_CARD: Final = "gift_card"
OPEN: Final[tuple[Status, ...]] = ("pending", "processing")
"""Orders that have not left."""

TOPICS: Final[tuple[Topic, ...]] = get_args(Topic)
CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)
