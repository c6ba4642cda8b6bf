"""The database as a small language model sees it."""

from typing import Any

from envs.sqlite_env import SqliteEnv
from envs.sqlite_env.models import SqliteObservation
from examples.sft.report import write_report
from openenv_core.tools import CallToolObservation
from rl_bridge.rollout import EvaluationResult, Policy, ToolTask
from rl_bridge.tokens.chat import ChatMessage


class SqliteTask(ToolTask):
    """One question, answered by looking at the schema and asking SQL."""

    client_type = SqliteEnv

    def messages(self, observation: SqliteObservation) -> list[ChatMessage]:
        """The question alone: the rest of the task's text says what every task says."""
        return [{"role": "user", "content": observation.question}]

    def result(self, observation: Any) -> str:
        """What a call gave: of tables and columns names and the first words about them, of a query the rows."""
        if isinstance(observation, CallToolObservation) and observation.error is None:
            if observation.tool_name == "list_tables":
                return _format_entries(observation.result)
            if observation.tool_name == "describe_table":
                return _format_entries(observation.result["columns"])
            if observation.tool_name == "query":
                return str(observation.result["rows"])
        return super().result(observation)

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Print and write how many held-out questions were answered rightly."""
        write_report(self.folder, result)


def _format_entries(entries: list[dict[str, Any]]) -> str:
    return "\n".join(f"{entry['name']}: {entry['description'].partition(';')[0]}" for entry in entries)
