"""What a small model is told of the interpreter."""

from pathlib import Path
from typing import Any

import pytest

from envs.code_interpreter_env import CodeInterpreterObservation
from examples.grpo_code import world
from examples.grpo_code.family import make_task
from examples.grpo_code.task import CodeTask
from openenv_core import StepResult
from openenv_core.tools import (
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolError,
    ToolErrorType,
)
from rl_bridge.config import load_config, resolve

CONFIG = Path(world.__file__).with_name("config.yaml")


@pytest.fixture
def task(tmp_path: Path) -> CodeTask:
    return CodeTask(load_config(CONFIG), tmp_path)


def test_the_configuration_that_ships() -> None:
    config = load_config(CONFIG)
    assert resolve(str(config.rollout.task), key="rollout.task") is CodeTask
    assert config.env is not None
    assert config.env.app == f"{world.__name__}:app"
    assert config.evaluation.episodes >= 500
    # Whoever waits for a verdict waits longer than it may take.
    made = make_task(0, held_out=False)
    assert made.limits.total_s < config.env.message_timeout_s
    # A submission that takes its time cannot use up the whole, and so be left out, before it has failed.
    assert made.limits.timeout_s is not None
    calls = 1 + len(made.public) + len(made.hidden)
    assert calls * made.limits.timeout_s < made.limits.total_s


def test_it_reads_the_prompt(task: CodeTask) -> None:
    observation = CodeInterpreterObservation(prompt="Write f(xs).")
    assert task.messages(observation) == [{"role": "user", "content": "Write f(xs)."}]


async def test_it_is_told_of_two_tools(task: CodeTask) -> None:
    class Lists:
        async def reset(self, **options: Any) -> StepResult[Any]:
            raise AssertionError

        async def step(self, action: Any, /) -> StepResult[Any]:
            assert isinstance(action, ListToolsAction)
            names = [*world.CodeFamilyEnvironment.TOOLSET.tools]
            tools = [Tool(name=name, description="", input_schema={}) for name in names]
            return StepResult(ListToolsObservation(tools=tools), None, False)

    functions = await task.functions(Lists(), CodeInterpreterObservation(prompt=""))
    assert [one["function"]["name"] for one in functions] == ["submit", "run_python"] or [
        one["function"]["name"] for one in functions
    ] == ["run_python", "submit"]


def test_of_a_run_it_is_told_what_was_printed(task: CodeTask) -> None:
    ran = CallToolObservation(
        tool_name="run_python", result={"stdout": "[1, 2]\n", "stderr": "", "status": "ok"}
    )
    assert task.result(ran) == "[1, 2]"


def test_of_an_error_it_is_told_the_last_line(task: CodeTask) -> None:
    error = ToolError(
        error_type=ToolErrorType.EXECUTION_ERROR,
        message="Traceback ...\n  line 1\nNameError: name 'y' is not defined\n",
    )
    told = task.result(CallToolObservation(tool_name="run_python", error=error))
    assert told == "error: NameError: name 'y' is not defined"


def test_of_a_tool_that_is_not_there_it_is_told(task: CodeTask) -> None:
    error = ToolError(error_type=ToolErrorType.TOOL_NOT_FOUND, message="no such tool")
    assert task.result(CallToolObservation(tool_name="run", error=error)) == "error: no such tool"
