"""Properties that the shop and the database share as worlds of tools: seeds, calls, resets and ends."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from shop_baselines import BASELINES as SHOP_BASELINES
from shop_solver import solve as solve_shop
from sqlite_baselines import BASELINES as SQLITE_BASELINES
from sqlite_solver import solve as solve_sqlite

from envs import shop_env, sqlite_env
from envs.shop_env.server.environment import ShopEnvironment
from envs.sqlite_env.server.environment import SqliteEnvironment
from openenv_core.errors import EpisodeOverError
from openenv_core.tools import SILENT, CallToolObservation, ListToolsAction, ToolErrorType
from tests.envs.tool_calls import calls_of


@dataclass(frozen=True)
class Kind:
    environment: Any
    solve: Any
    refused: type[Exception]
    baselines: dict[str, Any]
    looks: list[tuple[str, dict[str, Any]]]
    """Calls that change nothing and end nothing."""
    ends: str
    tools: int
    impossible: list[tuple[str, dict[str, Any]]]


LONG = "x" * 1_000_000
SHOP = Kind(
    ShopEnvironment, solve_shop, shop_env.InvalidResetOptionError, SHOP_BASELINES,
    [("ask_customer", {"topic": "name"}), ("search_products", {"text": "toys"})], "finish", 22,
    [
        ("get_policy", {"topic": ["returns"]}), ("ask_customer", {"topic": "name", "request": 10**30}),
        ("ask_customer", {"topic": "name", "scenario": {}}), ("find_customer", {"name": LONG}),
        ("verify_identity", {"customer_id": "C1", "email": {"$ne": ""}}),
        ("get_product", {"product_id": "P99"}), ("get_coupon", {"code": "%"}), ("check_stock", {"sku": "' OR 1=1"}),
        ("return_items", {"order_id": "O1", "lines": [], "reason": "damaged"}),
        ("return_items", {"order_id": "O1", "lines": list(range(1000)), "reason": "damaged"}),
        ("reply", {"request": 9, "decision": "done"}), ("reply", {"request": 1, "decision": "granted"}),
        ("reply", {"request": 1, "decision": "done", "message": LONG}), ("finish", {"reward": 1}),
        ("add_note", {"customer_id": "C1", "kind": "suspicious", "text": "x"}), ("_earned", {}), (LONG, {}),
    ],
)  # fmt: skip
SQLITE = Kind(
    SqliteEnvironment, solve_sqlite, sqlite_env.InvalidResetOptionError, SQLITE_BASELINES,
    [("list_tables", {}), ("query", {"sql": "SELECT name, sql FROM sqlite_master"})], "submit_answer", 4,
    [
        ("query", {}), ("query", {"sql": ["SELECT 1"]}), ("query", {"sql": LONG}),
        ("query", {"sql": "SELECT 1", "self": 1}),
        ("describe_table", {"table": {"name": "staff"}}), ("describe_table", {"table": "staff; DROP TABLE staff"}),
        ("describe_table", {"table": "sqlite_master"}), ("describe_table", {"table": LONG}),
        ("list_tables", {"all": True}), ("submit_answer", {}), ("submit_answer", {"answer": True}),
        ("submit_answer", {"answer": [[["deep"]]]}), ("submit_answer", {"answer": {"a": {"b": 1}}}),
        ("__init__", {}), ("reset", {"seed": 1}), ("", {}), (LONG, {}),
    ],
)  # fmt: skip


@pytest.fixture(params=[SHOP, SQLITE], ids=["shop", "sqlite"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def world(kind: Kind) -> Iterator[Any]:
    found = kind.environment()
    yield found
    found.close()


@pytest.mark.parametrize("count", [4, pytest.param(300, marks=pytest.mark.soak)])
def test_the_solver_solves_tasks_of_every_split_and_level(kind: Kind, world: Any, count: int) -> None:
    places = range(count)
    options = [{"split": split, "index": at} for split in ("train", "validation", "test") for at in places]
    options += [{"difficulty": level, "index": at} for level in ("easy", "medium", "hard") for at in places]
    for option in options:
        assert kind.solve(world.reset(**option).task, calls_of(world)) == 1.0, option
        assert world.state.difficulty == option.get("difficulty", world.state.difficulty)


@pytest.mark.soak
def test_guessing_without_tools_earns_next_to_nothing(kind: Kind, world: Any) -> None:
    for name, policy in kind.baselines.items():
        source, call = random.Random(7), calls_of(world)
        earned = [policy(world.reset(split="test", index=index).task, call, source) for index in range(300)]
        # Two of the shop's do what is right wherever it happens to be what they always do.
        usual = name in ("refuse as usual", "believe nobody")
        assert sum(earned) / len(earned) < (0.05 if kind is SQLITE else 0.12 if usual else 0.02), name


def test_the_seed_and_the_calls_decide_everything(kind: Kind, world: Any) -> None:
    other = kind.environment()
    tasks = set()
    for seed in range(5):
        one, two = world.reset(seed=seed, episode_id="x"), other.reset(seed=seed, episode_id="x")
        assert one == two
        assert (world.state, world.state.index, world.state.split) == (other.state, seed, "train")
        for name, arguments in kind.looks:
            assert calls_of(world)(name, dict(arguments)) == calls_of(other)(name, dict(arguments))
        tasks.add(one.task)
    assert len(tasks) == 5
    assert world.reset(index=3).task == world.reset(seed=3).task == world.reset(seed=1_000_003).task
    unseeded = world.reset()
    assert world.reset(seed=world.state.seed).task == unseeded.task
    other.close()


def test_invalid_calls_cost_a_call_and_nothing_else(kind: Kind, world: Any) -> None:
    task = world.reset(seed=4, max_calls=200).task
    for count, (name, arguments) in enumerate(kind.impossible, 1):
        seen = calls_of(world)(name, arguments)
        assert seen.error is not None, name
        assert len(seen.error.message) < 2000
        assert (seen.reward, seen.done, world.state.step_count) == (0.0, False, count)
    assert kind.solve(task, calls_of(world)) == 1.0


def test_refused_reset_leaves_the_episode_unchanged(kind: Kind, world: Any) -> None:
    world.reset(seed=1)
    before = world.state
    values: dict[str, tuple[Any, ...]]
    values = {
        "seed": (-1, True, 1.5),
        "split": (["train"], "all"),
        "index": (1_000_000, "3"),
        "difficulty": ({},),
    }
    values |= {"max_calls": (0, "9", 201), "episode_id": (3,), "natural": (True,)}
    refused = [{name: value} for name in values for value in values[name]]
    for options in [*refused, {"split": "test", "index": 10_000}]:
        with pytest.raises(kind.refused):
            world.reset(**options)
        assert world.state == before
    name, arguments = kind.looks[0]
    assert calls_of(world)(name, arguments).error is None


def test_an_episode_ends_once_by_its_reward_or_its_calls(kind: Kind, world: Any) -> None:
    call = calls_of(world)
    name, arguments = kind.looks[0]
    with pytest.raises(EpisodeOverError):
        call(name, arguments)
    with pytest.raises(EpisodeOverError):
        world.read_resource("task://current", SILENT)
    assert len(world.step(ListToolsAction()).tools) == kind.tools
    seen = world.reset(index=1)
    assert world.read_resource("task://current", SILENT)[0]["text"] == seen.task
    assert world.get_prompt("task", {}, SILENT).messages[0]["content"]["text"] == seen.task
    calls: list[CallToolObservation] = []
    kind.solve(seen.task, lambda *call_arguments: calls.append(call(*call_arguments)) or calls[-1])
    assert (calls[-1].terminated, calls[-1].truncated) == (True, False)
    for tool in (kind.ends, name, "no_such_tool"):
        with pytest.raises(EpisodeOverError):
            call(tool, {})
    world.reset(index=1, max_calls=2)
    assert call(name, arguments).done is False
    last = call("no_such_tool", {})
    assert (last.terminated, last.truncated) == (False, True)
    assert (last.reward, last.done) == (0.0, True)
    assert last.error
    assert last.error.error_type is ToolErrorType.TOOL_NOT_FOUND
    with pytest.raises(EpisodeOverError):
        call(name, arguments)
    world.reset(index=1)
    world.close()
    world.close()
    with pytest.raises(EpisodeOverError):
        call(name, arguments)
