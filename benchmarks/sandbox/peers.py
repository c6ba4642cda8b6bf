"""The peers that the sandbox is compared with: a Jupyter kernel and a container engine."""

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from benchmarks.processes import ROOT, run
from benchmarks.sandbox.engine import CODE

JUPYTER_PYTHON: Final = ROOT / ".venvs" / "jupyter" / "bin" / "python"
IMAGE: Final = "python:3.11-slim"
NO_JUPYTER: Final = (
    "the Jupyter kernel: expected ipykernel and jupyter_client at {}, got none; make an environment with "
    "`pip install ipykernel jupyter_client` and name its interpreter with --jupyter-python"
)
NO_ENGINE: Final = f"docker: expected an engine with {IMAGE}, got none; scripts/docker-engine start gets both"

_PRINT: Final = ("python", "-c", f"print({CODE})")
_TIMEOUT_S: Final = 300.0


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


def has_image() -> bool:
    """Return whether a container engine has the image."""
    return works("docker", "image", "inspect", IMAGE)


def kernel(python: Path, starts: int, executions: int) -> dict[str, Any]:
    """Start Jupyter kernels, and execute in one.

    Raises:
        BenchmarkError: The measuring process failed.
    """
    command = [str(python), "benchmarks/sandbox/kernel.py", str(starts), str(executions)]
    result: dict[str, Any] = json.loads(run(command, {"PYTHONPATH": ""}, timeout_s=180.0))
    return result


def docker_run() -> float:
    """Return the milliseconds of one execution in a new container."""
    return _docker("run", "--rm", "--network", "none", IMAGE, *_PRINT)


def docker_burst(count: int) -> list[float]:
    """Return the milliseconds of `count` executions at once, each in a new container."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda _: docker_run(), range(count)))


def docker_exec(name: str) -> float:
    """Return the milliseconds of one execution in a running container."""
    return _docker("exec", name, *_PRINT)


@contextmanager
def container() -> Iterator[str]:
    """Run an idle container; yields its name."""
    name = f"ropewalk-bench-{uuid4().hex[:8]}"
    try:
        _docker("run", "-d", "--name", name, "--network", "none", IMAGE, "sleep", "600")
        yield name
    finally:
        works("docker", "rm", "-f", name)


def _docker(*arguments: str) -> float:
    start_time = time.perf_counter()
    run(["docker", *arguments], timeout_s=_TIMEOUT_S)
    return (time.perf_counter() - start_time) * 1e3
