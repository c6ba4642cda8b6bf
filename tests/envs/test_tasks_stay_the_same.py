"""Trained policies know these tasks, tools and prompts: a seed gives the same task byte for byte."""

import json
from hashlib import sha256
from typing import Any

import pytest

from envs.code_interpreter_env.grading import JsonlTasks
from envs.code_interpreter_env.server.environment import CodeInterpreterEnvironment
from envs.code_interpreter_env.server.settings import InterpreterSettings
from envs.code_interpreter_env.server.shared import SharedBackend
from envs.code_interpreter_env.tasks import SHIPPED
from envs.shop_env.server.environment import ShopEnvironment
from envs.sqlite_env.server.environment import SqliteEnvironment
from envs.sqlite_env.tasks import make_task as make_sqlite_task
from examples.grpo_blackjack import chat
from examples.grpo_code.family import make_task
from tests.envs.tool_calls import calls_of

SEEDS = range(200)


def digest(parts: list[Any]) -> str:
    return sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def result_of(world: Any, name: str, **arguments: Any) -> Any:
    return calls_of(world)(name, arguments).model_dump(mode="json")


def sqlite_task(world: SqliteEnvironment, seed: int, split: str) -> list[Any]:
    answer = make_sqlite_task(world.task_number(split, seed), held_out=split != "train").question.answer
    found = [world.get_task(split, seed), answer.kind, str(answer.value)]
    if seed % 10:
        return found
    seen = world.reset(seed=seed, split=split, episode_id="x")
    tables = [table["name"] for table in result_of(world, "list_tables")["result"]]
    described = [result_of(world, "describe_table", table=table) for table in tables]
    return [*found, seen.model_dump(mode="json"), world.state.model_dump(mode="json"), described]


def shop_task(world: ShopEnvironment, seed: int, split: str) -> list[Any]:
    seen = world.reset(seed=seed, split=split, episode_id="x")
    right = [[one.decision, one.ground, one.amount, repr(one.changes)] for one in world._expected_outcomes]
    topics = ("name", "email", "postcode", "phone", "order", "reason", "fallback", "address")
    found = [seen.model_dump(mode="json"), world.state.model_dump(mode="json"), right]
    return [
        *found,
        result_of(world, "get_policy", topic="returns"),
        *(result_of(world, "ask_customer", topic=one) for one in topics),
    ]


@pytest.mark.parametrize(
    ("world", "task", "split", "expected"),
    [
        pytest.param(SqliteEnvironment, sqlite_task, "train", "ea23c366997a13d9", marks=pytest.mark.slow),
        pytest.param(
            SqliteEnvironment, sqlite_task, "validation", "be8874c8b090bdd7", marks=pytest.mark.slow
        ),
        pytest.param(SqliteEnvironment, sqlite_task, "test", "7109159a31f090b8", marks=pytest.mark.slow),
        (ShopEnvironment, shop_task, "train", "f60908b7c9f287e1"),
        (ShopEnvironment, shop_task, "validation", "f6e1d9e77667745e"),
        (ShopEnvironment, shop_task, "test", "1a9a636e68f23a85"),
    ],
)
def test_a_seed_gives_the_task_that_it_always_gave(world: Any, task: Any, split: str, expected: str) -> None:
    environment = world()
    assert digest([task(environment, seed, split) for seed in SEEDS]) == expected
    environment.close()


def test_tools_prompts_and_shipped_tasks_are_those_that_policies_were_trained_with() -> None:
    def of(world: Any) -> list[Any]:
        tools = [one.wire().model_dump(mode="json") for one in world.list_tools()]
        return [*tools, *(one.to_mcp() for one in (*world.list_resources(), *world.list_prompts()))]

    house = SharedBackend(InterpreterSettings(tasks="none"))
    tasks = JsonlTasks(SHIPPED)
    assert {
        "sqlite": digest(of(SqliteEnvironment())),
        "shop": digest(of(ShopEnvironment())),
        "code": digest(of(CodeInterpreterEnvironment(house))),
        "shipped": digest(
            [tasks.get_task(split, at) for split in tasks.splits for at in range(tasks.num_tasks(split))]
        ),
        "family": digest(
            [
                make_task(seed, held_out=apart).model_dump(mode="json")
                for seed in SEEDS
                for apart in (False, True)
            ]
        ),
        "blackjack": digest(list(chat.render_prompts())),
    } == {
        "sqlite": "4210b72e396f4473",
        "shop": "f1a2e05e14328dd9",
        "code": "031a98c0a0345c21",
        "shipped": "b8819232e124cc87",
        "family": "94d955a88ae86c59",
        "blackjack": "53e51f5834ba95e9",
    }
