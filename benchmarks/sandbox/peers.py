"""Others that run code, in the same run: a Jupyter kernel, and a container engine."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from benchmarks.sandbox.engine import CODE
from benchmarks.wire.processes import ROOT, StartError, run

JUPYTER: Final = ROOT / ".venvs" / "jupyter" / "bin" / "python"
JUPYTER_VARIABLE: Final = "ROPEWALK_BENCH_JUPYTER"
KERNEL: Final = "benchmarks/sandbox/kernel.py"
IMAGE: Final = "python:3.11-slim"

_PRINT: Final = f"print({CODE})"
_DEADLINE_S: Final = 60.0
_BURST_S: Final = 300.0


def jupyter_python(named: Path | None) -> Path:
    """Return the interpreter that is to have a kernel: the one named, by option or variable, or the usual one."""
    return named or Path(os.environ.get(JUPYTER_VARIABLE, "") or JUPYTER)


def no_jupyter(python: Path) -> str | None:
    """Return why an interpreter has no kernel, and how to get one; None where it has."""
    try:
        code = "import ipykernel, jupyter_client"
        process = subprocess.run(
            [python, "-c", code], capture_output=True, timeout=_DEADLINE_S, cwd="/", check=False
        )
        if process.returncode == 0:
            return None
    except OSError:
        pass
    return (
        f"the Jupyter kernel: expected ipykernel and jupyter_client at {python}, got none; make an environment with "
        f"`pip install ipykernel jupyter_client` and name its interpreter with --jupyter-python or {JUPYTER_VARIABLE}"
    )


def no_engine(image: str) -> str | None:
    """Return why nothing can run in a container, and what helps; None where it can."""
    try:
        process = subprocess.run(
            ["docker", "image", "inspect", image], capture_output=True, timeout=_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        process = None
    if process is not None and process.returncode == 0:
        return None
    return (
        f"docker: expected an engine with the image {image}, got none; scripts/docker-engine start gets both"
    )


def kernel(python: Path, starts: int, executions: int) -> dict[str, Any]:
    """Start Jupyter kernels, and execute in one.

    Raises:
        StartError: It did not work.
    """
    output = run([str(python), KERNEL, str(starts), str(executions)], {"PYTHONPATH": ""}, None, 180.0)
    result: dict[str, Any] = json.loads(output)
    return result


def docker_run(image: str) -> float:
    """Return the milliseconds of one execution in a container of its own."""
    start_time = time.perf_counter()
    _docker("run", "--rm", "--network", "none", image, "python", "-c", _PRINT)
    return (time.perf_counter() - start_time) * 1e3


@contextmanager
def container(image: str) -> Iterator[str]:
    """Have a container that waits; give its name."""
    name = f"ropewalk-bench-{uuid4().hex[:8]}"
    try:
        _docker("run", "-d", "--name", name, "--network", "none", image, "sleep", "600")
        yield name
    finally:
        subprocess.run(["docker", "rm", "-f", name], capture_output=True, timeout=_DEADLINE_S, check=False)


def jails() -> dict[str, list[str]]:
    """Return the commands that run Python in another's jail of processes, as far as they are installed."""
    inner = [sys.executable, "-c", _PRINT]
    bubblewrap = [
        "bwrap",
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        "--unshare-all",
        "--die-with-parent",
    ]
    nsjail = ["nsjail", "-Mo", "-Q", "--chroot", "/"]
    known = {"bubblewrap": [*bubblewrap, *inner], "nsjail": [*nsjail, "--", *inner]}
    return {name: command for name, command in known.items() if shutil.which(command[0])}


def burst(command: Sequence[str], count: int) -> list[float]:
    """Run a command so many times at once: milliseconds from the beginning of all to each one's end.

    Raises:
        StartError: One of them did not succeed.
    """
    start_time = time.perf_counter()

    def run_one(_: int) -> float:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_BURST_S, check=False)
        if process.returncode != 0:
            raise StartError(f"expected {command[0]} to succeed, got: {process.stderr.strip()[-500:]}")
        return (time.perf_counter() - start_time) * 1e3

    try:
        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(run_one, range(count)))
    except subprocess.TimeoutExpired as error:
        raise StartError(f"expected {count} of {command[0]} within {_BURST_S:g} s, got fewer") from error


def docker_burst(image: str, count: int) -> list[float]:
    """Run containers so many times at once, as `burst` does."""
    return burst(["docker", "run", "--rm", "--network", "none", image, "python", "-c", _PRINT], count)


def docker_exec(name: str) -> float:
    """Return the milliseconds of one execution in a container that is there."""
    start_time = time.perf_counter()
    _docker("exec", name, "python", "-c", _PRINT)
    return (time.perf_counter() - start_time) * 1e3


def _docker(*arguments: str) -> None:
    process = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    if process.returncode != 0:
        raise StartError(f"expected `docker {arguments[0]}` to succeed, got: {process.stderr.strip()[-500:]}")
