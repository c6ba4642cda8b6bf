"""The code interpreter as a small language model sees it."""

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
"""What the policy is told of. The world has tools for files beside them, which these tasks have no use for."""


class CodeTask(ToolTask):
    """One function, to be tried on the example and handed in."""

    client_type = CodeFamilyEnv

    def messages(self, observation: CodeInterpreterObservation) -> list[ChatMessage]:
        """The task's prompt."""
        assert observation.prompt is not None
        return [{"role": "user", "content": observation.prompt}]

    async def functions(self, session: Session, observation: Any) -> Sequence[Mapping[str, Any]]:
        """Those of `TOOLS`."""
        return [
            function
            for function in await super().functions(session, observation)
            if function["function"]["name"] in TOOLS
        ]

    def result(self, observation: Any) -> str:
        """Return the output; for an error its last line."""
        if not isinstance(observation, CallToolObservation) or observation.tool_name != "run_python":
            return super().result(observation)
        if observation.error is not None:
            return "error: " + observation.error.message.strip().rpartition("\n")[2]
        return str(observation.result["stdout"]).strip()

    async def report(self, policy: Policy, result: EvaluationResult) -> None:
        """Print and write how many held-out functions passed their hidden tests."""
        write_report(self.folder, result)
