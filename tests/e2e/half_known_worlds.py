"""A task of code and one of tools that a small published model half knows, with worked examples in its chat."""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any, ClassVar

from envs.code_interpreter_env import CodeInterpreterEnv
from envs.code_interpreter_env.grading import FunctionTask
from envs.code_interpreter_env.models import (
    AnyAction,
    CodeInterpreterObservation,
    CodeInterpreterState,
    CodeObservation,
    Submit,
)
from envs.code_interpreter_env.server.environment import CodeInterpreterEnvironment
from envs.code_interpreter_env.server.shared import shared_backend
from envs.sqlite_env import SqliteEnv
from envs.sqlite_env.models import SqliteObservation, SqliteState
from envs.sqlite_env.questions import FAMILIES, draw_family_question
from envs.sqlite_env.server.environment import SqliteEnvironment
from envs.sqlite_env.tasks import SqliteTaskSpec
from envs.sqlite_env.world.domains import DOMAINS
from envs.sqlite_env.world.making import make_world
from examples.grpo_code.family import LIMITS
from examples.grpo_code.world import SPLITS, FamilyTasks
from openenv_core.tools import CallToolAction, CallToolObservation, ToolAction, ToolObservation
from openenv_core.worlds import Level
from rl_bridge.rollout import Task, ToolTask
from rl_bridge.rollout.assignment import TRAINING_SEEDS
from rl_bridge.rollout.task import Session
from rl_bridge.tokens.chat import ChatMessage
from servers import create_app


def user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def assistant(text: str) -> ChatMessage:
    return {"role": "assistant", "content": text}


# Code: a function of two steps, checked by hidden cases in the sandbox.

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "plus #": lambda x, k: x + k,
    "minus #": lambda x, k: x - k,
    "times #": lambda x, k: x * k,
    "divided by #, rounded down": lambda x, k: x // k,
}
"""By their wording, in which `#` is a number."""
STEPS = list(product(OPERATIONS, range(2, 21)))
INPUTS = (0, 1, -1, 7, 19, 20, -50, 88, 997, -1234)
SOLVED = {
    "x plus 3, then the result times 5": "(x + 3) * 5",
    "x times 2, then the result minus 9": "(x * 2) - 9",
    "x minus 7, then the result divided by 4, rounded down": "(x - 7) // 4",
}


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


class TwoStepTasks(FamilyTasks):
    """All 5,776 functions of two steps, of which a quarter is held out."""

    def __init__(self) -> None:
        functions = list(product(STEPS, STEPS))
        random.Random(0).shuffle(functions)
        held_out = len(functions) // 4
        self._functions = {"held_out": functions[:held_out], "train": functions[held_out:]}

    def task(self, split: str, index: int) -> FunctionTask:
        functions = self._functions[split]
        (first, k), (second, m) = functions[index % len(functions)]
        wording = f"x {first.replace('#', str(k))}, then the result {second.replace('#', str(m))}"
        return FunctionTask.model_validate(
            {
                "id": f"two-step-{split}-{index}",
                "prompt": ask_function(wording),
                "entry": "f",
                "hidden": [
                    {"args": [x], "expected": OPERATIONS[second](OPERATIONS[first](x, k), m)} for x in INPUTS
                ],
                "limits": dict(LIMITS),
            }
        )


