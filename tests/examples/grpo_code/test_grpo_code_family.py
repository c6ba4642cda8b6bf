"""The family of programming tasks: prompts, grading, held-out tasks, and the task of a small model."""

import asyncio
import random
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from envs.code_interpreter_env import CodeInterpreterObservation
from envs.code_interpreter_env.grading import public_view
from examples.grpo_code import family, world
from examples.grpo_code.family import CHANGES, ENDS, Program, draw, example, make_task, solution, source_of
from examples.grpo_code.task import CodeTask
from examples.grpo_code.world import CodeFamilyEnvironment
from openenv_core import StepResult
from openenv_core.outcomes import INFRASTRUCTURE_ERROR, UNSCORED
from openenv_core.tools import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolError,
    ToolErrorType,
)
from rl_bridge.config import load_config, resolve
from rl_bridge.rollout.assignment import TRAINING_SEEDS

NUMBERS = range(50)


def run(source: str, numbers: list[int]) -> Any:
    names: dict[str, Any] = {}
    exec(source, names)  # ours
    return names["f"](numbers)


def test_the_source_of_each_step_does_what_the_answers_are_worked_out_by() -> None:
    drawn = ([random.Random(n).randint(-20, 20) for _ in range(9)] for n in range(4))
    lists = [[], [0], [-3, 4, 4, 7, -8, 11], *drawn]
    for step, end, k, numbers in product(CHANGES, ENDS, (2, 3, 9), lists):
        program, before = Program(((step, k), (CHANGES[-1], 2)), end), list(numbers)
        assert run(source_of(program), numbers) == program(numbers), source_of(program)
        assert numbers == before


@pytest.mark.parametrize("held_out", [False, True])
def test_the_solver_reads_the_program_out_of_the_prompt(held_out: bool) -> None:
    for number in NUMBERS:
        program = draw(number, held_out=held_out).program
        task = make_task(number, held_out=held_out)
        assert solution(task.prompt) == source_of(program)
        (shown,) = task.public
        assert example(task.prompt) == f"f({shown.args[0]})"
        assert task.prompt.endswith(f" is {shown.expected}.")
        for case in (shown, *task.hidden):
            assert run(solution(task.prompt), case.args[0]) == case.expected
        public_text = str(public_view(task))
        assert [] in [case.args[0] for case in task.hidden]
        assert all(str(case.args[0]) not in public_text for case in task.hidden if case.args[0])
    assert make_task(7, held_out=held_out) == make_task(7, held_out=held_out)
    with pytest.raises(ValueError, match="of the family"):
        solution("Write f(xs) for a list of integers. Dance. Example: f([]) is 0.")


def test_programs_of_held_out_tasks_are_never_asked_for_in_training() -> None:
    training, held_out = (
        {source_of(draw(number, held_out=apart).program) for number in NUMBERS} for apart in (False, True)
    )
    assert not training & held_out
    assert min(len(training), len(held_out)) > 0.9 * len(NUMBERS)


def passes(program: Program, number: int) -> bool:
    return all(program(case.args[0]) == case.expected for case in make_task(number, held_out=True).hidden)


def test_incomplete_programs_do_not_pass() -> None:
    shortcuts = 0
    for number in NUMBERS[:20]:
        cases = make_task(number, held_out=True).hidden
        assert any(case.expected != cases[0].expected for case in cases)  # so no constant passes
        program = draw(number, held_out=True).program
        assert passes(program, number)
        for place in range(len(program.steps)):
            steps = program.steps[:place] + program.steps[place + 1 :]
            assert not passes(Program(steps, program.end), number), source_of(program)
        # The list itself, its sum, its length, its largest: without a step of what is asked.
        shortcuts += sum(passes(Program((), end), number) for end in ENDS)
    assert shortcuts == 0


@pytest.fixture
async def family_world() -> AsyncIterator[CodeFamilyEnvironment]:
    world = CodeFamilyEnvironment()
    yield world
    await world.close_async()


async def call_tool(world: CodeFamilyEnvironment, tool: str, code: str | None = None) -> CallToolObservation:
    arguments = {} if code is None else {"code": code}
    seen = world.step_async(CallToolAction(tool_name=tool, arguments=arguments))
    if asyncio.iscoroutine(seen):
        seen = await seen
    assert isinstance(seen, CallToolObservation)
    return seen


