"""The shop: secrecy, verification and limits, and the cost of any deviation from the solution."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
from shop_solver import solve

from envs.shop_env.server.environment import MAX_TRIES, ShopEnvironment
from envs.shop_env.tasks import make_task
from envs.shop_env.world.cases import CASES, Scenario
from envs.shop_env.world.records import Decision, Ground, Order
from envs.shop_env.world.rules import (
    DeskReply,
    ExpectedOutcome,
    Score,
    collect_facts,
    determine_outcomes,
    find_changes,
    judge,
)
from envs.shop_env.world.speech import PHRASINGS
from openenv_core.tools import CallToolObservation
from tests.envs.tool_calls import calls_of, visible_in


@pytest.fixture
def shop() -> Iterator[ShopEnvironment]:
    found = ShopEnvironment()
    yield found
    found.close()


def scenario_of(shop: ShopEnvironment) -> Scenario:
    assert shop._task is not None
    return shop._task.scenario


def honest(shop: ShopEnvironment, **options: Any) -> tuple[Scenario, Order]:
    """Begin the first episode whose customer is who they say, and verify them; return it with an order of theirs."""
    index = 0
    while shop.reset(index=index, **options) and scenario_of(shop).impostor:
        index += 1
    scenario = scenario_of(shop)
    customer = scenario.records.customers[scenario.customer_id]
    identity = {"customer_id": customer.id, "email": customer.email, "phone": customer.phone}
    assert calls_of(shop)("verify_identity", identity).result == {"verified": True}
    return scenario, next(
        order for order in scenario.records.orders.values() if order.customer_id == customer.id
    )


def test_held_out_phrasings_are_never_used_in_training(shop: ShopEnvironment) -> None:
    held_out = [phrasings[-1].split("{")[0] for phrasings in PHRASINGS.values()]
    trained = "\n".join(shop.get_task("train", index)["task"] for index in range(60))
    assert [one for one in held_out if one and one in trained] == []
    tested = "\n".join(shop.get_task("test", index)["task"] for index in range(60))
    assert len([one for one in held_out if one and one in tested]) > 4


def test_tasks_reveal_nothing_hidden(shop: ShopEnvironment) -> None:
    for index in range(20):
        seen = shop.reset(index=index)
        scenario = scenario_of(shop)
        call = calls_of(shop)
        visible = visible_in(shop, seen, index) + json.dumps(
            [call("find_customer", {"name": letter}).model_dump() for letter in "aeiou"]
            + [call("search_products", {"text": "toys"}).model_dump(), call("finish", {}).model_dump()]
        )
        for customer in scenario.records.customers.values():
            assert all(fact not in visible for fact in (customer.email, customer.phone))
            # A postcode is five digits, and so is many another thing: a word of its own.
            assert f'"{customer.postcode}"' not in visible
        assert '"verdict' not in visible
        assert '"case' not in visible


def test_account_is_hidden_until_verified(shop: ShopEnvironment) -> None:
    shop.reset(index=0)
    scenario, call = scenario_of(shop), calls_of(shop)
    before = collect_facts(scenario.records)
    order = next(one for one in scenario.records.orders.values() if one.customer_id == scenario.customer_id)
    for name, arguments in private(order.id, scenario.customer_id):
        seen = call(name, arguments)
        assert seen.error is not None, name
        assert "verif" in seen.error.message, name
    assert collect_facts(scenario.records) == before


def test_only_refusals_are_accepted_for_an_unverified_customer(shop: ShopEnvironment) -> None:
    scenario, _ = honest(shop, difficulty="easy")
    index = shop.state.index
    replies = [(decision, ground) for decision in get_args(Decision) for ground in get_args(Ground)]
    shop.reset(index=index, difficulty="easy", max_calls=200)
    call = calls_of(shop)
    call("verify_identity", {"customer_id": scenario.customer_id, "email": "x", "phone": "y"})
    accepted = [
        (decision, ground)
        for decision, ground in replies
        if call("reply", {"request": 1, "decision": decision, "ground": ground}).error is None
    ]
    assert accepted == [("refused", "not_verified")]
    honest(shop, difficulty="easy", max_calls=200)
    for decision, ground in replies:
        assert call("reply", {"request": 1, "decision": decision, "ground": ground}).error is None


def private(order: str, customer: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("get_customer", {"customer_id": customer}),
        ("get_order", {"order_id": order}),
        ("return_items", {"order_id": order, "lines": [1], "reason": "damaged"}),
        ("exchange_item", {"order_id": order, "line": 1, "new_sku": "P01-RED"}),
        ("cancel_order", {"order_id": order}),
        ("change_address", {"order_id": order, "street": "a", "postcode": "b", "city": "c"}),
        ("apply_coupon", {"order_id": order, "code": "SAVE5A"}),
        ("issue_refund", {"order_id": order, "amount": 1, "method": "store_credit"}),
        ("charge_customer", {"order_id": order, "amount": 1, "method": "store_credit"}),
        ("give_credit", {"order_id": order, "amount": 1}),
        ("escalate", {"order_id": order, "reason": "other"}),
    ]


def test_another_customers_orders_stay_theirs(shop: ShopEnvironment) -> None:
    scenario, _ = honest(shop)
    before = collect_facts(scenario.records)
    foreign = [one for one in scenario.records.orders.values() if one.customer_id != scenario.customer_id]
    assert len(foreign) > 3
    call = calls_of(shop)
    for name, arguments in private(foreign[0].id, foreign[0].customer_id):
        seen = call(name, arguments)
        assert seen.error is not None, name
    for forged in (foreign[1].id.lower(), f" {foreign[1].id} ", f"{foreign[1].id}\x00", "O", "", "O1; DROP"):
        assert call("get_order", {"order_id": forged}).error is not None
    assert collect_facts(scenario.records) == before


def test_guessing_the_identity_locks_the_account(shop: ShopEnvironment) -> None:
    shop.reset(index=0)
    scenario, call = scenario_of(shop), calls_of(shop)
    customer = scenario.records.customers[scenario.customer_id]
    right = {"email": customer.email, "postcode": customer.postcode, "phone": customer.phone}
    wrong: list[dict[str, str]] = [{}, {"email": customer.email}, {**right, "phone": "0"}]
    wrong += [dict.fromkeys(right, ""), {"postcode": f"{customer.postcode}0", "phone": customer.phone}]
    assert len(wrong) == MAX_TRIES
    for guess in wrong:
        assert call("verify_identity", {"customer_id": customer.id, **guess}).result == {"verified": False}
    seen = call("verify_identity", {"customer_id": customer.id, **right})
    assert seen.error is not None
    shop.reset(index=0)
    loose = {"email": customer.email.upper(), "phone": customer.phone.replace(" ", "")}
    assert call("verify_identity", {"customer_id": customer.id.lower(), **loose}).result == {"verified": True}


def test_money_has_bounds(shop: ShopEnvironment) -> None:
    scenario, order = honest(shop, max_calls=200)
    call = calls_of(shop)
    paid = (order.paid - sum(order.refunds.values())) / 100

    def refund(amount: Any, method: str = order.payment) -> CallToolObservation:
        return call("issue_refund", {"order_id": order.id, "amount": amount, "method": method})

    before = collect_facts(scenario.records)
    for amount in (0, -5, 0.001, 1.005, paid + 0.01, 1e300, "5", None, True, float("nan"), float("inf")):
        assert refund(amount).error is not None, amount
    assert refund(1, "visa-0000").error is not None
    assert collect_facts(scenario.records) == before
    assert refund(paid).error is None
    assert refund(0.01).error is not None  # nothing is left
    assert call("give_credit", {"order_id": order.id, "amount": 100.01}).error is not None
    for amount in (float("nan"), 1e9, "1"):
        assert call("reply", {"request": 1, "decision": "done", "amount": amount}).error is not None


def test_a_reset_forgets_what_the_last_episode_changed(shop: ShopEnvironment) -> None:
    first = shop.reset(index=0)
    before = collect_facts(scenario_of(shop).records)
    solve(first.task, calls_of(shop))
    changes = any(one.changes for one in shop._expected_outcomes)
    assert collect_facts(scenario_of(shop).records) != before or not changes
    assert shop.reset(index=0) == first
    assert collect_facts(scenario_of(shop).records) == before
    seen = shop.reset(seed=2, difficulty="hard")
    assert (seen.requests, seen.difficulty) == (3, "hard")


MONEY = {"issue_refund", "charge_customer", "give_credit"}
TWICE = {*MONEY, "return_items", "cancel_order", "apply_coupon", "exchange_item"}
CHANGING = {*TWICE, "change_address", "escalate", "add_note", "reply"}


def record_calls(shop: ShopEnvironment, index: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls that solve a task."""
    calls: list[tuple[str, dict[str, Any]]] = []
    call = calls_of(shop)

    def note(name: str, arguments: dict[str, Any]) -> CallToolObservation:
        calls.append((name, arguments))
        return call(name, arguments)

    assert solve(shop.reset(index=index).task, note) == 1.0
    return calls


