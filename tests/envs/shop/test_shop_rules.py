"""What counts as right: two ways to find it, and what happens where a conversation goes otherwise."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from envs.shop_env.server.environment import ShopEnvironment
from envs.shop_env.solver import solve
from envs.shop_env.tasks import make_task
from envs.shop_env.world.cases import CASES
from envs.shop_env.world.desk import Reply
from envs.shop_env.world.facts import differences
from envs.shop_env.world.judging import Score, judge
from envs.shop_env.world.rules import Verdict, verdicts
from openenv_core.tools import CallToolObservation
from tests.envs.tool_calls import calls_of

TWICE = {
    "issue_refund",
    "charge_customer",
    "give_credit",
    "return_items",
    "cancel_order",
    "apply_coupon",
    "exchange_item",
}
CHANGING = {*TWICE, "change_address", "escalate", "add_note", "reply"}


@pytest.fixture
def shop() -> Iterator[ShopEnvironment]:
    found = ShopEnvironment()
    yield found
    found.close()


def recorded(shop: ShopEnvironment, index: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls that solve a task."""
    calls: list[tuple[str, dict[str, Any]]] = []
    call = calls_of(shop)

    def note(name: str, arguments: dict[str, Any]) -> CallToolObservation:
        calls.append((name, arguments))
        return call(name, arguments)

    assert solve(shop.reset(index=index).task, note) == 1.0
    return calls


def replayed(shop: ShopEnvironment, index: int, calls: list[tuple[str, dict[str, Any]]]) -> float:
    call = calls_of(shop)
    shop.reset(index=index, max_calls=200)
    return sum(float(call(name, arguments).reward or 0.0) for name, arguments in calls)


def every_case(shop: ShopEnvironment, split: str, count: int) -> tuple[Counter[tuple[str, str]], list[int]]:
    seen: Counter[tuple[str, str]] = Counter()
    lengths = []
    for index in range(count):
        task = shop.reset(split=split, index=index).task
        assert shop._task is not None
        scenario = shop._task.scenario
        kinds = {(one.kind, one.case) for one in scenario.requests}
        assert solve(task, calls_of(shop)) == 1.0, (split, index, kinds)
        seen.update({("", "impostor")} if scenario.impostor else kinds)
        lengths.append(shop.state.step_count)
    return seen, lengths


def test_the_solver_comes_to_what_the_rules_say(shop: ShopEnvironment) -> None:
    for split in ("train", "validation", "test"):
        every_case(shop, split, 20)


@pytest.mark.soak
def test_the_solver_comes_to_what_the_rules_say_in_every_case(shop: ShopEnvironment) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    lengths: list[int] = []
    for split in ("train", "validation", "test"):
        counted, took = every_case(shop, split, 300)
        seen += counted
        lengths += took
    assert seen.keys() == {("", "impostor"), *((kind, case) for kind in CASES for case in CASES[kind][1])}
    assert min(seen.values()) >= 10
    assert (min(lengths) >= 8, max(lengths) <= 32) == (True, True)


def test_leaving_out_any_call_that_changes_something_costs(shop: ShopEnvironment) -> None:
    left_out = 0
    for index in range(12):
        calls = recorded(shop, index)
        assert replayed(shop, index, calls) == 1.0
        for place, (name, _) in enumerate(calls):
            if name in CHANGING:
                left_out += 1
                assert replayed(shop, index, calls[:place] + calls[place + 1 :]) < 1.0, (index, name)
    assert left_out > 30


