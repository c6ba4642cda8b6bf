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


asked = f"import json, stats; print(json.dumps([float(getattr(stats, n)(v)) for n, v, _ in {CASES}]))"
done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, cwd="/app", timeout=20)
answers = json.loads(done.stdout) if done.returncode == 0 else [None] * len(CASES)
right = sum(answer == float(case[2]) for answer, case in zip(answers, CASES, strict=True))
json.dump({"reward": float(right == len(CASES)), "share": right / len(CASES)}, sys.stdout)
