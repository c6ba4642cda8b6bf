"""Rollouts: the policy plays many episodes concurrently on environment servers."""

from rl_bridge.rollout.schema_task import SchemaTask
from rl_bridge.rollout.task import EvaluationResult, Policy, Task
from rl_bridge.rollout.tool_task import ToolTask

__all__ = ["EvaluationResult", "Policy", "SchemaTask", "Task", "ToolTask"]
