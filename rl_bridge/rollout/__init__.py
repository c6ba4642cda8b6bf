"""Rollouts: episodes of an environment server, played by the policy, many at once."""

from rl_bridge.rollout.task import EvaluationResult, Policy, Task
from rl_bridge.rollout.tool_task import ToolTask

__all__ = ["EvaluationResult", "Policy", "Task", "ToolTask"]
