"""A task of code and one of tools that a small published model half knows, with worked examples in its chat."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from envs.code_interpreter_env import CodeInterpreterEnv
from envs.code_interpreter_env.grading import FunctionTask
from envs.code_interpreter_env.models import (
    AnyAction,
    CodeInterpreterObservation,
    CodeInterpreterState,
    Submit,
)
from envs.code_interpreter_env.server.environment import CodeInterpreterEnvironment
from envs.code_interpreter_env.server.shared import shared_backend
from envs.sqlite_env import SqliteEnv
from envs.sqlite_env.models import SqliteObservation, SqliteState
from envs.sqlite_env.server.environment import SqliteEnvironment
from envs.sqlite_env.tasks import SqliteTaskSpec, make_task
from examples.grpo_code.family import LIMITS
from examples.grpo_code.world import SPLITS, FamilyTasks
from openenv_core.tools import ToolAction, ToolObservation
from openenv_core.worlds import Level
from rl_bridge.data.traces import format_call
from rl_bridge.rollout import Task, ToolTask
from rl_bridge.rollout.assignment import TRAINING_SEEDS
from rl_bridge.rollout.task import Session
from rl_bridge.tokens.chat import ChatMessage
from rl_bridge.tokens.tool_calls import ToolCall
from servers import create_app


def user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def assistant(text: str) -> ChatMessage:
    return {"role": "assistant", "content": text}


# Code: a function of one number, checked by hidden cases in the sandbox.

OPERATIONS: dict[str, Callable[[int, int], int | bool]] = {
    "x plus #": lambda x, k: x + k,
    "x minus #": lambda x, k: x - k,
    "# minus x": lambda x, k: k - x,
    "x times #": lambda x, k: x * k,
    "the larger of x and #": max,
    "the smaller of x and #": min,
    "the remainder of x divided by #": lambda x, k: x % k,
    "whether x is above #": lambda x, k: x > k,
    "whether x is below #": lambda x, k: x < k,
    "whether # divides x": lambda x, k: x % k == 0,
    "the square of x, plus #": lambda x, k: x * x + k,
    "twice x, minus #": lambda x, k: 2 * x - k,
}
"""By their wording, in which `#` is a number."""
NUMBERS = range(2, 60)
SOLVED = {"x plus 10": "x + 10", "the larger of x and 3": "max(x, 3)", "whether x is 8": "x == 8"}
HELD_OUT_SHARE = 4
"""One in so many tasks never occurs in training."""


def ask_function(wording: str) -> str:
    return f"f(x) returns {wording}."


CODE_CHAT: list[ChatMessage] = [
    {"role": "system", "content": "Write a Python function."},
    *(
        message
        for wording, code in SOLVED.items()
        for message in (user(ask_function(wording)), assistant(f"def f(x):\n    return {code}"))
    ),
]


def one_step_task(number: int, *, held_out: bool) -> FunctionTask:
    """Make the task of a number; an operation with a number that is held out never occurs in training."""
    source = random.Random(f"one step {number}")
    while True:
        wording, k = source.choice(list(OPERATIONS)), source.choice(NUMBERS)
        if (random.Random(f"{wording} {k}").randrange(HELD_OUT_SHARE) == 0) == held_out:
            break
    operation = OPERATIONS[wording]
    xs = (-k, 0, 1, k - 1, k, k + 1, 3 * k, *(source.randint(-100, 100) for _ in range(5)))
    return FunctionTask.model_validate(
        {
            "id": f"one-step-{number}",
            "prompt": ask_function(wording.replace("#", str(k))),
            "entry": "f",
            "hidden": [{"args": [x], "expected": operation(x, k)} for x in xs],
            "limits": dict(LIMITS),
        }
    )


class OneStepTasks(FamilyTasks):
    def task(self, split: str, index: int) -> FunctionTask:
        return one_step_task(index, held_out=split == "held_out")


class OneStepEnvironment(CodeInterpreterEnvironment):
    """Asks for one function, which is handed in at once."""

    def __init__(self) -> None:
        super().__init__(tasks=OneStepTasks())

    async def reset_async(
        self, *, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> CodeInterpreterObservation | ToolObservation:
        assert seed is not None
        task = {"split": SPLITS[seed >= TRAINING_SEEDS], "index": seed % TRAINING_SEEDS}
        return await super().reset_async(seed=seed, episode_id=episode_id, task=task, **options)


class OneStepTask(Task):
    client_type = CodeInterpreterEnv

    def messages(self, observation: CodeInterpreterObservation) -> list[ChatMessage]:
        assert observation.prompt is not None
        return [*CODE_CHAT, user(observation.prompt)]

    def parse(self, text: str) -> Submit | None:
        """An answer is what follows the first `def`, up to a fence: whatever is around it costs nothing."""
        _, found, rest = text.partition("def ")
        return Submit(type="submit", code=found + rest.partition("```")[0]) if found else None


one_step_app = create_app(
    OneStepEnvironment,
    AnyAction,
    CodeInterpreterObservation | ToolObservation,
    env_name="one_step",
    max_concurrent_envs=256,
    state_cls=CodeInterpreterState,
    lifespan=shared_backend().lifespan,
)


# Tools: a question about one table of a database, by a query, and by handing in what it gave.

FAMILIES = ("count_in_city", "missing_email")
_TRIES = 64


class OneTableEnvironment(SqliteEnvironment):
    """Asks about one table, and says which columns it has."""

    SPLITS: ClassVar[Mapping[str, int]] = MappingProxyType({"train": 2 * TRAINING_SEEDS})

    @classmethod
    def task_number(cls, split: str, index: int) -> int:
        first = super().task_number(split, index) * _TRIES
        return next(
            number
            for number in range(first, first + _TRIES)
            if make_task(number, held_out=False, level=Level.EASY).question.family in FAMILIES
        )

    def begin_task(self, task: SqliteTaskSpec, calls: int) -> SqliteObservation:
        observation = super().begin_task(task, calls)
        people = next(iter(task.world.naming.values()))
        columns = ", ".join(column.name for column in people.columns)
        question = f"Table {people.name}: {columns}\n{observation.question}"
        return observation.model_copy(update={"question": question})


def answered(question: str, sql: str, answer: int) -> list[ChatMessage]:
    return [
        user(question),
        assistant(format_call(ToolCall("query", {"sql": sql}))),
        {"role": "tool", "name": "query", "content": f"[[{answer}]]"},
        assistant(format_call(ToolCall("submit_answer", {"answer": answer}))),
    ]


TOOLS_CHAT: list[ChatMessage] = [
    {"role": "system", "content": "Answer with the tools query and submit_answer."},
    *answered(
        "Table pets: pet_no, name, town, bought_on, mail\nHow many pets live in Oxford?",
        "SELECT count(*) FROM pets WHERE town = 'Oxford'",
        7,
    ),
    *answered(
        "Table guests: id, label, home, since, e_mail\nOf how many guests is no email address known?",
        "SELECT count(*) FROM guests WHERE e_mail IS NULL",
        12,
    ),
]


class OneTableTask(ToolTask):
    client_type = SqliteEnv

    def messages(self, observation: SqliteObservation) -> list[ChatMessage]:
        return [*TOOLS_CHAT, user(observation.question)]

    async def functions(self, session: Session, observation: Any) -> Sequence[Mapping[str, Any]]:
        """No tools: this model's template has no place for them, the examples have."""
        return ()

    def result(self, observation: Any) -> str:
        result = getattr(observation, "result", None)
        return json.dumps(result["rows"]) if isinstance(result, dict) else super().result(observation)


one_table_app = create_app(
    OneTableEnvironment,
    ToolAction,
    ToolObservation,
    env_name="one_table",
    max_concurrent_envs=256,
    state_cls=SqliteState,
    reset_observation_cls=SqliteObservation,
)
