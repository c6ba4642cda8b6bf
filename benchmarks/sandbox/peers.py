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

from benchmarks.processes import ROOT, run
from benchmarks.sandbox.engine import CODE

JUPYTER_VARIABLE: Final = "ROPEWALK_BENCH_JUPYTER"
JUPYTER_PYTHON: Final = Path(
    os.environ.get(JUPYTER_VARIABLE) or ROOT / ".venvs" / "jupyter" / "bin" / "python"
)
IMAGE: Final = "python:3.11-slim"
NO_JUPYTER: Final = (
    "the Jupyter kernel: expected ipykernel and jupyter_client at {}, got none; make an environment with "
    f"`pip install ipykernel jupyter_client` and name its interpreter with --jupyter-python or {JUPYTER_VARIABLE}"
)
NO_ENGINE: Final = (
    "docker: expected an engine with the image {}, got none; scripts/docker-engine start gets both"
)

_PRINT: Final = ("python", "-c", f"print({CODE})")
_RUN: Final = ("run", "--rm", "--network", "none")
_BURST_TIMEOUT_S: Final = 300.0


def works(*command: str) -> bool:
    """Return whether a command succeeds."""
    try:
        return (
            subprocess.run(command, capture_output=True, timeout=60.0, cwd="/", check=False).returncode == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def has_kernel(python: Path) -> bool:
    """Return whether an interpreter has a Jupyter kernel."""
    return works(str(python), "-c", "import ipykernel, jupyter_client")


def has_image(image: str) -> bool:
    """Return whether a container engine has an image."""
    return works("docker", "image", "inspect", image)


def kernel(python: Path, starts: int, executions: int) -> dict[str, Any]:
    """Start Jupyter kernels, and execute in one.

    Raises:
        BenchmarkError: The measuring process failed.
    """
    command = [str(python), "benchmarks/sandbox/kernel.py", str(starts), str(executions)]
    result: dict[str, Any] = json.loads(run(command, {"PYTHONPATH": ""}, timeout_s=180.0))
    return result


def docker_run(image: str) -> float:
    """Return the milliseconds of one execution in a new container."""
    return _docker(*_RUN, image, *_PRINT)


def docker_exec(name: str) -> float:
    """Return the milliseconds of one execution in a running container."""
    return _docker("exec", name, *_PRINT)


@contextmanager
def container(image: str) -> Iterator[str]:
    """Run an idle container; yields its name."""
    name = f"ropewalk-bench-{uuid4().hex[:8]}"
    try:
        _docker("run", "-d", "--name", name, "--network", "none", image, "sleep", "600")
        yield name
    finally:
        works("docker", "rm", "-f", name)


def burst_commands(image: str | None) -> dict[str, list[str]]:
    """Return commands that run Python in bubblewrap and nsjail, and in a container of an image."""
    bubblewrap = "bwrap --ro-bind / / --dev /dev --proc /proc --unshare-all --die-with-parent"
    inner = [sys.executable, *_PRINT[1:]]
    commands = {"bubblewrap": [*bubblewrap.split(), *inner]}
    commands["nsjail"] = ["nsjail", "-Mo", "-Q", "--chroot", "/", "--", *inner]
    if image is not None:
        commands["docker run"] = ["docker", *_RUN, image, *_PRINT]
    return commands


def burst(command: Sequence[str], count: int) -> list[float] | None:
    """Run a command `count` times at once.

    Returns:
        The milliseconds from the common start to each one's end; None if the command is not installed.

    Raises:
        BenchmarkError: One of them failed, or they took too long.
    """
    if shutil.which(command[0]) is None:
        return None
    start_time = time.perf_counter()

    def run_one(_: int) -> float:
        run(command, timeout_s=_BURST_TIMEOUT_S)
        return (time.perf_counter() - start_time) * 1e3

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run_one, range(count)))


def _docker(*arguments: str) -> float:
    start_time = time.perf_counter()
    run(["docker", *arguments], timeout_s=60.0)
    return (time.perf_counter() - start_time) * 1e3
