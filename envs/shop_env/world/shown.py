"""Records as tools show them: euros, days in words that sort, no more than somebody has a right to see."""

from typing import Any

from .records import Coupon, Customer, Order, Product, Records


def euros(cents: int) -> float:
    """Return cents as euros."""
    return cents / 100


def shown_customer(customer: Customer, orders: list[Order], records: Records) -> dict[str, Any]:
    """Show an account and the orders of it."""
    return {
        "customer_id": customer.id,
        "name": customer.name,
        "tier": customer.tier,
        "payment_methods": list(customer.methods),
        "orders": [
            {
                "order_id": order.id,
                "placed": order.placed.isoformat(),
                "status": order.status,
                "products": [records.product_of(line.sku).name for line in order.lines],
            }
            for order in orders
        ],
    }


def shown_order(order: Order, records: Records) -> dict[str, Any]:
    """Show an order."""
    return {
        "order_id": order.id,
        "customer_id": order.customer_id,
        "status": order.status,
        "placed": order.placed.isoformat(),
        "promised": order.promised.isoformat(),
        "delivered": order.delivered.isoformat() if order.delivered else None,
        "address": f"{order.address.street}, {order.address.postcode} {order.address.city}",
        "payment_method": order.payment,
        "lines": [
            {
                "line": line.number,
                "product": records.product_of(line.sku).name,
                "product_id": records.variants[line.sku].product_id,
                "sku": line.sku,
                "option": records.variants[line.sku].option,
                "quantity": line.quantity,
                "unit_price": euros(line.unit_price),
                "returned": line.returned,
            }
            for line in order.lines
        ],
        "items_total": euros(order.items_total),
        "shipping_fee": euros(order.shipping_fee),
        "coupon": order.coupon,
        "discount": euros(order.discount),
        "refunds": {method: euros(cents) for method, cents in order.refunds.items()},
        "charges": {method: euros(cents) for method, cents in order.charges.items()},
        "late_credit": euros(order.credit),
    }


def shown_product(product: Product, records: Records) -> dict[str, Any]:
    """Show a product with its variants, without what is in stock."""
    return {
        "product_id": product.id,
        "name": product.name,
        "category": product.category,
        "final_sale": product.final_sale,
        "variants": [
            {"sku": sku, "option": records.variants[sku].option, "price": euros(records.variants[sku].price)}
            for sku in product.skus
        ],
    }


def shown_coupon(coupon: Coupon) -> dict[str, Any]:
    """Show a coupon."""
    return {
        "code": coupon.code,
        "percent": coupon.percent,
        "minimum": euros(coupon.minimum),
        "last_day": coupon.expires.isoformat(),
    }
