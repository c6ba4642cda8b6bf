"""One conversation from the task's text to its end."""

import re
from datetime import date
from typing import Any

from .handling import Handler, Outcome
from .talk import Call, Talk
from .understanding import Puzzled, Wish, wishes


def solve(task: str, call: Call) -> float:
    """Play a task to its end through the tools, and return the reward of it all.

    Args:
        task: Its text.
        call: How to call a tool.

    Raises:
        Puzzled: Something is said or refused that was not expected.
    """
    talk = Talk(call)
    if (found := re.search(r"today is (\d{4}-\d\d-\d\d)", task)) is None:
        raise Puzzled("expected the day in the task")
    wanted = wishes(task)
    talk.policy("identity")
    candidates = talk.use("find_customer", name=_name(talk))
    account = _verified(talk, candidates)
    if account is None:
        for candidate in candidates:
            text = "could not be verified"
            talk.use("add_note", customer_id=candidate["customer_id"], kind="suspicious", text=text)
        outcomes = [Outcome("refused", "not_verified") for _ in wanted]
    else:
        handler = Handler(talk, account, date.fromisoformat(found[1]))
        outcomes = [handler.handle(wish, _order_of(talk, wish, account)) for wish in wanted]
    for wish, outcome in zip(wanted, outcomes, strict=True):
        talk.use(
            "reply",
            request=wish.number,
            decision=outcome.decision,
            ground=outcome.ground,
            amount=outcome.cents / 100,
        )
    talk.use("finish")
    return talk.earned


def _name(talk: Talk) -> str:
    return talk.ask("name").removeprefix("My name is ").removesuffix(".")


def _verified(talk: Talk, candidates: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the account of the customer; None where nobody of the name could be verified."""
    facts = talk.facts(2)
    if len(facts) < 2:
        return None
    for candidate in candidates:
        if talk.use("verify_identity", customer_id=candidate["customer_id"], **facts)["verified"]:
            account: dict[str, Any] = talk.use("get_customer", customer_id=candidate["customer_id"])
            return account
    return None


def _order_of(talk: Talk, wish: Wish, account: dict[str, Any]) -> str | None:
    """Return the order that is meant; None where it is none of this customer's."""
    mine = {order["order_id"]: order["products"] for order in account["orders"]}
    if wish.order is not None:
        return wish.order if wish.order in mine else None
    there: list[str] = [order for order, products in mine.items() if set(wish.products) <= set(products)]
    if len(there) == 1:
        return there[0]
    said = re.search(r"O\d+", talk.ask("order", wish.number))
    number = said[0] if said else ""
    return number if number in mine else None
