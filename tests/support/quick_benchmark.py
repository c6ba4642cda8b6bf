"""Runs a benchmark's command with `--quick`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def quick_benchmark(name: str, folder: Path, *words: str, timeout_s: float = 110) -> Any:
    """Return the command's JSON file; asserts that everything was measured."""
    out = folder / "out.json"
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick", *words, "--json", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(out.read_text())
    assert report["notes"] == []
    return report
