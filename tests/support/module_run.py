"""Programs that run to their end, and modules of ours from whichever folder: `python -m NAME`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def finished(*command: str | Path, timeout_s: float, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end; what it prints is kept, and its status is the caller's to judge."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **options)


def run_module(name: str, *words: str, cwd: Path, timeout_s: float) -> "subprocess.CompletedProcess[str]":
    """Run a module so."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = (sys.executable, "-m", name, *words)
    return finished(*command, cwd=cwd, env={**os.environ, "PYTHONPATH": path}, timeout_s=timeout_s)
