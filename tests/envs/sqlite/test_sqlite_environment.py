"""The environment in-process: who solves it, what it hides, what it refuses."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from envs.sqlite_env.measure import commonest
from envs.sqlite_env.questions import FAMILIES, Kind
from envs.sqlite_env.server.environment import SqliteEnvironment
from envs.sqlite_env.solver import solve
from openenv_core.errors import EpisodeOver
from openenv_core.tools import (
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


def test_readers_are_closed_with_their_episode(world: SqliteEnvironment) -> None:
    world.reset(seed=2)
    readers = [world._reader]
    world.reset(seed=3)
    readers.append(world._reader)
    world.close()
    for reader in readers:
        assert reader is not None
        with pytest.raises(ToolFailed, match="closed"):
            reader.query("SELECT 1")


@pytest.mark.soak
def test_the_commonest_answer_is_rarely_right() -> None:
    assert commonest("test", 200, learned=800) < 0.12
