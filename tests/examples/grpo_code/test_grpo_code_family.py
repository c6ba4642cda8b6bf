"""The family of programming tasks: what is asked, what is right, what is held out, who may see it."""

import asyncio
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envs.code_interpreter_env.grading import public_view
from examples.grpo_code import family
from examples.grpo_code.family import (
    CHANGES,
    ENDS,
    Program,
    draw,
    example,
    make_task,
    solution,
    source_of,
    told_apart,
)
from examples.grpo_code.world import CodeFamilyEnvironment
from openenv_core.outcomes import INFRASTRUCTURE_ERROR, UNSCORED
from openenv_core.tools import CallToolAction, CallToolObservation
from rl_bridge.rollout.seeds import TRAINING_SEEDS

NUMBERS = range(150)


def run(source: str, numbers: list[int]) -> Any:
    names: dict[str, Any] = {}
    exec(source, names)  # ours
    return names["f"](numbers)


def test_the_source_of_each_step_does_what_the_answers_are_worked_out_by() -> None:
    lists = [
        [],
        [0],
        [-3, 4, 4, 7, -8, 11],
        *([random.Random(n).randint(-20, 20) for _ in range(9)] for n in range(9)),
    ]
    for step in CHANGES:
        for end in ENDS:
            for k in range(2, 10):
                program = Program(((step, k), (CHANGES[-1], 2)), end)
                for numbers in lists:
                    before = list(numbers)
                    assert run(source_of(program), numbers) == program(numbers), source_of(program)
                    assert numbers == before


def test_no_two_steps_are_asked_for_in_the_same_words() -> None:
    said = [words for step in (*CHANGES, *ENDS) for words in step.says]
    assert len(said) == len(set(said))


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


def test_programs_of_held_out_tasks_are_never_asked_for_in_training() -> None:
    training, held_out = (
        {source_of(draw(number, held_out=apart).program) for number in NUMBERS} for apart in (False, True)
    )
    assert not training & held_out
    assert min(len(training), len(held_out)) > 0.9 * len(NUMBERS)


def test_a_number_is_a_task() -> None:
    assert make_task(7, held_out=False) == make_task(7, held_out=False)
    assert make_task(7, held_out=False).prompt != make_task(8, held_out=False).prompt
    assert make_task(7, held_out=False).prompt != make_task(7, held_out=True).prompt


def test_hidden_cases_are_hidden() -> None:
    for number in NUMBERS:
        task = make_task(number, held_out=False)
        told = str(public_view(task))
        assert [] in [case.args[0] for case in task.hidden]
        assert all(str(case.args[0]) not in told for case in task.hidden if case.args[0])


def passes(program: Program, number: int) -> bool:
    return all(program(case.args[0]) == case.expected for case in make_task(number, held_out=True).hidden)


def test_what_does_not_do_what_is_asked_does_not_pass() -> None:
    shortcuts = 0
    for number in NUMBERS:
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


def test_one_step_in_the_place_of_another_is_nearly_always_seen() -> None:
    rng = random.Random(0)
    passed = 0
    for number in NUMBERS:
        steps = list(draw(number, held_out=True).program.steps)
        place = rng.randrange(len(steps))
        others = [step for step in CHANGES if step is not steps[place][0]]
        steps[place] = (rng.choice(others), steps[place][1])
        passed += passes(Program(tuple(steps), draw(number, held_out=True).program.end), number)
    # Some of them are the same program: to square and to negate leaves no more odd numbers than to square.
    assert passed < 0.03 * len(NUMBERS)


def test_lists_that_tell_nothing_apart_are_drawn_anew() -> None:
    even, backwards, keep = CHANGES[0], CHANGES[11], ENDS[0]
    program = Program(((even, 2), (backwards, 2)), keep)
    assert told_apart(program, [[], [2, 3, 4]])
    assert not told_apart(program, [[], [2, 4]])  # nothing is odd
    assert not told_apart(program, [[], [2, 3]])  # nothing to turn round
    assert not told_apart(program, [[2, 3, 4], [2, 5, 4]])  # always the same


def test_the_episode_that_is_shown_is_one() -> None:
    shown = Path(family.__file__).with_name("README.md").read_text(encoding="utf-8")
    number = re.search(r"that of seed (\d+),", shown)
    assert number is not None
    prompt = make_task(int(number[1]), held_out=False).prompt
    source = solution(prompt)
    code = f"{source}\nprint({example(prompt)})"
    numbers = [int(one) for one in re.findall(r"-?\d+", example(prompt))]
    words = " ".join(shown.split())
    assert f"user {prompt} assistant" in words
    assert f'"code": "{" ".join(code.split())}"' in words
    assert f"tool {run(source, numbers)} assistant" in words


