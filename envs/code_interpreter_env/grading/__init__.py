"""Rewards that can be verified: tasks with hidden tests, and what grades code against them.

Of use to a trainer without the environment: `await Grader(sandbox).grade(task, code)` with a started
`openenv_core.sandbox.Sandbox`.
"""

from .grader import Grader, NoAttemptsLeftError, TaskSession
from .provider import InvalidTaskError, JsonlTasks
from .task import FunctionTask, NumericTask, StdioTask, SuiteTask, Task, parse_task, public_view
from .verdict import CaseOutcome, Category, Reason, Verdict

__all__ = [
    "CaseOutcome",
    "Category",
    "FunctionTask",
    "Grader",
    "InvalidTaskError",
    "JsonlTasks",
    "NoAttemptsLeftError",
    "NumericTask",
    "Reason",
    "StdioTask",
    "SuiteTask",
    "Task",
    "TaskSession",
    "Verdict",
    "parse_task",
    "public_view",
]
