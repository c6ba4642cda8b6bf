"""The scenarios that do not pass, one by one, and why. Whatever is not here has to pass; what is here and passes fails."""

from collections.abc import Mapping
from typing import Final, TypeAlias

from conformance_runs import Verdict

Expected: TypeAlias = Mapping[str, tuple[Verdict, str]]

_TASKS = "the extension io.modelcontextprotocol/tasks (SEP-2663), which the SDK does not have"
_SKILLS = "the extension for skills (SEP-2640), which the SDK does not have"
_OLD_POLLING = (
    "this version of the suite never says which version it speaks; priming events began with 2025-11-25"
)

SERVER: Final[Mapping[str, Expected]] = {
    "0.1.16": {"server-sse-polling": ("warned", _OLD_POLLING)},
    "2025-03-26": {},
    "2025-06-18": {},
    "2025-11-25": {},
    "2026-07-28": {
        "tasks-lifecycle": ("failed", _TASKS),
        "tasks-capability-negotiation": ("failed", _TASKS),
        "tasks-wire-fields": ("failed", _TASKS),
        "tasks-request-state-removal": ("failed", _TASKS),
        "tasks-mrtr-input": ("failed", _TASKS),
        "tasks-request-headers": ("failed", _TASKS),
        "tasks-dispatch-and-envelope": ("failed", _TASKS),
        "tasks-status-notifications": ("skipped", f"{_TASKS}; the suite itself looks at nothing"),
        "tasks-required-task-error": ("failed", _TASKS),
        "tasks-mrtr-composition": ("failed", _TASKS),
    },
    "extensions": {
        "sep-2640-skills-directory": ("skipped", _SKILLS),
        "sep-2640-skills-enumeration": ("skipped", _SKILLS),
        "sep-2640-skills-manifest": ("skipped", _SKILLS),
    },
}
