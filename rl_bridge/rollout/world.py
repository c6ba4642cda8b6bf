"""The task of a run that names none: a world of tools, by what it says of itself."""

from collections.abc import Mapping, Sequence
from typing import Any

from openenv_core import MCPToolClient, ValidationFailed
from rl_bridge.errors import RolloutError
from rl_bridge.rollout.task import Session
from rl_bridge.rollout.tool_task import ToolTask
from rl_bridge.tokens.chat import Message

REMEDY = "write a subclass of rl_bridge.rollout.Task for this environment, and name it by rollout.task (docs/tasks.md)"


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


def _fields(observation: Any) -> str:
    return ", ".join(observation.model_dump(exclude={"done", "reward", "metadata"})) or "nothing"