async def test_the_world_runs_code_and_judges_what_is_handed_in(family_world: CodeFamilyEnvironment) -> None:
    began = await family_world.reset_async(seed=TRAINING_SEEDS + 5)
    assert began.prompt == make_task(5, held_out=True).prompt
    code = solution(began.prompt)
    ran = await call_tool(family_world, "run_python", f"{code}\nprint({example(began.prompt)})")
    assert began.prompt.endswith(f" is {ran.result['stdout'].strip()}.")
    assert (ran.reward, ran.done) == (None, False)
    passed = await call_tool(family_world, "submit")
    assert (passed.reward, passed.done) == (1.0, True)
    assert passed.result == {"passed": True, "cases_passed": 7, "cases": 7}

    await family_world.reset_async(seed=TRAINING_SEEDS + 5)
    nothing = await call_tool(family_world, "submit")  # the code of the episode before is forgotten
    assert (nothing.reward, nothing.done) == (0.0, True)

    began = await family_world.reset_async(seed=5)
    assert began.prompt == make_task(5, held_out=False).prompt != make_task(5, held_out=True).prompt
    await call_tool(family_world, "run_python", solution(began.prompt))
    await call_tool(family_world, "run_python", "def f(xs):\n    return 'no'")
    wrong = await call_tool(family_world, "submit")
    assert (wrong.reward, wrong.done, wrong.result["passed"]) == (0.0, True, False)


@pytest.mark.slow
async def test_hanging_submission_earns_zero_like_a_wrong_one(
    family_world: CodeFamilyEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "LIMITS", {"timeout_s": 1.0, "total_s": 60.0})
    await family_world.reset_async(seed=5)
    await call_tool(family_world, "run_python", "def f(xs):\n    while True: pass")
    hung = await call_tool(family_world, "submit")
    assert (hung.reward, hung.done, hung.metadata) == (0.0, True, {})
    assert hung.result == {"passed": False, "cases_passed": 0, "cases": 7}


async def test_unjudged_submission_is_unscored(
    family_world: CodeFamilyEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reason, scope, verdict_reward, reward, metadata in (
        ("timeout", "case", None, 0.0, {}),
        ("timeout", "total", None, None, {UNSCORED: "in words"}),
        ("sandbox_error", None, None, None, {INFRASTRUCTURE_ERROR: "in words"}),
        ("failed", None, 0.0, 0.0, {}),
    ):
        verdict = SimpleNamespace(reason=reason, timeout_scope=scope, reward=verdict_reward)
        verdict.detail, verdict.passed, verdict.total = "in words", 0, 7
        judged = AsyncMock(return_value=SimpleNamespace(verdict=verdict))
        monkeypatch.setattr(family_world, "_submit", judged)
        seen = await call_tool(family_world, "submit")
        assert (seen.reward, seen.metadata) == (reward, metadata)


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


async def test_policy_sees_two_tools(task: CodeTask) -> None:
    class Lists:
        async def reset(self, **options: Any) -> StepResult[Any]:
            raise AssertionError

        async def step(self, action: Any, /) -> StepResult[Any]:
            assert isinstance(action, ListToolsAction)
            names = [*world.CodeFamilyEnvironment.TOOLSET.tools]
            tools = [Tool(name=name, description="", input_schema={}) for name in names]
            return StepResult(ListToolsObservation(tools=tools), None, False)

    functions = await task.functions(Lists(), CodeInterpreterObservation(prompt=""))
    assert {one["function"]["name"] for one in functions} == {"run_python", "submit"}


def test_policy_reads_prompt_output_and_last_line_of_an_error(task: CodeTask) -> None:
    observation = CodeInterpreterObservation(prompt="Write f(xs).")
    assert task.messages(observation) == [{"role": "user", "content": "Write f(xs)."}]
    printed = {"stdout": "[1, 2]\n", "stderr": "", "status": "ok"}
    assert task.result(CallToolObservation(tool_name="run_python", result=printed)) == "[1, 2]"
    message = "Traceback ...\n  line 1\nNameError: name 'y' is not defined\n"
    error = ToolError(error_type=ToolErrorType.EXECUTION_ERROR, message=message)
    text = task.result(CallToolObservation(tool_name="run_python", error=error))
    assert text == "error: NameError: name 'y' is not defined"
