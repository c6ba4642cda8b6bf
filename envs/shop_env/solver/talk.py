"""Calls of tools with what they earned, and what the customer answers."""

import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from openenv_core.tools import CallToolObservation

from .understanding import Puzzled

Call: TypeAlias = Callable[[str, dict[str, Any]], CallToolObservation]
"""Calls a tool: its name and arguments, and what the step answers."""

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


class Talk:
    """One conversation.

    Attributes:
        earned: the rewards so far.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._policies: dict[str, str] = {}
        self._products: dict[str, dict[str, Any]] = {}
        self.earned = 0.0

    def use(self, name: str, /, **arguments: Any) -> Any:
        """Call a tool and return what it gives.

        Raises:
            Puzzled: The tool failed.
        """
        seen = self._call(name, arguments)
        self.earned += float(seen.reward or 0.0)
        if seen.error is not None:
            raise Puzzled(f"{name}({arguments}) said: {seen.error.message}")
        return seen.result

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
        said: str = self.use("ask_customer", topic=topic, request=request)
        return said

    def facts(self, most: int) -> dict[str, str]:
        """Ask for what identifies somebody, until so many facts are known."""
        known: dict[str, str] = {}
        for topic, pattern in _FACTS.items():
            if len(known) < most and (found := re.fullmatch(pattern, self.ask(topic))):
                known[topic] = found[1]
        return known

    def reason(self, request: int) -> str:
        """Ask why something is sent back."""
        said = self.ask("reason", request)
        return next((why for mark, why in _FAULTY.items() if mark in said), "changed_mind")

    def wants_money(self, request: int) -> bool:
        """Ask for a fallback: the money, or what there is."""
        said = self.ask("fallback", request)
        return "money back" in said or "refund" in said

    def new_address(self, request: int) -> dict[str, str]:
        """Ask for an address."""
        said = self.ask("address", request)
        if (found := re.fullmatch(r"Please send it to (.+), (\S+) (\S+)\.", said)) is None:
            raise Puzzled(f"expected an address, got {said!r}")
        return dict(zip(("street", "postcode", "city"), found.groups(), strict=True))
