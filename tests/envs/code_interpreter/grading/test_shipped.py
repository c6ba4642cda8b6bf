"""The tasks that come with the environment, and what their solutions are worth."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.code_interpreter_env.grading import Grader, JsonlTasks, Task
from envs.code_interpreter_env.tasks import SHIPPED
from openenv_core.sandbox import Sandbox

SOLUTIONS = Path(__file__).parent / "solutions"
TASKS = JsonlTasks(SHIPPED)
ALL = {
    task.id: task
    for split in TASKS.splits
    for task in (TASKS.task(split, index) for index in range(TASKS.num_tasks(split)))
}

# Those of the smaller splits, which have some of every kind; the others take their time with the slow tests.
QUICK = {TASKS.task(split, index).id for split in TASKS.splits[1:] for index in range(TASKS.num_tasks(split))}


def solutions(task: Task) -> Iterator[tuple[str, str]]:
    """Sections of a file, each begun by a line "#: reference" or "#: wrong, WHY"."""
    text = (SOLUTIONS / f"{task.id}.txt").read_text(encoding="utf-8")
    for section in text.removeprefix("#: ").split("\n#: "):
        title, _, code = section.partition("\n")
        yield title, code


def test_every_task_has_a_reference_and_two_wrong_solutions_outside_the_package() -> None:
    assert {file.stem for file in SOLUTIONS.iterdir()} == set(ALL)
    for task in ALL.values():
        assert task.reference is None
        titles = [title for title, _ in solutions(task)]
        assert titles[0] == "reference"
        assert len(titles) >= 3
        assert all(title.startswith("wrong, ") for title in titles[1:])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in ALL]
)
async def test_reference_solution_earns_one(sandbox: Sandbox, name: str) -> None:
    _, code = next(solutions(ALL[name]))
    verdict = await Grader(sandbox).grade(ALL[name], code)
    assert (verdict.reward, verdict.reason) == (1.0, "passed"), verdict.detail


WRONG = ("spiral", "number-triangle", "dice-sum", "vector", "queens")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", [*WRONG, *(pytest.param(name, marks=pytest.mark.soak) for name in ALL)])
async def test_wrong_solution_earns_nothing(
    sandbox: Sandbox, name: str, request: pytest.FixtureRequest
) -> None:
    await fails(Grader(sandbox), ALL[name])
    if request.node.get_closest_marker("soak"):
        await fails(Grader(sandbox, fresh_per_case=True), ALL[name])


async def fails(grader: Grader, task: Task) -> None:
    for title, code in solutions(task):
        if title != "reference":
            verdict = await grader.grade(task, code)
            assert (verdict.reward, verdict.reason) == (0.0, "failed"), f"{title}: {verdict.detail}"
