"""The database as a task for a small language model."""

from typing import Any

from envs.sqlite_env import SqliteEnv
from envs.sqlite_env.models import SqliteObservation
from examples.sft.report import write_report
from openenv_core.tools import CallToolObservation
from rl_bridge.rollout import EvaluationResult, Policy, ToolTask
from rl_bridge.tokens.chat import ChatMessage


class SqliteTask(ToolTask):
    """A task of answering one question by inspecting the schema and running SQL."""

    client_type = SqliteEnv

    def messages(self, observation: SqliteObservation) -> list[ChatMessage]:
        """Return the question only: the rest of the task's text is the same for every task."""
        return [{"role": "user", "content": observation.question}]

    def result(self, observation: Any) -> str:
        """Return a call's result: for tables and columns their names and short descriptions, for a query the rows."""
        if isinstance(observation, CallToolObservation) and observation.error is None:
            if observation.tool_name == "list_tables":
                return _format_entries(observation.result)
            if observation.tool_name == "describe_table":
                return _format_entries(observation.result["columns"])
            if observation.tool_name == "query":
                return str(observation.result["rows"])
        return super().result(observation)

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Print and write the share of held-out questions answered correctly."""
        write_report(self.folder, result)


def _format_entries(entries: list[dict[str, Any]]) -> str:
    return "\n".join(f"{entry['name']}: {entry['description'].partition(';')[0]}" for entry in entries)
