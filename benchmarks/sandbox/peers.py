"""The peers that the sandbox is compared with: a Jupyter kernel, a container engine, bubblewrap and nsjail."""

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
    """Return the interpreter to run kernels with: `named`, else that of the variable, else the default."""
    return named or Path(os.environ.get(JUPYTER_VARIABLE, "") or JUPYTER)


def no_jupyter(python: Path) -> str | None:
    """Return a message if an interpreter has no Jupyter kernel; None if it has one."""
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
    """Return a message if no container engine has the image; None if one has."""
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
        StartError: The measuring process failed.
    """
    output = run([str(python), KERNEL, str(starts), str(executions)], {"PYTHONPATH": ""}, None, 180.0)
    result: dict[str, Any] = json.loads(output)
    return result


def docker_run(image: str) -> float:
    """Return the milliseconds of one execution in a new container."""
    start_time = time.perf_counter()
    _docker("run", "--rm", "--network", "none", image, "python", "-c", _PRINT)
    return (time.perf_counter() - start_time) * 1e3


@contextmanager
def container(image: str) -> Iterator[str]:
    """Run an idle container; yields its name."""
    name = f"ropewalk-bench-{uuid4().hex[:8]}"
    try:
        _docker("run", "-d", "--name", name, "--network", "none", image, "sleep", "600")
        yield name
    finally:
        subprocess.run(["docker", "rm", "-f", name], capture_output=True, timeout=_DEADLINE_S, check=False)


def jails() -> dict[str, list[str] | None]:
    """Return the commands that run Python in bubblewrap and in nsjail; None for one that is not installed."""
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
    return {name: command if shutil.which(command[0]) else None for name, command in known.items()}


def burst(command: Sequence[str], count: int) -> list[float]:
    """Run a command `count` times at once; returns the milliseconds from the common start to each one's end.

    Raises:
        StartError: One of them failed, or they took too long.
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
    """Run `count` containers at once, like `burst`."""
    return burst(["docker", "run", "--rm", "--network", "none", image, "python", "-c", _PRINT], count)


def docker_exec(name: str) -> float:
    """Return the milliseconds of one execution in a running container."""
    start_time = time.perf_counter()
    _docker("exec", name, "python", "-c", _PRINT)
    return (time.perf_counter() - start_time) * 1e3


def _docker(*arguments: str) -> None:
    process = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    if process.returncode != 0:
        raise StartError(f"expected `docker {arguments[0]}` to succeed, got: {process.stderr.strip()[-500:]}")
