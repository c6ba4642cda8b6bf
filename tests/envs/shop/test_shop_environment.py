"""The environment in-process: what it hides, what it refuses, and what weak players earn."""

import json
import random
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from envs.shop_env import InvalidResetOption
from envs.shop_env.baselines import BASELINES
from envs.shop_env.server.environment import ShopEnvironment
from envs.shop_env.solver import solve
from envs.shop_env.world.desk import TRIES
from envs.shop_env.world.facts import facts
from envs.shop_env.world.requests import Scenario
from envs.shop_env.world.speech import PHRASINGS
from envs.shop_env.world.words import Decision, Ground
from openenv_core.errors import EpisodeOver
from openenv_core.tools import SILENT, CallToolObservation, ListToolsAction, ToolErrorType
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


@pytest.mark.soak
def test_who_does_not_look_earns_next_to_nothing(shop: ShopEnvironment) -> None:
    for name, policy in BASELINES.items():
        source, call = random.Random(7), calls_of(shop)
        earned = [policy(shop.reset(split="test", index=index).task, call, source) for index in range(300)]
        # Two of them do what is right wherever it happens to be what they always do.
        most = 0.12 if name in ("refuse as usual", "believe nobody") else 0.02
        assert sum(earned) / len(earned) < most, name


def test_the_seed_and_the_calls_decide_everything(shop: ShopEnvironment) -> None:
    other = ShopEnvironment()
    for seed in range(5):
        one, two = shop.reset(seed=seed, episode_id="x"), other.reset(seed=seed, episode_id="x")
        assert one == two
        assert (shop.state, shop.state.index) == (other.state, seed)
        for name, arguments in (("ask_customer", {"topic": "name"}), ("search_products", {"text": "toys"})):
            assert calls_of(shop)(name, dict(arguments)) == calls_of(other)(name, dict(arguments))
    drawn = shop.reset()
    assert shop.reset(seed=shop.state.seed).task == drawn.task
    # A reset forgets what the last episode changed.
    first = shop.reset(index=0)
    before = facts(scenario_of(shop).records)
    solve(first.task, calls_of(shop))
    assert facts(scenario_of(shop).records) != before or not any(one.changes for one in shop._verdicts)
    assert shop.reset(index=0) == first
    assert facts(scenario_of(shop).records) == before


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


IMPOSSIBLE: list[tuple[str, dict[str, Any]]] = [
    ("get_policy", {"topic": ["returns"]}),
    ("ask_customer", {"topic": "name", "request": 10**30}),
    ("ask_customer", {"topic": "name", "scenario": {}}),
    ("find_customer", {"name": "x" * 1_000_000}),
    ("verify_identity", {"customer_id": "C1", "email": {"$ne": ""}}),
    ("verify_identity", {"customer_id": "nobody"}),
    ("get_product", {"product_id": "P99"}),
    ("get_coupon", {"code": "%"}),
    ("check_stock", {"sku": "' OR 1=1"}),
    ("return_items", {"order_id": "O1", "lines": [], "reason": "damaged"}),
    ("return_items", {"order_id": "O1", "lines": list(range(1000)), "reason": "damaged"}),
    ("reply", {"request": 9, "decision": "done"}),
    ("reply", {"request": 1, "decision": "granted"}),
    ("reply", {"request": 1, "decision": "done", "message": "x" * 100_000}),
    ("finish", {"reward": 1}),
    ("add_note", {"customer_id": "C1", "kind": "suspicious", "text": "x"}),
    ("_earned", {}),
    ("x" * 100_000, {}),
]


def test_calls_that_cannot_be_made_cost_a_call_and_nothing_else(shop: ShopEnvironment) -> None:
    task = shop.reset(seed=4, max_calls=200).task
    before = facts(scenario_of(shop).records)
    for count, (name, arguments) in enumerate(IMPOSSIBLE, 1):
        seen = calls_of(shop)(name, arguments)
        assert seen.error is not None, name
        assert len(seen.error.message) < 2000
        assert (seen.reward, seen.done, shop.state.step_count) == (0.0, False, count)
    assert facts(scenario_of(shop).records) == before
    assert solve(task, calls_of(shop)) == 1.0


def test_the_end_is_the_end(shop: ShopEnvironment) -> None:
    call = calls_of(shop)
    solve(shop.reset(index=1).task, call)
    for name in ("finish", "reply", "no_such_tool"):
        with pytest.raises(EpisodeOver):
            call(name, {})
    shop.reset(index=1, max_calls=2)
    assert call("get_policy", {"topic": "returns"}).done is False
    last = call("no_such_tool", {})
    assert (last.reward, last.done) == (0.0, True)
    assert last.error is not None
    assert last.error.error_type is ToolErrorType.TOOL_NOT_FOUND
    with pytest.raises(EpisodeOver):
        call("finish", {})
    shop.reset(index=1, max_calls=1)
    assert call("finish", {}).done


def test_a_reset_that_cannot_be_leaves_the_episode_as_it_was(shop: ShopEnvironment) -> None:
    shop.reset(seed=1)
    before = shop.state
    refused: list[dict[str, Any]] = [{"seed": -1}, {"seed": True}, {"split": "all"}, {"index": 1_000_000}]
    refused += [
        {"difficulty": {}},
        {"max_calls": 0},
        {"max_calls": "9"},
        {"episode_id": 3},
        {"impostor": True},
    ]
    for options in refused:
        with pytest.raises(InvalidResetOption):
            shop.reset(**options)
        assert shop.state == before
    assert calls_of(shop)("ask_customer", {"topic": "name"}).error is None


def test_before_a_reset_and_after_close_there_is_nothing_to_call(shop: ShopEnvironment) -> None:
    with pytest.raises(EpisodeOver):
        calls_of(shop)("get_policy", {"topic": "returns"})
    with pytest.raises(EpisodeOver):
        shop.read_resource("task://current", SILENT)
    assert len(shop.step(ListToolsAction()).tools) == 22
    seen = shop.reset(seed=2, difficulty="hard")
    assert (seen.requests, seen.difficulty) == (3, "hard")
    assert shop.read_resource("task://current", SILENT)[0]["text"] == seen.task
    assert shop.get_prompt("task", {}, SILENT).messages[0]["content"]["text"] == seen.task
    shop.close()
    shop.close()
    with pytest.raises(EpisodeOver):
        calls_of(shop)("get_policy", {"topic": "returns"})