def test_there_are_as_many_programs_as_is_said() -> None:
    steps = sum(8 if "#" in step.code else 1 for step in CHANGES)
    # Before those are left out that nothing tells from lesser ones.
    assert 1_300_000 < steps ** len(family.NAMES) * len(ENDS) < 1_400_000


@pytest.mark.parametrize(
    "prompt", ["Write a poem.", "Write f(xs) for a list of integers. Dance. Example: f([]) is 0."]
)
def test_other_prompts_are_refused(prompt: str) -> None:
    with pytest.raises(ValueError, match="of the family"):
        solution(prompt)


async def called(world: CodeFamilyEnvironment, tool: str, code: str | None = None) -> CallToolObservation:
    arguments = {} if code is None else {"code": code}
    seen = world.step(CallToolAction(tool_name=tool, arguments=arguments))
    if asyncio.iscoroutine(seen):
        seen = await seen
    assert isinstance(seen, CallToolObservation)
    return seen


async def test_the_world_runs_code_and_judges_what_is_handed_in() -> None:
    world = CodeFamilyEnvironment()
    try:
        began = await world.reset(seed=TRAINING_SEEDS + 5)
        assert began.prompt == make_task(5, held_out=True).prompt
        code = solution(began.prompt)
        ran = await called(world, "run_python", f"{code}\nprint({example(began.prompt)})")
        assert began.prompt.endswith(f" is {ran.result['stdout'].strip()}.")
        assert (ran.reward, ran.done) == (None, False)
        passed = await called(world, "submit")
        assert (passed.reward, passed.done) == (1.0, True)
        assert passed.result == {"passed": True, "cases_passed": 7, "cases": 7}

        await world.reset(seed=TRAINING_SEEDS + 5)
        nothing = await called(world, "submit")  # the code of the episode before is forgotten
        assert (nothing.reward, nothing.done) == (0.0, True)

        began = await world.reset(seed=5)
        assert began.prompt == make_task(5, held_out=False).prompt
        assert began.prompt != make_task(5, held_out=True).prompt
        await called(world, "run_python", solution(began.prompt))
        await called(world, "run_python", "def f(xs):\n    return 'no'")
        wrong = await called(world, "submit")
        assert (wrong.reward, wrong.done) == (0.0, True)
        assert wrong.result["passed"] is False
    finally:
        await world.close()


@pytest.mark.parametrize("submission", ["    while True: pass", "    __import__('time').sleep(1.5)"])
async def test_to_hang_is_not_cheaper_than_to_be_wrong(
    monkeypatch: pytest.MonkeyPatch, submission: str
) -> None:
    monkeypatch.setattr(family, "LIMITS", {"timeout_s": 1.0, "total_s": 25.0})
    world = CodeFamilyEnvironment()
    try:
        await world.reset(seed=5)
        await called(world, "run_python", f"def f(xs):\n{submission}")
        hung = await called(world, "submit")
        assert (hung.reward, hung.done, hung.metadata) == (0.0, True, {})
        assert hung.result == {"passed": False, "cases_passed": 0, "cases": 7}
    finally:
        await world.close()


@pytest.mark.parametrize(
    ("reason", "scope", "reward", "key"),
    [
        ("timeout", "case", 0.0, None),
        ("timeout", "total", None, UNSCORED),
        ("sandbox_error", None, None, INFRASTRUCTURE_ERROR),
        ("failed", None, 0.0, None),
    ],
)
async def test_what_nobody_could_judge_is_not_0(
    monkeypatch: pytest.MonkeyPatch, reason: str, scope: str | None, reward: float | None, key: str | None
) -> None:
    verdict = SimpleNamespace(
        reason=reason,
        detail="in words",
        timeout_scope=scope,
        passed=0,
        total=7,
        reward=0.0 if reason == "failed" else None,
    )
    world = CodeFamilyEnvironment()

    async def judged(_: Any) -> Any:
        return SimpleNamespace(verdict=verdict)

    monkeypatch.setattr(world, "_submit", judged)
    try:
        seen = await called(world, "submit")
        assert seen.reward == reward
        assert seen.metadata == ({} if key is None else {key: "in words"})
    finally:
        await world.close()
