"""Steps/s of a vector of served environments, and of pictures.

Compared with the released server and client, with Gymnasium's in-process vectors, and with a bare WebSocket that moves
as many bytes. In alternating rounds:
  python -m benchmarks.vector                 about two minutes
  python -m benchmarks.vector --quick         does it run?
  python -m benchmarks.vector --rounds 9      on a machine with other load
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np

from benchmarks.harness import Bar, Benchmark, Measurements, at_least, in_rounds, main, ratio, setting
from benchmarks.processes import (
    BARE_WEBSOCKET,
    NO_RELEASED,
    RELEASED_PYTHON,
    ROOT,
    Server,
    run,
    serve_command,
    serving,
    uvicorn_command,
)
from openenv_core.adapters.vector import ServedVectorEnv
from openenv_core.client import GenericEnvClient
from openenv_core.client.socket import open_socket
from openenv_core.errors import ClientError

PICTURE_BYTES: Final = 84 * 84 * 4
ENV_IDS: Final = ("CartPole-v1", "Blackjack-v1")
STEPS: Final = "steps/s"
CPU: Final = "CPU µs a step"

Measure = Callable[[], tuple[float, float]]
"""Returns steps/s, and the CPU µs per step of all processes together."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        seconds: Duration of one measurement.
        members: Environments of a vector.
        pictures: Environments of a vector with pictures.
        processes: Environments of `AsyncVectorEnv`, each in a process.
    """

    rounds: int = setting(5, quick=1, option="rounds (5)")
    released_python: Path = setting(
        RELEASED_PYTHON, option="interpreter of an installation of the released package", read=Path
    )
    seconds: float = setting(2.0, quick=0.1)
    members: int = setting(256, quick=16)
    pictures: int = setting(64, quick=4)
    processes: int = setting(16, quick=2)


def measure(plan: Plan, measurements: Measurements) -> None:
    """Measure every vector in turn, round after round.

    Raises:
        BenchmarkError: A server or a client failed.
    """
    cart, images = f"cart, {plan.members}", f"pictures, {plan.pictures}"
    contestants: list[tuple[str, str, Measure]] = []
    if plan.released_python.exists():
        contestants.append(("released", cart, partial(_released, plan)))
    else:
        measurements.notes.append(NO_RELEASED.format(plan.released_python))
    contestants.append(("ours", cart, partial(_served, plan, "benchmarks.vector.ours:cart", plan.members)))
    for env_id in ENV_IDS:
        load, apart = f"{env_id}, {plan.members}", f"{env_id}, {plan.processes}"
        gym = {"GYMNASIUM_ENV": env_id}
        contestants += [
            ("ours", load, partial(_served, plan, "envs.gymnasium_env.server.app:app", plan.members, gym)),
            ("SyncVectorEnv", load, partial(_local, plan, env_id, "sync", plan.members)),
            ("AsyncVectorEnv", apart, partial(_local, plan, env_id, "async", plan.processes)),
        ]
    contestants += [
        ("ours", images, partial(_served, plan, "benchmarks.vector.ours:pictures", plan.pictures)),
        ("bare WebSocket", images, partial(_bare, plan)),
    ]
    by_name = {(subject, load): taken for subject, load, taken in contestants}
    for _, (subject, load) in in_rounds(plan.rounds, by_name):
        rate, cpu_us = by_name[subject, load]()
        measurements.add_all(subject, load, {STEPS: rate, CPU: cpu_us})


def bars(measurements: Measurements) -> Iterator[Bar]:
    """Yield every bar that this run has measurements for."""
    for load, against, bound in (
        ("cart", "released", 30.0),
        *((env_id, "SyncVectorEnv", 0.5) for env_id in ENV_IDS),
        *((env_id, "AsyncVectorEnv", 1.0) for env_id in ENV_IDS),
        ("pictures", "bare WebSocket", 0.6),
    ):
        keys = {subject: at for subject, at in measurements.measured(STEPS) if at.startswith(load)}
        rates, cpu_us = (
            [measurements.median(figure, subject, keys.get(subject, "")) for subject in ("ours", against)]
            for figure in (STEPS, CPU)
        )
        yield from at_least(f"{load}, steps/s: ours / {against}", ratio(*rates), bound)
        if against != "AsyncVectorEnv":  # the CPU time of its processes is not measured
            yield from at_least(f"{load}, CPU a step: {against} / ours", ratio(*reversed(cpu_us)), bound)


def _rate(envs: Any, seconds: float, server: Server | None = None) -> tuple[float, float]:
    envs.reset(seed=1)
    envs.action_space.seed(1)
    actions = cycle([envs.action_space.sample() for _ in range(16)])
    for length in (seconds / 4, seconds):
        steps, clock = 0, _Clock(server)
        while clock.s() < length:
            envs.step(next(actions))
            steps += envs.num_envs
    return clock.rates(steps)


class _Clock:
    """Wall time, and CPU time of this process and a server, since its creation."""

    def __init__(self, server: Server | None) -> None:
        self._server = server
        self._began, self._cpu_s = time.perf_counter(), self._all_cpu_s()

    def s(self) -> float:
        return time.perf_counter() - self._began

    def rates(self, steps: int) -> tuple[float, float]:
        return steps / self.s(), 1e6 * (self._all_cpu_s() - self._cpu_s) / steps

    def _all_cpu_s(self) -> float:
        return time.process_time() + (self._server.cpu_ns() / 1e9 if self._server else 0.0)


def _served(plan: Plan, app: str, members: int, env: dict[str, str] | None = None) -> tuple[float, float]:
    command = serve_command(app)
    with serving(command, env) as server, closing(ServedVectorEnv(server.url, members)) as envs:
        return _rate(envs, plan.seconds, server)


def _local(plan: Plan, env_id: str, mode: str, members: int) -> tuple[float, float]:
    with closing(gymnasium.make_vec(env_id, members, mode)) as envs:
        return _rate(envs, plan.seconds)


def _released(plan: Plan) -> tuple[float, float]:
    folder, python, env = ROOT / "benchmarks" / "vector", str(plan.released_python), {"PYTHONPATH": ""}
    with serving(uvicorn_command("released:cart", "--app-dir", str(folder), python=python), env) as server:
        before = server.cpu_ns()
        words = (server.port, plan.members, plan.seconds)
        output = run([python, str(folder / "released_client.py"), *map(str, words)], env)
        rate, cpu_us = map(float, output.splitlines()[-1].split())
        # The warm-up added a quarter of the steps. Connecting is counted too, but negligible.
        return rate, cpu_us + (server.cpu_ns() - before) / 1e3 / (1.25 * rate * plan.seconds)


def _bare(plan: Plan) -> tuple[float, float]:
    """Request frames as large as all pictures together, one by one, and read each as an array."""
    env = {"VECTOR_BYTES": str(plan.pictures * PICTURE_BYTES)}
    command = uvicorn_command("benchmarks.vector.bare:app", *BARE_WEBSOCKET)
    with serving(command, env, health=False) as server:
        return asyncio.run(_ask_bare(server, plan))


class _Inbox(asyncio.Queue[bytes | bytearray]):
    """A queue of the frames that a carrier receives."""

    def on_frame(self, frame: bytes | bytearray) -> None:
        self.put_nowait(frame)

    def on_writable(self) -> None: ...

    def on_lost(self, error: ClientError) -> None: ...


async def _ask_bare(server: Server, plan: Plan) -> tuple[float, float]:
    size = plan.pictures * PICTURE_BYTES
    client = GenericEnvClient(
        f"http://127.0.0.1:{server.port}",
        max_message_size_mb=2 * size / 2**20,
        websocket_ping_interval_s=None,
    )
    carrier = await open_socket(f"ws://127.0.0.1:{server.port}/", client._session.settings)
    frames = _Inbox()
    carrier.listen(frames)
    for length in (plan.seconds / 4, plan.seconds):
        steps, clock = 0, _Clock(server)
        while clock.s() < length:
            carrier.send(b"next")
            assert np.frombuffer(await frames.get(), np.uint8).size == size
            steps += plan.pictures
    await carrier.close()
    return clock.rates(steps)


BENCHMARK = Benchmark(
    about=__doc__, plan=Plan, sections=(measure,), tables={"Vectors": (STEPS, CPU)}, bars=bars
)

if __name__ == "__main__":
    main("vector")
