"""Verifiable rewards: tasks with hidden tests, and the grader that runs submissions against them.

A trainer can use it without the environment: `await Grader(sandbox).grade(task, code)` with a started
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
