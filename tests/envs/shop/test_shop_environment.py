"""The environment in-process: what it hides, what it refuses, and what weak players earn."""

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from envs.shop_env.server.environment import ShopEnvironment
from envs.shop_env.solver import solve
from envs.shop_env.world.desk import TRIES
from envs.shop_env.world.facts import facts
from envs.shop_env.world.requests import Scenario
from envs.shop_env.world.speech import PHRASINGS
from envs.shop_env.world.words import Decision, Ground
from openenv_core.tools import CallToolObservation
from tests.envs.tool_calls import calls_of


@pytest.fixture
def shop() -> Iterator[ShopEnvironment]:
    found = ShopEnvironment()
    yield found
    found.close()


def scenario_of(shop: ShopEnvironment) -> Scenario:
    assert shop._task is not None
    return shop._task.scenario


def honest(shop: ShopEnvironment, **options: Any) -> Scenario:
    """Begin the first episode whose customer is who they say, and verify them."""
    index = 0
    while shop.reset(index=index, **options) and scenario_of(shop).impostor:
        index += 1
    scenario = scenario_of(shop)
    customer = scenario.records.customers[scenario.customer_id]
    told = {"customer_id": customer.id, "email": customer.email, "phone": customer.phone}
    assert calls_of(shop)("verify_identity", told).result == {"verified": True}
    return scenario


def test_splits_share_no_task(shop: ShopEnvironment) -> None:
    texts = [shop.get_task(split, index)["task"] for split in shop.SPLITS for index in range(20)]
    assert len(set(texts)) == 60
    assert shop.get_task("test", 9_999)["task"] == shop.reset(split="test", index=9_999).task
    held_out = [phrasings[-1].split("{")[0] for phrasings in PHRASINGS.values()]
    trained = "\n".join(shop.get_task("train", index)["task"] for index in range(60))
    assert [one for one in held_out if one and one in trained] == []
    tested = "\n".join(shop.get_task("test", index)["task"] for index in range(60))
    assert len([one for one in held_out if one and one in tested]) > 4


def test_nothing_hidden_is_told(shop: ShopEnvironment) -> None:
    for index in range(20):
        seen = shop.reset(index=index)
        scenario = scenario_of(shop)
        call = calls_of(shop)
        told = json.dumps(
            [
                seen.model_dump(),
                shop.state.model_dump(),
                [tool.wire().model_dump() for tool in shop.list_tools()],
                [one.to_mcp() for one in (*shop.list_resources(), *shop.list_prompts())],
                shop.get_task("train", index),
                [call("find_customer", {"name": letter}).model_dump() for letter in "aeiou"],
                call("search_products", {"text": "toys"}).model_dump(),
                call("finish", {}).model_dump(),
            ]
        )
        for customer in scenario.records.customers.values():
            assert all(fact not in told for fact in (customer.email, customer.phone))
            # A postcode is five digits, and so is many another thing: a word of its own.
            assert f'"{customer.postcode}"' not in told
        assert '"verdict' not in told
        assert '"case' not in told


def test_nothing_of_an_account_before_it_is_verified(shop: ShopEnvironment) -> None:
    shop.reset(index=0)
    scenario, call = scenario_of(shop), calls_of(shop)
    before = facts(scenario.records)
    order = next(one for one in scenario.records.orders.values() if one.customer_id == scenario.customer_id)
    for name, arguments in private(order.id, scenario.customer_id):
        seen = call(name, arguments)
        assert seen.error is not None, name
        assert "verif" in seen.error.message, name
    assert facts(scenario.records) == before


def test_nothing_is_said_to_somebody_who_is_not_verified(shop: ShopEnvironment) -> None:
    scenario = honest(shop, difficulty="easy")
    index = shop.state.index
    told = [(decision, ground) for decision in get_args(Decision) for ground in get_args(Ground)]
    shop.reset(index=index, difficulty="easy", max_calls=200)
    call = calls_of(shop)
    call("verify_identity", {"customer_id": scenario.customer_id, "email": "x", "phone": "y"})
    taken = [
        (decision, ground)
        for decision, ground in told
        if call("reply", {"request": 1, "decision": decision, "ground": ground}).error is None
    ]
    assert taken == [("refused", "not_verified")]
    honest(shop, difficulty="easy", max_calls=200)
    for decision, ground in told:
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
    scenario = honest(shop)
    before = facts(scenario.records)
    foreign = [one for one in scenario.records.orders.values() if one.customer_id != scenario.customer_id]
    assert len(foreign) > 3
    call = calls_of(shop)
    for name, arguments in private(foreign[0].id, foreign[0].customer_id):
        seen = call(name, arguments)
        assert seen.error is not None, name
    for forged in (foreign[1].id.lower(), f" {foreign[1].id} ", f"{foreign[1].id}\x00", "O", "", "O1; DROP"):
        assert call("get_order", {"order_id": forged}).error is not None
    assert facts(scenario.records) == before


def test_who_guesses_is_shut_out(shop: ShopEnvironment) -> None:
    shop.reset(index=0)
    scenario, call = scenario_of(shop), calls_of(shop)
    customer = scenario.records.customers[scenario.customer_id]
    right = {"email": customer.email, "postcode": customer.postcode, "phone": customer.phone}
    wrong: list[dict[str, str]] = [
        {},
        {"email": customer.email},
        {**right, "phone": "0"},
        {"email": "", "postcode": "", "phone": ""},
        {"postcode": f"{customer.postcode}0", "phone": customer.phone},
    ]
    assert len(wrong) == TRIES
    for told in wrong:
        assert call("verify_identity", {"customer_id": customer.id, **told}).result == {"verified": False}
    seen = call("verify_identity", {"customer_id": customer.id, **right})
    assert seen.error is not None
    shop.reset(index=0)
    loose = {"email": customer.email.upper(), "phone": customer.phone.replace(" ", "")}
    assert call("verify_identity", {"customer_id": customer.id.lower(), **loose}).result == {"verified": True}


def test_money_has_bounds(shop: ShopEnvironment) -> None:
    scenario = honest(shop, max_calls=200)
    order = next(one for one in scenario.records.orders.values() if one.customer_id == scenario.customer_id)
    call = calls_of(shop)
    paid = (order.paid - sum(order.refunds.values())) / 100

    def refund(amount: Any, method: str = order.payment) -> CallToolObservation:
        return call("issue_refund", {"order_id": order.id, "amount": amount, "method": method})

    before = facts(scenario.records)
    for amount in (0, -5, 0.001, 1.005, paid + 0.01, 1e300, "5", None, True, float("nan"), float("inf")):
        assert refund(amount).error is not None, amount
    assert refund(1, "visa-0000").error is not None
    assert facts(scenario.records) == before
    assert refund(paid).error is None
    assert refund(0.01).error is not None  # nothing is left
    assert call("give_credit", {"order_id": order.id, "amount": 100.01}).error is not None
    for amount in (float("nan"), 1e9, "1"):
        assert call("reply", {"request": 1, "decision": "done", "amount": amount}).error is not None


def test_a_reset_forgets_what_the_last_episode_changed(shop: ShopEnvironment) -> None:
    first = shop.reset(index=0)
    before = facts(scenario_of(shop).records)
    solve(first.task, calls_of(shop))
    assert facts(scenario_of(shop).records) != before or not any(one.changes for one in shop._verdicts)
    assert shop.reset(index=0) == first
    assert facts(scenario_of(shop).records) == before
    seen = shop.reset(seed=2, difficulty="hard")
    assert (seen.requests, seen.difficulty) == (3, "hard")
