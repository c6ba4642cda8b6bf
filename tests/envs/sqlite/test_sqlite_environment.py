"""The environment in-process: who solves it, what it hides, what it refuses."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from envs.sqlite_env import InvalidResetOption
from envs.sqlite_env.baselines import BASELINES
from envs.sqlite_env.measure import commonest
from envs.sqlite_env.questions import FAMILIES, Kind
from envs.sqlite_env.server.environment import SqliteEnvironment
from envs.sqlite_env.solver import solve
from openenv_core.errors import EpisodeOver
from openenv_core.tools import (
    SILENT,
    ListToolsAction,
    ToolErrorType,
    ToolFailed,
)
from tests.envs.tool_calls import calls_of


@pytest.fixture
def world() -> Iterator[SqliteEnvironment]:
    found = SqliteEnvironment()
    yield found
    found.close()


def hidden(world: SqliteEnvironment) -> Any:
    assert world._task is not None
    return world._task.question.answer


def test_the_solver_solves_tasks_of_every_split_and_level(world: SqliteEnvironment) -> None:
    for split in ("train", "validation", "test"):
        for index in range(4):
            assert solve(world.reset(split=split, index=index).task, calls_of(world)) == 1.0
    for level in ("easy", "medium", "hard"):
        for index in range(3):
            task = world.reset(index=index, difficulty=level).task
            assert (world.state.difficulty, solve(task, calls_of(world))) == (level, 1.0)
    assert world.state.step_count <= 10


@pytest.mark.soak
def test_the_solver_solves_every_task_of_many(world: SqliteEnvironment) -> None:
    seen: Counter[str] = Counter()
    for split in ("train", "validation", "test"):
        for index in range(300):
            task = world.reset(split=split, index=index).task
            assert world._task is not None
            seen[world._task.question.family] += 1
            assert solve(task, calls_of(world)) == 1.0, (split, index)
    assert seen.keys() == FAMILIES.keys()


@pytest.mark.soak
def test_who_does_not_look_earns_next_to_nothing(world: SqliteEnvironment) -> None:
    for name, policy in BASELINES.items():
        source, call = random.Random(7), calls_of(world)
        earned = [policy(world.reset(split="test", index=index).task, call, source) for index in range(150)]
        assert sum(earned) / len(earned) < 0.05, name
    assert commonest("test", 200, learned=800) < 0.12


def test_the_seed_and_the_calls_decide_everything(world: SqliteEnvironment) -> None:
    other = SqliteEnvironment()
    asked = set()
    for seed in range(6):
        one, two = world.reset(seed=seed, episode_id="x"), other.reset(seed=seed, episode_id="x")
        assert one == two
        assert (world.state, world.state.index, world.state.split) == (other.state, seed, "train")
        sql = {"sql": "SELECT name, sql FROM sqlite_master"}
        assert calls_of(world)("query", dict(sql)) == calls_of(other)("query", dict(sql))
        asked.add(one.task)
    assert len(asked) == 6
    assert world.reset(index=3).task == world.reset(seed=3).task == world.reset(seed=1_000_003).task
    drawn = world.reset()
    assert world.reset(seed=world.state.seed).question == drawn.question
    other.close()


def test_names_differ_from_database_to_database(world: SqliteEnvironment) -> None:
    seen: dict[str, set[str]] = {}
    for index in range(10):
        world.reset(index=index)
        assert world._task is not None
        for table in world._task.world.naming.values():
            seen.setdefault(f"{table.role} table", set()).add(table.name)
            for column in table.columns:
                seen.setdefault(column.role, set()).add(column.name)
    assert all(len(seen[role]) >= 3 for role in ("people table", "event.day", "person.id", "event.person"))


def test_splits_share_no_task(world: SqliteEnvironment) -> None:
    numbers = [
        world.task_number(split, at) for split in world.SPLITS for at in (0, world.num_tasks(split) - 1)
    ]
    assert numbers == [0, 999_999, 1_000_000, 1_009_999, 1_010_000, 1_019_999]
    texts = [world.get_task(split, index)["task"] for split in world.SPLITS for index in range(4)]
    assert len(set(texts)) == 12
    told = world.get_task("test", 9_999)
    assert told["question"] == world.reset(split="test", index=9_999).question
    assert [one["index"] for one in world.get_task_range("train", 3, 6)] == [3, 4, 5]
    for wrong, error in (
        (("train", 1_000_000), IndexError),
        (("train", -1), IndexError),
        (("all", 0), KeyError),
    ):
        with pytest.raises(error):
            world.get_task(*wrong)
    with pytest.raises(ValueError, match="at most"):
        world.get_task_range("train")


def test_answers_are_nowhere_to_be_seen(world: SqliteEnvironment) -> None:
    # What is asked for by date may be the day of the task, which is told.
    looked = 0
    for index in range(30):
        seen = world.reset(index=index)
        answer = hidden(world)
        if answer.kind is not Kind.TEXT or answer.value[:2] == "20":
            continue
        looked += 1
        told = [
            seen.model_dump(),
            world.state.model_dump(),
            [tool.wire().model_dump() for tool in world.list_tools()],
            [one.to_mcp() for one in (*world.list_resources(), *world.list_prompts())],
            world.get_task("train", index),
            world.get_metadata().model_dump(),
            calls_of(world)("list_tables", {}).model_dump(),
            calls_of(world)("submit_answer", {"answer": "nothing of the kind"}).model_dump(),
        ]
        assert answer.value not in json.dumps(told), seen.question
    assert looked > 3


def test_the_answer_is_taken_once_and_calls_run_out(world: SqliteEnvironment) -> None:
    call = calls_of(world)
    for given, reward, said in ((True, 1.0, "right"), (False, 0.0, "wrong")):
        world.reset(seed=1)
        answer = hidden(world).value if given else "no"
        seen = call("submit_answer", {"answer": answer if isinstance(answer, str) else float(answer)})
        assert (seen.reward, seen.done, seen.result, world.state.done) == (reward, True, said, True)
        for name in ("submit_answer", "query", "no_such_tool"):
            with pytest.raises(EpisodeOver):
                call(name, {})
    world.reset(seed=1, max_calls=3)
    wrong = [call("no_such_tool", {}), call("query", {"sql": 5}), call("query", {"sql": "DROP TABLE staff"})]
    assert [one.error and one.error.error_type for one in wrong] == [
        ToolErrorType.TOOL_NOT_FOUND,
        ToolErrorType.INVALID_ARGS,
        ToolErrorType.EXECUTION_ERROR,
    ]
    assert [(one.reward, one.done) for one in wrong] == [(0.0, False), (0.0, False), (0.0, True)]
    with pytest.raises(EpisodeOver):
        call("submit_answer", {"answer": 1})


IMPOSSIBLE: list[tuple[str, dict[str, Any]]] = [
    ("query", {}),
    ("query", {"sql": ["SELECT 1"]}),
    ("query", {"sql": "S" * 1_000_000}),
    ("query", {"sql": "SELECT 1", "self": 1}),
    ("describe_table", {"table": {"name": "staff"}}),
    ("describe_table", {"table": "staff; DROP TABLE staff"}),
    ("describe_table", {"table": "sqlite_master"}),
    ("describe_table", {"table": "x" * 1_000_000}),
    ("list_tables", {"all": True}),
    ("submit_answer", {}),
    ("submit_answer", {"answer": True}),
    ("submit_answer", {"answer": [[["deep"]]]}),
    ("submit_answer", {"answer": {"a": {"b": 1}}}),
    ("__init__", {}),
    ("reset", {"seed": 1}),
    ("", {}),
    ("x" * 100_000, {}),
]


def test_calls_that_cannot_be_made_cost_a_call_and_nothing_else(world: SqliteEnvironment) -> None:
    task = world.reset(seed=4, max_calls=200).task
    for count, (name, arguments) in enumerate(IMPOSSIBLE, 1):
        seen = calls_of(world)(name, arguments)
        assert seen.error is not None, name
        assert len(seen.error.message) < 2000
        assert (seen.reward, seen.done, world.state.step_count) == (0.0, False, count)
    assert solve(task, calls_of(world)) == 1.0


def test_a_reset_that_cannot_be_leaves_the_episode_as_it_was(world: SqliteEnvironment) -> None:
    world.reset(seed=1)
    before = world.state
    refused: list[dict[str, Any]] = [{"seed": -1}, {"seed": True}, {"seed": 1.5}, {"split": ["train"]}]
    refused += [
        {"index": 1_000_000},
        {"index": "3"},
        {"split": "test", "index": 10_000},
        {"difficulty": "insane"},
    ]
    refused += [{"max_calls": 0}, {"max_calls": 201}, {"episode_id": 3}, {"natural": True}]
    for options in refused:
        with pytest.raises(InvalidResetOption):
            world.reset(**options)
        assert world.state == before
    assert calls_of(world)("query", {"sql": "SELECT 1"}).result["rows"] == [[1]]


def test_before_a_reset_and_after_close_there_is_nothing_to_call(world: SqliteEnvironment) -> None:
    with pytest.raises(EpisodeOver):
        calls_of(world)("list_tables", {})
    with pytest.raises(EpisodeOver):
        world.read_resource("task://current", SILENT)
    assert len(world.step(ListToolsAction()).tools) == 4
    seen = world.reset(seed=2)
    assert world.read_resource("task://current", SILENT)[0]["text"] == seen.task
    assert world.get_prompt("task", {}, SILENT).messages[0]["content"]["text"] == seen.task
    readers = [world._reader]
    world.reset(seed=3)
    readers.append(world._reader)
    world.close()
    world.close()
    for reader in readers:
        assert reader is not None
        with pytest.raises(ToolFailed, match="closed"):
            reader.query("SELECT 1")
    with pytest.raises(EpisodeOver):
        calls_of(world)("list_tables", {})