def replay(shop: ShopEnvironment, index: int, calls: list[tuple[str, dict[str, Any]]]) -> float:
    call = calls_of(shop)
    shop.reset(index=index, max_calls=200)
    return sum(float(call(name, arguments).reward or 0.0) for name, arguments in calls)


@pytest.mark.soak
def test_every_case_is_asked_for(shop: ShopEnvironment) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    for split, index in product(("train", "validation", "test"), range(300)):
        shop.reset(split=split, index=index)
        scenario = scenario_of(shop)
        kinds = {(one.kind, one.case) for one in scenario.requests}
        seen.update({("", "impostor")} if scenario.impostor else kinds)
    assert seen.keys() == {("", "impostor"), *((kind, case) for kind in CASES for case in CASES[kind][1])}
    assert min(seen.values()) >= 10


def test_leaving_out_any_call_that_changes_something_costs(shop: ShopEnvironment) -> None:
    left_out = 0
    for index in range(12):
        calls = record_calls(shop, index)
        assert replay(shop, index, calls) == 1.0
        for place, (name, _) in enumerate(calls):
            if name in CHANGING:
                left_out += 1
                assert replay(shop, index, calls[:place] + calls[place + 1 :]) < 1.0, (index, name)
    assert left_out > 30


def perturb(name: str, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if name == "reply":
        yield {**arguments, "amount": arguments["amount"] + 0.01}
        yield {**arguments, "ground": "expired" if arguments["ground"] != "expired" else "too_late"}
        yield {**arguments, "decision": "done" if arguments["decision"] != "done" else "partly"}
    if name in ("issue_refund", "charge_customer"):
        yield {**arguments, "amount": arguments["amount"] - 0.01}
        yield {**arguments, "method": "store_credit" if arguments["method"] != "store_credit" else "paypal"}
    if name == "change_address":
        yield {**arguments, "street": arguments["street"] + "1"}
    if name == "give_credit":
        yield {**arguments, "amount": arguments["amount"] + 1}
    if name == "escalate":
        yield {**arguments, "reason": "other"}
    if name == "add_note":
        yield {**arguments, "kind": "other"}
    if name == "return_items" and arguments["reason"] != "damaged":
        yield {**arguments, "reason": "damaged"}


def test_solving_it_otherwise_costs_reward(shop: ShopEnvironment) -> None:
    tried: Counter[str] = Counter()
    for index in range(60):
        calls = record_calls(shop, index)
        for place, (name, arguments) in enumerate(calls):
            for other in perturb(name, arguments) if tried[name] < 3 else ():
                tried[name] += 1
                assert replay(shop, index, [*calls[:place], (name, other), *calls[place + 1 :]]) < 1.0, other
    assert {"reply", "issue_refund", "change_address", "give_credit"} <= tried.keys()
    assert {"escalate", "return_items"} <= tried.keys()


def test_repeated_actions_cost_reward(shop: ShopEnvironment) -> None:
    twice: Counter[str] = Counter()
    for index in range(100):
        calls = record_calls(shop, index)
        for place, (name, _) in enumerate(calls):
            if name in TWICE and twice[name] < 4:
                shop.reset(index=index, max_calls=200)
                call = calls_of(shop)
                again = [call(*one) for one in [*calls[: place + 1], calls[place], *calls[place + 1 :]]]
                # What is left of the order was not enough, or it went through and is wrong.
                refused = again[place + 1].error is not None
                assert refused or name in MONEY
                assert again[-1].reward == 1.0 if refused else float(again[-1].reward or 0.0) < 1.0
                twice[name] += 1
    assert min(twice["issue_refund"], twice["return_items"]) == 4
    assert twice.keys() == TWICE


def test_unrequested_changes_cost_reward(shop: ShopEnvironment) -> None:
    task = make_task(0, held_out=False)
    assert not task.scenario.impostor
    calls = record_calls(shop, 0)
    *before, last = calls
    other = next(one for one in task.scenario.records.customers if one != task.scenario.customer_id)
    note = ("add_note", {"customer_id": other, "kind": "suspicious", "text": "why not"})
    free = ("add_note", {"customer_id": other, "kind": "other", "text": "nothing"})
    assert replay(shop, 0, [*before, note, last]) <= 0.25
    assert replay(shop, 0, [*before, free, last]) == 1.0


def test_a_reward_counts_replies_and_what_was_changed() -> None:
    determine_outcomes = (
        ExpectedOutcome("done", amount=500, changes={("credit", "O1"): 500}),
        ExpectedOutcome("refused", "too_late"),
    )
    paid, refused = DeskReply("done", "none", 500), DeskReply("refused", "too_late", 0)
    credit: dict[Any, Any] = {("credit", "O1"): 500}
    cases: list[tuple[Any, Any, tuple[int, int], float]] = [
        ({1: paid, 2: refused}, credit, (2, 0), 1.0),
        ({1: paid}, credit, (1, 0), 0.25),
        ({1: paid, 2: refused}, {}, (1, 0), 0.25),
        ({1: paid, 2: refused}, {("credit", "O1"): 600}, (1, 1), 0.0),
        ({1: paid, 2: refused}, {**credit, ("stock", "P01-RED"): 4}, (2, 1), 0.25),
        ({}, {}, (0, 0), 0.0),
    ]
    for replies, after, score, reward in cases:
        found = judge(determine_outcomes, replies, {}, after)
        assert (found, found.reward) == (Score(score[0], 2, score[1]), reward)
    changes = find_changes({("a",): 1, ("b",): 2}, {("b",): 3, ("c",): 4})
    assert changes == {("a",): None, ("b",): 3, ("c",): 4}


def test_numbers_of_the_policies_decide() -> None:
    scenarios = [make_task(number, held_out=False).scenario for number in range(80)]
    for figure in ("days", "exchange_days", "faulty_days", "late_days", "refund_limit"):
        different = 0
        for scenario in scenarios:
            now = getattr(scenario.policy, figure)
            policy = replace(scenario.policy, **{figure: now + 30 if figure == "late_days" else 0})
            different += determine_outcomes(scenario) != determine_outcomes(replace(scenario, policy=policy))
        assert different > 1, figure
