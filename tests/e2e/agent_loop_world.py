"""An agent that plays one table's questions with an OpenAI client, and counts which answers are legal calls."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from half_known_worlds import OneTableEnvironment, OneTableTask, ask_count, assistant, user

from envs.sqlite_env.models import SqliteObservation, SqliteState
from openenv_core.tools import ToolAction, ToolObservation, ToolResult
from rl_bridge.agents import AgentRun
from rl_bridge.rollout import ToolTask
from rl_bridge.rollout.task import Session
from rl_bridge.tokens.chat import ChatMessage
from servers import create_app

LOG: Final = "AGENT_LOOP_LOG"
"""The variable with the path of a file, to which each episode appends whether its answers were legal calls."""
QUERY_REWARD: Final = 0.5
TOOLS: Final = {"query": "sql", "submit_answer": "answer"}


def call(name: str, value: str) -> ChatMessage:
    """Return an answer with a call, in the form that the gateway reads."""
    written = json.dumps({"name": name, "arguments": {TOOLS[name]: value}})
    return assistant(f"<tool_call>\n{written}\n</tool_call>")


def example(table: str, columns: str, question: str, condition: str, answer: str) -> list[ChatMessage]:
    return [
        user(ask_count(table, columns.split(), question)),
        call("query", f"SELECT count(*) FROM {table} WHERE {condition}"),
        {"role": "tool", "content": answer},
        call("submit_answer", answer),
    ]


CHAT: Final[list[ChatMessage]] = [
    {"role": "system", "content": "Answer with query and submit_answer."},
    *example(
        "pets", "pet_no name town bought_on mail", "How many pets live in Oxford?", "town = 'Oxford'", "7"
    ),
    *example(
        "crew",
        "crew_id full_name base joined email",
        "Count the sailors from Bergen.",
        "base = 'Bergen'",
        "12",
    ),
    *example(
        "pupils",
        "id label home_city entered mail",
        "Turin is home to how many pupils?",
        "home_city = 'Turin'",
        "4",
    ),
]


class AgentTableEnvironment(OneTableEnvironment):
    """Also rewards a query that runs: at first hardly an episode gets as far as an answer."""

    def after_call(self, name: str, arguments: Mapping[str, Any], result: ToolResult) -> ToolResult:
        result = super().after_call(name, arguments, result)
        if name != "query" or result.error is not None:
            return result
        return replace(result, reward=(result.reward or 0.0) + QUERY_REWARD)


agent_table_app = create_app(
    AgentTableEnvironment,
    ToolAction,
    ToolObservation,
    env_name="agent_table",
    max_concurrent_envs=256,
    state_cls=SqliteState,
    reset_observation_cls=SqliteObservation,
)


class AgentTableTask(OneTableTask):
    """Shows the two tools that a question needs; the template has no place for their schemas, the examples have."""

    def messages(self, observation: SqliteObservation) -> list[ChatMessage]:
        return [*CHAT, user(observation.question)]

    async def functions(self, session: Session, observation: Any) -> Sequence[Mapping[str, Any]]:
        listed = await ToolTask.functions(self, session, observation)
        return [one for one in listed if one["function"]["name"] in TOOLS]

    def result(self, observation: Any) -> str:
        """An agent reads the last result too, which is a word."""
        told = isinstance(getattr(observation, "result", None), str)
        return ToolTask.result(self, observation) if told else super().result(observation)


def is_legal(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a call names a tool and has its one argument."""
    return name in TOOLS and list(arguments) == [TOOLS[name]]


def write_line(line: str) -> None:
    with Path(os.environ[LOG]).open("a") as file:
        file.write(f"{line}\n")


async def play(run: AgentRun) -> None:
    """Play an episode as `examples.grpo_tools.agent.play` does, and write down which answers were legal."""
    client = run.openai()
    chat: list[Any] = list(run.messages)
    tools: list[Any] = list(run.functions)
    legal: list[bool] = []
    try:
        while True:
            reply = await client.chat.completions.create(model="policy", messages=chat, tools=tools)
            message = reply.choices[0].message
            calls = [(one, json.loads(one.function.arguments)) for one in message.tool_calls or ()]
            legal.append(bool(calls) and all(is_legal(one.function.name, given) for one, given in calls))
            if not calls:
                return
            chat.append(message.model_dump(exclude_none=True))
            for one, given in calls:
                result = await run.call(one.function.name, given)
                chat.append({"role": "tool", "tool_call_id": one.id, "content": result})
    finally:
        write_line(json.dumps({"task": run.task, "legal": legal}))