def perturbed(name: str, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
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


def test_doing_it_otherwise_costs(shop: ShopEnvironment) -> None:
    tried: Counter[str] = Counter()
    for index in range(60):
        calls = recorded(shop, index)
        for place, (name, arguments) in enumerate(calls):
            for other in perturbed(name, arguments) if tried[name] < 3 else ():
                tried[name] += 1
                assert replayed(shop, index, [*calls[:place], (name, other), *calls[place + 1 :]]) < 1.0, (
                    other
                )
    assert {
        "reply",
        "issue_refund",
        "change_address",
        "give_credit",
        "escalate",
        "return_items",
    } <= tried.keys()


def test_twice_is_once_too_often(shop: ShopEnvironment) -> None:
    twice: Counter[str] = Counter()
    for index in range(100):
        calls = recorded(shop, index)
        for place, (name, _) in enumerate(calls):
            if name in TWICE and twice[name] < 4:
                shop.reset(index=index, max_calls=200)
                call = calls_of(shop)
                again = [call(*one) for one in [*calls[: place + 1], calls[place], *calls[place + 1 :]]]
                # What is left of the order was not enough, or it went through and is wrong.
                refused = again[place + 1].error is not None
                assert refused or name in ("issue_refund", "charge_customer", "give_credit")
                assert again[-1].reward == 1.0 if refused else float(again[-1].reward or 0.0) < 1.0
                twice[name] += 1
    assert min(twice["issue_refund"], twice["return_items"]) == 4
    assert twice.keys() == TWICE


def test_what_was_not_asked_for_costs(shop: ShopEnvironment) -> None:
    task = make_task(0, held_out=False)
    assert not task.scenario.impostor
    calls = recorded(shop, 0)
    *before, last = calls
    other = next(one for one in task.scenario.records.customers if one != task.scenario.customer_id)
    note = ("add_note", {"customer_id": other, "kind": "suspicious", "text": "why not"})
    free = ("add_note", {"customer_id": other, "kind": "other", "text": "nothing"})
    assert replayed(shop, 0, [*before, note, last]) <= 0.25
    assert replayed(shop, 0, [*before, free, last]) == 1.0


def test_a_reward_counts_replies_and_what_was_changed() -> None:
    verdicts = (Verdict("done", amount=500, changes={("credit", "O1"): 500}), Verdict("refused", "too_late"))
    paid, refused = Reply("done", "none", 500), Reply("refused", "too_late", 0)
    credit: dict[Any, Any] = {("credit", "O1"): 500}
    for replies, after, score, reward in (
        ({1: paid, 2: refused}, credit, (2, 0), 1.0),
        ({1: paid}, credit, (1, 0), 0.25),
        ({1: paid, 2: refused}, {}, (1, 0), 0.25),
        ({1: paid, 2: refused}, {("credit", "O1"): 600}, (1, 1), 0.0),
        ({1: paid, 2: refused}, {**credit, ("stock", "P01-RED"): 4}, (2, 1), 0.25),
        ({}, {}, (0, 0), 0.0),
    ):
        found = judge(verdicts, replies, {}, after)
        assert (found, found.reward) == (Score(score[0], 2, score[1]), reward)
    assert differences({("a",): 1, ("b",): 2}, {("b",): 3, ("c",): 4}) == {("a",): None, ("b",): 3, ("c",): 4}


@pytest.mark.soak
def test_no_answer_alone_is_right_often() -> None:
    words: dict[str, Counter[tuple[str, str, int]]] = {}
    total: Counter[str] = Counter()
    for number in range(500):
        scenario = make_task(number, held_out=False).scenario
        for asked, right in zip(scenario.requests, verdicts(scenario), strict=True):
            total[asked.kind] += 1
            if not right.changes:
                words.setdefault(asked.kind, Counter())[right.decision, right.ground, right.amount] += 1
    assert total.keys() == set(CASES)
    for kind, seen in words.items():
        assert max(seen.values()) / total[kind] < 0.22, (kind, seen.most_common(1))


def test_figures_of_the_policies_matter() -> None:
    scenarios = [make_task(number, held_out=False).scenario for number in range(80)]
    for figure in ("days", "exchange_days", "faulty_days", "late_days", "refund_limit"):
        different = 0
        for scenario in scenarios:
            now = getattr(scenario.policy, figure)
            policy = replace(scenario.policy, **{figure: now + 30 if figure == "late_days" else 0})
            different += verdicts(scenario) != verdicts(replace(scenario, policy=policy))
        assert different > 1, figure
