"""What a customer wants, as it is: what the shop would know if it knew everything."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .policy import Policy
from .records import Address, Records
from .words import Why

Kind: TypeAlias = Literal["return", "exchange", "cancel", "address", "coupon", "late", "total"]
Fallback: TypeAlias = Literal["refund", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing that a customer asks for.

    Attributes:
        case: which case of its kind it was made as; for statistics.
        lines: of the order, that it is about.
        new_sku: what to exchange it for.
        fallback: what the customer wants where that is out of stock.
        product: the name of something in the order, by which the customer may refer to it.
        says: how the customer puts it.
    """

    kind: Kind
    case: str
    order_id: str
    lines: tuple[int, ...] = ()
    why: Why | None = None
    new_sku: str | None = None
    fallback: Fallback = "keep"
    address: Address | None = None
    code: str | None = None
    product: str = ""
    says: str = ""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A task: the shop as it is, who calls, and what for.

    Attributes:
        impostor: the caller is not whose name they give.
        knows: which of email, postcode and phone the caller can tell, with what they say.
        knows_numbers: by request, whether the caller knows the order's number.
    """

    records: Records
    policy: Policy
    customer_id: str
    requests: tuple[Request, ...]
    impostor: bool = False
    knows: dict[str, str | None] = field(default_factory=dict)
    knows_numbers: tuple[bool, ...] = ()
