"""The Harbor tasks of the tests, and the rewards for their solutions and for nothing, by our verifier and Harbor's."""

from pathlib import Path

TASKS = Path(__file__).parents[1] / "envs" / "harbor" / "tasks"

SOLVED: dict[str, dict[str, float]] = {
    "count-lines": {"reward": 1.0},
    "fix-median": {"reward": 1.0, "share": 1.0},
    "make-tool": {"reward": 1.0},
    "report": {"reward": 1.0},
    "sort-table": {"reward": 1.0},
}
NOTHING: dict[str, dict[str, float]] = {
    **{name: {"reward": 0.0} for name in SOLVED},
    "fix-median": {"reward": 0.0, "share": 0.5},
}
IN_A_SANDBOX = ("count-lines", "fix-median", "make-tool")
"""The tasks without an image."""
