"""Two ways from an image to a healthy server: `docker run` with polls of /health, and our provider."""

import subprocess
import time
from secrets import token_hex
from typing import Final

from benchmarks.containers.servers import Subject
from openenv_core.providers.base import health_of, wait_healthy
from openenv_core.providers.docker import ContainerOptions, LocalDockerProvider

DEADLINE_S: Final = 60.0


class BenchError(Exception):
    """A measured operation failed."""


def docker(*arguments: str) -> str:
    """Run a `docker` command and return its output.

    Raises:
        BenchError: The command failed.
    """
    process = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if process.returncode != 0:
        raise BenchError(
            f"expected `docker {arguments[0]}` to succeed, got: {process.stderr.strip()[-1000:]}"
        )
    return process.stdout.strip()


def options_of(subject: Subject) -> ContainerOptions:
    """Return the options of our containers: the defaults."""
    return ContainerOptions(port=subject.port, command=subject.command, stop_timeout_s=0.0)


def start_plain(subject: Subject) -> float:
    """Return the seconds from `docker run` to healthy; the container is removed afterwards."""
    name = f"ropewalk-bench-{token_hex(4)}"
    publish = f"127.0.0.1::{subject.port}"
    start = time.perf_counter()
    try:
        docker("run", "-d", "--name", name, "-p", publish, subject.image, *(subject.command or ()))
        port = int(docker("port", name, str(subject.port)).splitlines()[0].rpartition(":")[2])
        problem = wait_healthy(lambda left_s: health_of(port, left_s), DEADLINE_S)
        if problem is not None:
            raise BenchError(f"{subject.image} was not healthy within {DEADLINE_S:g} s: {problem}")
        return time.perf_counter() - start
    finally:
        subprocess.run(["docker", "rm", "-f", name], capture_output=True, timeout=DEADLINE_S, check=False)


def start_ours(subject: Subject) -> float:
    """Return the seconds that LocalDockerProvider.start() takes; the container is removed afterwards."""
    provider = LocalDockerProvider(subject.image, options=options_of(subject))
    start = time.perf_counter()
    provider.start()
    elapsed_s = time.perf_counter() - start
    provider.stop()
    return elapsed_s
