"""The time until a container can be used: started cold, and leased from a warm pool.

A cold start is the time until the container's server is healthy, with `docker run` and polls of /health and with our
provider, in alternating rounds. Needs a Docker engine:
  python -m benchmarks.containers                                about two minutes
  python -m benchmarks.containers --quick                        does it run?
  python -m benchmarks.containers --image my-env:latest          also other images, separated by commas
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex
from typing import Final

from benchmarks.harness import (
    Bar,
    Benchmark,
    BenchmarkError,
    Measurements,
    at_most,
    in_rounds,
    main,
    progress,
    ratio,
    setting,
)
from benchmarks.processes import run
from openenv_core.errors import OpenEnvError
from openenv_core.providers.base import health_of, wait_healthy
from openenv_core.providers.docker import ContainerOptions, DockerEngine, LocalDockerProvider
from openenv_core.providers.pool import DockerPool

PLAIN: Final = "python:3.11-slim"
PORT: Final = 8000
TIMEOUT_S: Final = 60.0
LEASE_TIMEOUT_S: Final = 120.0
POOL: Final = ("hand-out", "while others start")

_HEALTH: Final = """
import http.server
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "healthy"}')
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("", %d), Health).serve_forever()
"""
"""A server that has only /health, on the standard library."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int = setting(15, quick=1, option="cold starts of each kind (15)")
    leases: int = setting(20, quick=2)
    size: int = 4
    image: tuple[str, ...] = setting(
        (), option=f"images to measure besides {PLAIN}", read=lambda text: tuple(text.split(","))
    )


@dataclass(frozen=True)
class Subject:
    """An image, the options of our containers, and the name in tables."""

    image: str
    options: ContainerOptions
    name: str


def measure(plan: Plan, measurements: Measurements) -> None:
    """Measure the image with /health alone, and those that are named."""
    engine = DockerEngine.find()
    engine.ping()
    command = ("python3", "-c", _HEALTH % PORT)
    options = ContainerOptions(port=PORT, command=command, stop_timeout_s=0.0)
    subjects = [Subject(PLAIN, options, f"{PLAIN}, /health alone")]
    options = ContainerOptions(port=PORT, stop_timeout_s=0.0)
    subjects += [Subject(image, options, image) for image in plan.image]
    for subject in subjects:
        if engine.has_image(subject.image):
            _measure_cold_starts(subject, plan.rounds, measurements)
            _measure_pool(subject, plan, measurements)
        else:
            note = f"{subject.image}: the engine has no such image; build or pull it first"
            measurements.notes.append(note)


def _measure_cold_starts(subject: Subject, rounds: int, measurements: Measurements) -> None:
    ways = {"docker run": _start_plain, "ours": _start_ours}
    for start in ways.values():
        start(subject)  # the first start fills caches, and ours starts its companion
    for _, way in in_rounds(rounds, ways, f"cold start of {subject.image}, "):
        measurements.add("cold s", way, subject.name, ways[way](subject))


def _start_plain(subject: Subject) -> float:
    """Return the seconds from `docker run` to healthy; the container is removed afterwards."""
    name, port = f"ropewalk-bench-{token_hex(4)}", subject.options.port
    start = time.perf_counter()
    try:
        publish = ("-p", f"127.0.0.1::{port}")
        _docker("run", "-d", "--name", name, *publish, subject.image, *(subject.options.command or ()))
        published = int(_docker("port", name, str(port)).splitlines()[0].rpartition(":")[2])
        wait_healthy(subject.image, lambda left_s: health_of(published, left_s), TIMEOUT_S)
        return time.perf_counter() - start
    finally:
        with suppress(BenchmarkError):  # if it was never made
            _docker("rm", "-f", name)


def _start_ours(subject: Subject) -> float:
    """Return the seconds that LocalDockerProvider.start() takes; the container is removed afterwards."""
    provider = LocalDockerProvider(subject.image, options=subject.options)
    start = time.perf_counter()
    provider.start()
    elapsed_s = time.perf_counter() - start
    provider.stop()
    return elapsed_s


def _docker(*arguments: str) -> str:
    return run(["docker", *arguments], timeout_s=TIMEOUT_S).strip()


def _measure_pool(subject: Subject, plan: Plan, measurements: Measurements) -> None:
    """Lease containers from a pool one after another: while it is full, and while it starts others."""
    with DockerPool(subject.image, plan.size, options=subject.options) as pool:
        for name, ready in zip(POOL, (plan.size, 1), strict=True):
            times_ms: list[float] = []
            for lease in range(plan.leases):
                progress(f"pool of {subject.image}, {name}: {lease + 1} of {plan.leases}")
                pool.wait(ready, LEASE_TIMEOUT_S)
                begin = time.perf_counter()
                container = pool.lease(LEASE_TIMEOUT_S)
                times_ms.append((time.perf_counter() - begin) * 1e3)
                container.close()
            measurements.add_times(name, "ours", subject.name, times_ms)


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    for load in measurements.loads("cold s"):
        ours, plain = (measurements.median("cold s", way, load) for way in ("ours", "docker run"))
        yield from at_most(f"cold start to healthy, {load}: ours / docker run", ratio(ours, plain), 1.5)
    for load in measurements.loads("hand-out p50 ms"):
        value = measurements.median("hand-out p50 ms", "ours", load)
        yield from at_most(f"hand-out of a warm pool, {load}: p50, ms", value, 20)


BENCHMARK = Benchmark(
    about=__doc__,
    plan=Plan,
    sections=(measure,),
    tables={
        "Cold start to healthy": ("cold s",),
        "Hand-out of a warm pool": tuple(f"{name} p{percent} ms" for name in POOL for percent in (50, 95)),
    },
    bars=bars,
    errors=(BenchmarkError, OpenEnvError),
)

if __name__ == "__main__":
    main("containers")
