"""Runs checks on one environment in a process of its own: `python judge.py FOLDER STEP_TIMEOUT_S [CHECK ...]`.

It prints results as JSON. Limits are small: planted bugs are coarse, and there are many of them.
"""

import json
import sys

from openenv_core.checker.check import select_checks
from openenv_core.checker.results import run_check
from openenv_core.checker.subject import Subject

LIMITS = {"sessions": 12, "episodes": 100, "fuzz": 30}


def main(folder: str, step_timeout_s: str, *names: str) -> None:
    with Subject.of(folder, step_timeout_s=float(step_timeout_s), **LIMITS) as subject:
        results = [run_check(subject, one) for one in select_checks(names=names)]
    json.dump({one.check: [one.status, one.message] for one in results}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
