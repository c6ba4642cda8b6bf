"""Runs programs, and modules of the project from any folder, to their end."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def venv_python(name: str) -> Path:
    """Return the Python of one of the virtual environments in `.venvs`, whether it is there or not."""
    suffix = "" if sys.version_info[:2] == (3, 11) else f"-{sys.version_info.major}.{sys.version_info.minor}"
    return ROOT / ".venvs" / f"{name}{suffix}" / "bin" / "python"


def end(process: "subprocess.Popen[Any]", timeout_s: float = 60) -> None:
    """Ask a process to end, and kill it if it does not in time."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def finished(*command: str | Path, timeout_s: float, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end and capture its output; the caller checks the status."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **options)


def run_module(name: str, *words: str, cwd: Path, timeout_s: float) -> "subprocess.CompletedProcess[str]":
    """Run `python -m NAME` to its end and capture its output."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = (sys.executable, "-m", name, *words)
    return finished(*command, cwd=cwd, env={**os.environ, "PYTHONPATH": path}, timeout_s=timeout_s)
