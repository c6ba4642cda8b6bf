"""The code interpreter as a task for a small language model."""

from collections.abc import Mapping, Sequence
from typing import Any

from envs.code_interpreter_env.models import CodeInterpreterObservation
from examples.grpo_code.world import CodeFamilyEnv
from examples.sft.report import write_report
from openenv_core.tools import CallToolObservation
from rl_bridge.rollout import EvaluationResult, Policy, ToolTask
from rl_bridge.rollout.task import Session
from rl_bridge.tokens.chat import ChatMessage

TOOLS = ("run_python", "submit")
"""The tools shown to the policy. The world also has tools for files, which these tasks do not need."""


class CodeTask(ToolTask):
    """A task of writing one function, which is run on the example and submitted."""

    client_type = CodeFamilyEnv

    def messages(self, observation: CodeInterpreterObservation) -> list[ChatMessage]:
        """Return the task's prompt."""
        assert observation.prompt is not None
        return [{"role": "user", "content": observation.prompt}]

    async def functions(self, session: Session, observation: Any) -> Sequence[Mapping[str, Any]]:
        """Return the functions named in `TOOLS`."""
        return [
            function
            for function in await super().functions(session, observation)
            if function["function"]["name"] in TOOLS
        ]

    def result(self, observation: Any) -> str:
        """Return the output, or the last line of an error."""
        if not isinstance(observation, CallToolObservation) or observation.tool_name != "run_python":
            return super().result(observation)
        if observation.error is not None:
            return "error: " + observation.error.message.strip().rpartition("\n")[2]
        return str(observation.result["stdout"]).strip()

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Print and write the share of held-out functions that passed their hidden tests."""
        write_report(self.folder, result)
