"""The family of questions: held-out tasks, the solver, and the texts shown to a small model."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envs.sqlite_env.models import SqliteObservation
from envs.sqlite_env.server.environment import SqliteEnvironment
from examples.grpo_tools import world
from examples.grpo_tools.solver import parse_question, solve
from examples.grpo_tools.task import SqliteTask
from examples.grpo_tools.world import FAMILIES, SmallSqliteEnvironment
from openenv_core.tools import CallToolAction, CallToolObservation, ToolError, ToolErrorType
from rl_bridge.config import load_config, resolve
from rl_bridge.rollout.assignment import TRAINING_SEEDS, held_out_seeds

CONFIG = Path(world.__file__).with_name("config.yaml")
RESET = {"difficulty": "easy", "max_calls": 6}


@pytest.fixture
def task(tmp_path: Path) -> SqliteTask:
    return SqliteTask(load_config(CONFIG), tmp_path)


async def play(environment: SqliteEnvironment, seed: int) -> tuple[SqliteObservation, float, int]:
    first = environment.reset(seed=seed, **RESET)
    earned: list[float] = []

    async def call(name: str, arguments: Mapping[str, Any]) -> Any:
        seen = environment.step(CallToolAction(tool_name=name, arguments=dict(arguments)))
        assert seen.error is None
        earned.append(seen.reward)
        return seen.result

    await solve(first, call)
    environment.close()
    return first, sum(earned), len(earned)


async def test_the_solver_answers_every_question_with_four_calls() -> None:
    environment = SmallSqliteEnvironment()
    families: Counter[str] = Counter()
    for seed in (*range(10), *held_out_seeds(0, 8)):
        first, reward, calls = await play(environment, seed)
        assert (reward, calls) == (1.0, 4), first.question
        families[parse_question(first.question)[1]] += 1
    assert set(families) == set(FAMILIES)
    with pytest.raises(ValueError, match="of the families"):
        parse_question("Which genre has the most books?")


def test_a_seed_is_a_task_and_held_out_seeds_have_others() -> None:
    numbers = {
        seed: SmallSqliteEnvironment.task_number("train", seed)
        for seed in (0, 1, 2, TRAINING_SEEDS - 1, *held_out_seeds(0, 3), TRAINING_SEEDS * 2 - 1)
    }
    assert len(set(numbers.values())) == len(numbers)
    assert numbers == {seed: SmallSqliteEnvironment.task_number("train", seed) for seed in numbers}
    # Each from a range of its own, so none of them can meet.
    assert all(number // 64 == seed for seed, number in numbers.items())
    with pytest.raises(IndexError):
        SmallSqliteEnvironment.task_number("train", 2 * TRAINING_SEEDS)
    environment = SmallSqliteEnvironment()
    environment.reset(seed=TRAINING_SEEDS, **RESET)
    assert environment.state.index == TRAINING_SEEDS
    environment.close()


def test_the_configuration_that_ships() -> None:
    config = load_config(CONFIG)
    assert resolve(str(config.rollout.task), key="rollout.task") is SqliteTask
    assert config.env is not None
    assert config.env.app == f"{world.__name__}:app"
    assert config.env.reset == RESET
    assert config.evaluation.episodes >= 500


def test_texts_shown_to_a_small_model(task: SqliteTask) -> None:
    environment = SmallSqliteEnvironment()
    first = environment.reset(seed=1, **RESET)
    assert task.messages(first) == [{"role": "user", "content": first.question}]
    tables = environment.step(CallToolAction(tool_name="list_tables"))
    text_lines = task.result(tables).splitlines()
    assert text_lines == [f"{one['name']}: {one['description'].split(';')[0]}" for one in tables.result]
    assert any(";" in one["description"] for one in tables.result)
    table = tables.result[0]["name"]
    described = environment.step(CallToolAction(tool_name="describe_table", arguments={"table": table}))
    assert task.result(described).splitlines() == [
        f"{one['name']}: {one['description'].split(';')[0]}" for one in described.result["columns"]
    ]
    rows = environment.step(
        CallToolAction(tool_name="query", arguments={"sql": f"SELECT count(*) FROM {table}"})
    )
    assert task.result(rows) == f"[[{described.result['row_count']}]]"
    wrong = environment.step(CallToolAction(tool_name="query", arguments={"sql": "SELECT nothing"}))
    assert task.result(wrong).startswith("error: ")
    error = ToolError(error_type=ToolErrorType.EXECUTION_ERROR, message="no such thing")
    for tool in ("list_tables", "describe_table", "query", "guess"):
        assert task.result(CallToolObservation(tool_name=tool, error=error)) == "error: no such thing"
    environment.close()
