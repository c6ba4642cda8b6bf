"""Random generation of a shop's records: products, customers, coupons and orders."""

import random
from datetime import date, timedelta
from typing import Final

from .records import (
    BRANDS,
    CATEGORIES,
    CITIES,
    COLOURS,
    FIRST_NAMES,
    GIFT_CARD,
    LAST_NAMES,
    PRODUCTS,
    SIZES,
    STREETS,
    Coupon,
    Customer,
    Line,
    Order,
    PostalAddress,
    Product,
    ProductVariant,
    Records,
    Status,
)

_FIRST_DAY: Final = date(2022, 1, 3)
_DAYS: Final = 1300
CUSTOMERS: Final = 10
PER_CATEGORY: Final = 4


class Maker:
    """Draws records one by one and assigns their ids."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.records = Records(_FIRST_DAY + timedelta(source.randrange(_DAYS)), {}, {}, {}, {}, {})
        self._order = source.randint(3000, 6000)
        self._customer = source.randint(200, 800)
        self._names: list[str] = []
        for _ in range(CUSTOMERS):
            self.add_customer()
        self._add_products()
        self._add_coupons()

    def days_ago(self, days: int) -> date:
        """Return the date a number of days before today."""
        return self.records.today - timedelta(days)

    def draw_address(self) -> PostalAddress:
        """Draw an address."""
        source = self.source
        street = f"{source.randint(1, 180)} {source.choice(STREETS)}"
        return PostalAddress(street, f"{source.randint(10000, 99999)}", source.choice(CITIES))

    def add_customer(self, name: str | None = None) -> Customer:
        """Add a customer, by default with a name that is not yet taken."""
        source = self.source
        while name is None:
            candidate = f"{source.choice(FIRST_NAMES)} {source.choice(LAST_NAMES)}"
            name = None if candidate in self._names else candidate
        self._names.append(name)
        self._customer += source.randint(1, 7)
        address = self.draw_address()
        mail = f"{name.lower().replace(' ', '.').replace(chr(39), '')}{source.randint(1, 99)}@example.org"
        customer = Customer(
            id=f"C{self._customer}",
            name=name,
            email=mail,
            postcode=address.postcode,
            phone=f"0{source.randint(100, 999)} {source.randint(100000, 999999)}",
            tier="gold" if source.random() < 0.4 else "basic",
            address=address,
            methods=[f"visa-{source.randint(1000, 9999)}", f"mastercard-{source.randint(1000, 9999)}"],
        )
        self.records.customers[customer.id] = customer
        return customer

    def add_order(
        self,
        customer: Customer,
        products: list[Product],
        status: Status,
        *,
        delivered_days: int = 0,
        days_late: int = 0,
    ) -> Order:
        """Add an order.

        Args:
            customer: The customer who placed it.
            products: The products in it, one line each.
            status: The order's status.
            delivered_days: How many days ago it was delivered, if it was.
            days_late: How many days after the promised day it was delivered; negative if before.
        """
        source, records = self.source, self.records
        self._order += source.randint(1, 9)
        delivered = self.days_ago(delivered_days) if status == "delivered" else None
        arrival = delivered or self.days_ago(-source.randint(1, 5))
        placed = arrival - timedelta(source.randint(4, 7) + max(days_late, 0))
        lines = []
        for number, product in enumerate(products, 1):
            variant = records.variants[source.choice(product.skus)]
            lines.append(Line(number, variant.sku, source.randint(1, 2), variant.price))
        order = Order(
            id=f"O{self._order}",
            customer_id=customer.id,
            placed=placed,
            status=status,
            promised=arrival - timedelta(days_late),
            delivered=delivered,
            address=customer.address,
            payment=source.choice([*customer.methods, customer.methods[0], GIFT_CARD]),
            shipping_fee=source.choice((0, 390, 490, 690)),
            lines=lines,
        )
        records.orders[order.id] = order
        return order

    def _add_products(self) -> None:
        source = self.source
        brands = source.sample(BRANDS, len(BRANDS))
        for category in CATEGORIES:
            for noun in source.sample(PRODUCTS[category], PER_CATEGORY):
                number = len(self.records.products) + 1
                id_ = f"P{number:02d}"
                options = SIZES if category == "clothing" else COLOURS
                # Whole euros, so that percentages of prices are whole cents.
                price = source.randint(12, 95) * 100
                skus = []
                for option in sorted(source.sample(options, 3)):
                    sku = f"{id_}-{option.split()[-1][:3].upper()}"
                    cost = price + source.choice((0, 0, 300, 500))
                    self.records.variants[sku] = ProductVariant(sku, id_, option, cost, source.randint(3, 30))
                    skus.append(sku)
                name = f"{brands[number % len(brands)]} {noun}"
                self.records.products[id_] = Product(id_, name, category, source.random() < 0.15, skus)

    def _add_coupons(self) -> None:
        source = self.source
        for percent in source.sample((5, 10, 15, 20, 25), 4):
            code = f"{source.choice(('SAVE', 'HELLO', 'THANKS', 'SPRING'))}{percent}{source.choice('ABCDEF')}"
            days = source.randint(-40, 60)
            self.records.coupons[code] = Coupon(
                code, percent, source.choice((30, 50, 80)) * 100, self.days_ago(-days)
            )
