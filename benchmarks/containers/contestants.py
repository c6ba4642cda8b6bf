"""Two ways from an image to a healthy server: `docker run` with a look at /health, and ours."""

import subprocess
import time
from secrets import token_hex
from typing import Final

from benchmarks.containers.servers import Subject
from openenv_core.providers.base import status_of
from openenv_core.providers.docker import ContainerOptions, LocalDockerProvider

DEADLINE_S: Final = 60.0
LOOK_S: Final = 0.005
"""How often the plain way looks at /health. Ours begins at 3 ms and slows down, at worst to 50 ms."""


class BenchError(Exception):
    """Something that is measured did not work."""


def docker(*words: str) -> str:
    """Run the engine's command line and return what it printed.

    Raises:
        BenchError: It failed.
    """
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode != 0:
        raise BenchError(f"expected `docker {words[0]}` to succeed, got: {done.stderr.strip()[-1000:]}")
    return done.stdout.strip()


def options_of(subject: Subject) -> ContainerOptions:
    """Return what our containers get: everything as by default."""
    return ContainerOptions(port=subject.port, command=subject.command, stop_timeout_s=0.0)


def plain_start(subject: Subject) -> float:
    """Return the seconds from `docker run` to healthy; the container is gone afterwards."""
    name = f"ropewalk-bench-{token_hex(4)}"
    publish = f"127.0.0.1::{subject.port}"
    begin = time.perf_counter()
    try:
        docker("run", "-d", "--name", name, "-p", publish, subject.image, *(subject.command or ()))
        port = int(docker("port", name, str(subject.port)).splitlines()[0].rpartition(":")[2])
        while not _healthy(port):
            if time.perf_counter() - begin > DEADLINE_S:
                raise BenchError(
                    f"expected {subject.image} to be healthy within {DEADLINE_S:g} s, got no answer"
                )
            time.sleep(LOOK_S)
        return time.perf_counter() - begin
    finally:
        subprocess.run(["docker", "rm", "-f", name], capture_output=True, timeout=DEADLINE_S, check=False)


def our_start(subject: Subject) -> float:
    """Return the seconds that LocalDockerProvider.start() takes; the container is gone afterwards."""
    provider = LocalDockerProvider(subject.image, options=options_of(subject))
    begin = time.perf_counter()
    provider.start()
    took = time.perf_counter() - begin
    provider.stop()
    return took


def _healthy(port: int) -> bool:
    try:
        return status_of(port, DEADLINE_S) == "healthy"
    except (OSError, ValueError):
        return False
