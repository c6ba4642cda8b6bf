"""A module of ours as a process, from whichever folder: `python -m NAME`."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_module(name: str, *words: str, cwd: Path, timeout_s: float) -> "subprocess.CompletedProcess[str]":
    """Run it to its end; what it prints is kept, and its status is the caller's to judge."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", name, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
