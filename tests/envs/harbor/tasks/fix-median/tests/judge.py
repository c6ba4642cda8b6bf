"""Asks the solution in a process of its own, and judges what that prints."""

import json
import subprocess
import sys

CASES = [
    ("median", [1, 2, 3, 4], 2.5),
    ("median", [3, 1, 2], 2),
    ("mean", [1, 2], 1.5),
    ("median", [5, 1], 3),
]


def ask(name, values):
    code = f"import stats; print(float(stats.{name}({values})))"
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/app", timeout=20
    )
    return asked.stdout.strip()


right = sum(ask(name, values) == str(float(expected)) for name, values, expected in CASES)
json.dump({"reward": float(right == len(CASES)), "share": right / len(CASES)}, sys.stdout)