class TwoStepEnvironment(CodeInterpreterEnvironment):
    """Asks for one function, which is submitted at once."""

    def __init__(self) -> None:
        super().__init__(tasks=TwoStepTasks())

    async def reset_async(
        self, *, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> CodeObservation:
        assert seed is not None
        task = {"split": SPLITS[seed >= TRAINING_SEEDS], "index": seed % TRAINING_SEEDS}
        return await super().reset_async(seed=seed, episode_id=episode_id, task=task, **options)


class TwoStepTask(Task):
    client_type = CodeInterpreterEnv

    def messages(self, observation: CodeInterpreterObservation) -> list[ChatMessage]:
        assert observation.prompt is not None
        return [*CODE_CHAT, user(observation.prompt)]

    def parse(self, text: str) -> Submit | None:
        """An answer is what follows the first `def`, up to a fence: whatever is around it costs nothing."""
        _, found, rest = text.partition("def ")
        return Submit(type="submit", code=found + rest.partition("```")[0]) if found else None


two_step_app = create_app(
    TwoStepEnvironment,
    AnyAction,
    CodeInterpreterObservation | ToolObservation,
    env_name="two_step",
    max_concurrent_envs=256,
    state_cls=CodeInterpreterState,
    lifespan=shared_backend().lifespan,
)


# Tools: a question about one table of a database, answered by a query and by submitting its result.

FAMILY = FAMILIES["count_in_city"]


class OneTableEnvironment(SqliteEnvironment):
    """Asks how many people live in a city, and says which columns their table has."""

    SPLITS: ClassVar[Mapping[str, int]] = MappingProxyType({"train": 2 * TRAINING_SEEDS})

    def make_task(self, number: int, *, held_out: bool, level: Level | None = None) -> SqliteTaskSpec:
        source = random.Random(f"one table {number}")
        world = make_world(source.choice(DOMAINS), source)
        question = draw_family_question(FAMILY, world, source, held_out=held_out)
        assert question is not None
        return SqliteTaskSpec(world, question)

    def begin_task(self, task: SqliteTaskSpec, calls: int) -> SqliteObservation:
        observation = super().begin_task(task, calls)
        people = task.world.naming["people"]
        question = ask_count(people.name, [column.name for column in people.columns], observation.question)
        return observation.model_copy(update={"question": question})


def ask_count(table: str, columns: Sequence[str], question: str) -> str:
    return f"Table {table}: {', '.join(columns)}\n{question}"


def answered(table: str, columns: str, city: str, question: str, answer: int) -> list[ChatMessage]:
    column, name = city.split()
    return [
        user(ask_count(table, columns.split(), question.format(name))),
        assistant(f"query(\"SELECT count(*) FROM {table} WHERE {column} = '{name}'\")"),
        user(str(answer)),
        assistant(f"submit_answer({answer})"),
    ]


TOOLS_CHAT: list[ChatMessage] = [
    {"role": "system", "content": "Answer with query and submit_answer."},
    *answered("pets", "pet_no name town bought_on mail", "town Oxford", "How many pets live in {}?", 7),
    *answered("crew", "crew_id full_name base joined email", "base Bergen", "Count the sailors from {}.", 9),
    *answered(
        "pupils", "id label home_city entered mail", "home_city Turin", "{} is home to how many pupils?", 4
    ),
    *answered(
        "pilots",
        "pilot_ref name city hired e_mail",
        "city Lyon",
        "What is the number of pilots whose city is {}?",
        12,
    ),
    *answered(
        "owner_list",
        "owner_ref full_name place since contact_mail",
        "place Graz",
        "How many owners live in {}?",
        15,
    ),
    *answered(
        "guests",
        "guest_no name residence registered mail",
        "residence Delft",
        "Count the guests from {}.",
        6,
    ),
]
CALL = re.compile(
    r"(?P<name>query|submit_answer)\(\s*(?P<quote>[\"']?)(?P<argument>[^\n]*?)(?P=quote)?[\s;)]*$",
    re.MULTILINE,
)
"""A call in Python's form, with or without its quotes and its last bracket."""
ARGUMENTS = {"query": "sql", "submit_answer": "answer"}


class OneTableTask(ToolTask):
    client_type = SqliteEnv

    def messages(self, observation: SqliteObservation) -> list[ChatMessage]:
        return [*TOOLS_CHAT, user(observation.question)]

    async def functions(self, session: Session, observation: Any) -> Sequence[Mapping[str, Any]]:
        """No tools: this model's template has no place for them, the examples have."""
        return ()

    def parse(self, text: str) -> CallToolAction | None:
        """An answer is its first call: the lines around it cost nothing."""
        if (call := CALL.search(text)) is None:
            return None
        return CallToolAction(tool_name=call["name"], arguments={ARGUMENTS[call["name"]]: call["argument"]})

    def result(self, observation: Any) -> str:
        if isinstance(observation, CallToolObservation) and observation.error is None:
            rows = observation.result["rows"]
            is_number = len(rows) == 1 and len(rows[0]) == 1
            return str(rows[0][0]) if is_number else json.dumps(rows)[:100]
        return super().result(observation)


one_table_app = create_app(
    OneTableEnvironment,
    ToolAction,
    ToolObservation,
    env_name="one_table",
    max_concurrent_envs=256,
    state_cls=SqliteState,
    reset_observation_cls=SqliteObservation,
)
