"""The task of a run that names none: a world of tools, by what it says of itself."""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from openenv_core import MCPToolClient, ValidationFailed
from rl_bridge.errors import RolloutError
from rl_bridge.rollout.task import EvaluationResult, Policy, Session
from rl_bridge.rollout.tool_task import ToolTask
from rl_bridge.tokens.chat import Message

REPORT_FILE = "report.json"
REMEDY = "write a subclass of rl_bridge.rollout.Task for this environment, and name it by rollout.task"


class World(ToolTask):
    """Any environment whose actions are calls of tools and whose first observation has its task in words."""

    client_type = MCPToolClient

    def messages(self, observation: Any) -> list[Message]:
        """See `ToolTask.messages`.

        Raises:
            RolloutError: The environment does not say what is to be done.
        """
        try:
            return super().messages(observation)
        except TypeError:
            raise RolloutError(
                "expected a first observation with a text as its task, as rollout.task is not set, got "
                f"{_fields(observation)}; {REMEDY}"
            ) from None

    async def functions(self, session: Session, observation: Any) -> Sequence[Mapping[str, Any]]:
        """See `ToolTask.functions`.

        Raises:
            RolloutError: The environment has no tools.
        """
        try:
            return await super().functions(session, observation)
        except (ValidationFailed, TypeError) as error:
            raise RolloutError(
                f"expected an environment of tools, as rollout.task is not set, got one that lists none ({error}); "
                f"{REMEDY}"
            ) from error

    def result(self, observation: Any) -> str:
        """See `ToolTask.result`.

        Raises:
            RolloutError: It is no observation of tools.
        """
        try:
            return super().result(observation)
        except TypeError:
            raise RolloutError(
                "expected what a call gave, as rollout.task is not set, got an observation of "
                f"{_fields(observation)}; {REMEDY}"
            ) from None

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Write what the held-out episodes earned, and how they ended."""
        report = {
            "episodes": len(result.rewards),
            "mean_reward": statistics.fmean(result.rewards) if result.rewards else None,
            "endings": dict(Counter(map(str, result.endings))),
            "dropped": result.dropped,
            "unscored": result.unscored,
            "train_seconds": result.train_seconds,
        }
        (self.folder / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _fields(observation: Any) -> str:
    return ", ".join(observation.model_dump(exclude={"done", "reward", "metadata"})) or "nothing"
