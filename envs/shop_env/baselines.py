"""Baselines: the rewards of policies that have learned nothing."""

import random
from collections.abc import Callable
from typing import Any, Final, get_args

from openenv_core.worlds import Call, Policy

from .solver import Talk, ask_name, wishes
from .world.cases import Kind
from .world.records import TOPICS, Asked, Decision, Ground

_CALLS: Final = 30

_USUAL: Final[dict[Kind, Ground]] = {
    "return": "window_over",
    "exchange": "out_of_stock",
    "cancel": "too_late",
    "address": "too_late",
    "coupon": "too_late",
    "late": "already_done",
    "total": "not_your_order",
}


def at_once(task: str, call: Call, source: random.Random) -> float:
    """Finish without a word."""
    return float(call("finish", {}).reward or 0.0)


def refuse_all(task: str, call: Call, source: random.Random) -> float:
    """Refuse every request, on a ground that is drawn."""
    return _answer_all(task, call, lambda: ("refused", source.choice(get_args(Ground)[1:])))


def grant_all(task: str, call: Call, source: random.Random) -> float:
    """Say of every request that it is done, and do nothing."""
    return _answer_all(task, call, lambda: ("done", "none"))


def usual_refusal(task: str, call: Call, source: random.Random) -> float:
    """Verify the customer, and refuse every request, unseen, on the ground that is the commonest for its kind."""
    talk = Talk(call)
    facts = talk.facts(2)
    for customer in talk.use("find_customer", name=ask_name(talk)):
        if len(facts) == 2:
            talk.use("verify_identity", customer_id=customer["customer_id"], **facts)
    for wish in wishes(task):
        call("reply", {"request": wish.number, "decision": "refused", "ground": _USUAL[wish.kind]})
    return float(call("finish", {}).reward or 0.0)


def not_verified(task: str, call: Call, source: random.Random) -> float:
    """Take every customer for somebody else."""
    talk = Talk(call)
    for customer in talk.use("find_customer", name=ask_name(talk)):
        talk.use("add_note", customer_id=customer["customer_id"], kind="suspicious", text="")
    return _answer_all(task, call, lambda: ("refused", "not_verified"))


def random_calls(task: str, call: Call, source: random.Random) -> float:
    """Call tools with arguments of the right kind, drawn from what the task names, and finish."""
    total = 0.0
    words = [word.strip(".,?:") for word in task.split()]
    ids = [word for word in words if word.startswith("O") and word[1:].isdigit()]
    for _ in range(_CALLS):
        name, arguments = source.choice(_draw_calls(source, source.choice(ids or ["O1"]), task))
        total += float(call(name, arguments).reward or 0.0)
    return total + float(call("finish", {}).reward or 0.0)


BASELINES: Final[dict[str, Policy]] = {
    "finish at once": at_once,
    "refuse all": refuse_all,
    "refuse as usual": usual_refusal,
    "believe nobody": not_verified,
    "say that all is done": grant_all,
    "random calls": random_calls,
}


def _answer_all(task: str, call: Call, draw: Callable[[], tuple[str, str]]) -> float:
    for number in range(1, task.count("\nRequest ") + 1):
        decision, ground = draw()
        call("reply", {"request": number, "decision": decision, "ground": ground})
    return float(call("finish", {}).reward or 0.0)


def _draw_calls(source: random.Random, order: str, task: str) -> list[tuple[str, dict[str, Any]]]:
    number = source.randint(1, task.count("\nRequest "))
    decision, ground = source.choice(get_args(Decision)), source.choice(get_args(Ground))
    return [
        ("get_policy", {"topic": source.choice(TOPICS)}),
        ("ask_customer", {"topic": source.choice(get_args(Asked)), "request": number}),
        ("get_order", {"order_id": order}),
        ("return_items", {"order_id": order, "lines": [1], "reason": "changed_mind"}),
        ("cancel_order", {"order_id": order}),
        ("issue_refund", {"order_id": order, "amount": source.randint(5, 90), "method": "store_credit"}),
        ("reply", {"request": number, "decision": decision, "ground": ground}),
    ]
