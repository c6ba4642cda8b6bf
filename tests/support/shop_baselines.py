"""Baseline policies that have learned nothing."""

import random
from collections.abc import Callable
from typing import Any, Final, get_args

from shop_solver import DeskUser, ask_name, parse_requests
from tool_policies import Call, Policy

from envs.shop_env.world.cases import Kind
from envs.shop_env.world.records import TOPICS, CustomerTopic, Decision, Ground

_CALLS: Final = 30

_USUAL_GROUNDS: Final[dict[Kind, Ground]] = {
    "return": "window_over",
    "exchange": "out_of_stock",
    "cancel": "too_late",
    "address": "too_late",
    "coupon": "too_late",
    "late": "already_done",
    "total": "not_your_order",
}


def finish_at_once(task: str, call: Call, source: random.Random) -> float:
    """Finish without replying."""
    return float(call("finish", {}).reward or 0.0)


def refuse_all(task: str, call: Call, source: random.Random) -> float:
    """Refuse every request with a random ground."""
    return _answer_all(task, call, lambda: ("refused", source.choice(get_args(Ground)[1:])))


def grant_all(task: str, call: Call, source: random.Random) -> float:
    """Reply to every request that it is done, without doing anything."""
    return _answer_all(task, call, lambda: ("done", "none"))


def refuse_as_usual(task: str, call: Call, source: random.Random) -> float:
    """Verify the customer, and refuse every request with the commonest ground for its kind."""
    desk = DeskUser(call)
    facts = desk.collect_facts(2)
    for customer in desk.use("find_customer", name=ask_name(desk)):
        if len(facts) == 2:
            desk.use("verify_identity", customer_id=customer["customer_id"], **facts)
    for request in parse_requests(task):
        call(
            "reply",
            {"request": request.number, "decision": "refused", "ground": _USUAL_GROUNDS[request.kind]},
        )
    return float(call("finish", {}).reward or 0.0)


def suspect_everybody(task: str, call: Call, source: random.Random) -> float:
    """Treat every customer as an impostor."""
    desk = DeskUser(call)
    for customer in desk.use("find_customer", name=ask_name(desk)):
        desk.use("add_note", customer_id=customer["customer_id"], kind="suspicious", text="")
    return _answer_all(task, call, lambda: ("refused", "not_verified"))


def random_calls(task: str, call: Call, source: random.Random) -> float:
    """Call random tools with valid arguments, using order ids from the task, and finish."""
    total = 0.0
    words = [word.strip(".,?:") for word in task.split()]
    ids = [word for word in words if word.startswith("O") and word[1:].isdigit()]
    for _ in range(_CALLS):
        name, arguments = source.choice(_draw_calls(source, source.choice(ids or ["O1"]), task))
        total += float(call(name, arguments).reward or 0.0)
    return total + float(call("finish", {}).reward or 0.0)


BASELINES: Final[dict[str, Policy]] = {
    "finish at once": finish_at_once,
    "refuse all": refuse_all,
    "refuse as usual": refuse_as_usual,
    "believe nobody": suspect_everybody,
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
        ("ask_customer", {"topic": source.choice(get_args(CustomerTopic)), "request": number}),
        ("get_order", {"order_id": order}),
        ("return_items", {"order_id": order, "lines": [1], "reason": "changed_mind"}),
        ("cancel_order", {"order_id": order}),
        ("issue_refund", {"order_id": order, "amount": source.randint(5, 90), "method": "store_credit"}),
        ("reply", {"request": number, "decision": decision, "ground": ground}),
    ]
