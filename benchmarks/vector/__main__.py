"""The command `python -m benchmarks.vector`."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np

from benchmarks.commandline import count, create_parser, heading, progress, run_measurement, write
from benchmarks.wire.bars import Bar
from benchmarks.wire.contestants import DEFAULT_RELEASED_PYTHON
from benchmarks.wire.measurements import Measurements
from benchmarks.wire.processes import ROOT, Server, StartError, free_port, run, serving
from benchmarks.wire.report import table, verdicts
from openenv_core.adapters.vector import ServedVectorEnv
from openenv_core.client.carrier import CarrierOptions
from openenv_core.client.socket import open_socket
from openenv_core.errors import ClientError

PICTURE_BYTES: Final = 84 * 84 * 4
MEMBERS: Final = 256
PICTURES: Final = 64
PROCESSES: Final = 16

ENV_IDS: Final = ("CartPole-v1", "Blackjack-v1")

STEPS: Final = "steps/s"
CPU: Final = "CPU µs a step"

_DESCRIPTION = """\
Steps/s of a vector of served environments, compared with the released server and client and with Gymnasium's in-process
vectors; and of pictures, compared with a bare WebSocket that moves as many bytes. In alternating rounds."""
_EXAMPLES = """\
examples:
  python -m benchmarks.vector                 about two minutes
  python -m benchmarks.vector --quick         does it run?
  python -m benchmarks.vector --rounds 9      on a machine with other load"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the report, and return the exit status."""
    options = create_parser("vector", _DESCRIPTION, _EXAMPLES)
    options.add_argument("--rounds", type=count, default=5, metavar="N", help="rounds; 5 by default")
    options.add_argument(
        "--released-python",
        type=Path,
        default=DEFAULT_RELEASED_PYTHON,
        metavar="PATH",
        help="interpreter of an installation of the released package (.venvs/released-0.10.0/bin/python)",
    )
    arguments = options.parse_args(argv)
    rounds, seconds, share = (1, 0.1, 16) if arguments.quick else (arguments.rounds, 2.0, 1)
    measurements, status = run_measurement(
        lambda measurements: _measure(measurements, arguments.released_python, rounds, seconds, share),
        StartError,
    )
    all_bars = list(_bars(measurements))
    print(heading("medians of rounds"))
    rows = [
        (load, subject, *(f"{measurements.median(name, subject, load) or 0:,.0f}" for name in (STEPS, CPU)))
        for metric, subject, load in measurements.values
        if metric == STEPS
    ]
    print("\n\n".join([table(("load", "of", STEPS, CPU), rows), *verdicts(measurements, all_bars)]))
    write(arguments.json, measurements, all_bars)
    return status


Measure = Callable[[], tuple[float, float]]
"""Returns steps/s, and the CPU µs per step of all processes together."""


def _measure(measurements: Measurements, released: Path, rounds: int, seconds: float, share: int) -> None:
    members, pictures, processes = MEMBERS // share, PICTURES // share, max(2, PROCESSES // share)
    plain, images = f"cart, {members}", f"pictures, {pictures}"
    contestants: list[tuple[str, str, Measure]] = [
        ("ours", plain, partial(_ours, "cart", members, seconds)),
        *(
            contestant
            for env_id in ENV_IDS
            for contestant in (
                ("ours", f"{env_id}, {members}", partial(_gymnasium, env_id, members, seconds)),
                ("SyncVectorEnv", f"{env_id}, {members}", partial(_local, env_id, "sync", members, seconds)),
                (
                    "AsyncVectorEnv",
                    f"{env_id}, {processes}",
                    partial(_local, env_id, "async", processes, seconds),
                ),
            )
        ),
        ("ours", images, partial(_ours, "pictures", pictures, seconds)),
        ("bare WebSocket", images, partial(_bare, pictures, seconds)),
    ]
    if released.exists():
        contestants.insert(0, ("released", plain, partial(_released, released, members, seconds)))
    else:
        measurements.notes.append(f"the released package: expected an interpreter at {released}, got none")
    for number in range(rounds):
        for subject, load, measure in contestants:
            progress(f"round {number + 1} of {rounds}: {subject}, {load}")
            rate, cpu_us = measure()
            measurements.add(STEPS, subject, load, rate)
            measurements.add(CPU, subject, load, cpu_us)


def _bars(measurements: Measurements) -> Iterator[Bar]:
    for load, against, bound in (
        ("cart", "released", 30.0),
        *((env_id, "SyncVectorEnv", 0.5) for env_id in ENV_IDS),
        *((env_id, "AsyncVectorEnv", 1.0) for env_id in ENV_IDS),
        ("pictures", "bare WebSocket", 0.6),
    ):
        for name in (STEPS, CPU):
            mine, theirs = (
                [
                    measurements.median(*key)
                    for key in measurements.values
                    if key[:2] == (name, subject) and key[2].startswith(load)
                ]
                for subject in ("ours", against)
            )
            if not (mine and theirs and mine[0] and theirs[0]):
                continue
            if name == STEPS:
                yield Bar(f"{load}, steps/s: ours / {against}", mine[0] / theirs[0], bound, "at least")
            elif against != "AsyncVectorEnv":  # the CPU time of its processes is not measured
                yield Bar(f"{load}, CPU a step: {against} / ours", theirs[0] / mine[0], bound, "at least")


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


@contextmanager
def _serve(command: Sequence[str], env: dict[str, str], *, health: bool = True) -> Iterator[Server]:
    port = free_port()
    arguments = [word.format(port=port) for word in command]
    with serving(Server(arguments, port, env, None, health=health)) as server:
        yield server


def _ours(app: str, members: int, seconds: float) -> tuple[float, float]:
    return _served(f"benchmarks.vector.apps.ours:{app}", {}, members, seconds)


def _gymnasium(env_id: str, members: int, seconds: float) -> tuple[float, float]:
    return _served("envs.gymnasium_env.server.app:app", {"GYMNASIUM_ENV": env_id}, members, seconds)


def _served(app: str, env: dict[str, str], members: int, seconds: float) -> tuple[float, float]:
    command = (
        sys.executable,
        "-m",
        "openenv_core.cli",
        "serve",
        app,
        "--port",
        "{port}",
        "--log-level",
        "warning",
    )
    with (
        _serve(command, {"PYTHONPATH": str(ROOT), **env}) as server,
        closing(ServedVectorEnv(f"http://127.0.0.1:{server.port}", members)) as envs,
    ):
        return _rate(envs, seconds, server)


def _local(env_id: str, mode: str, members: int, seconds: float) -> tuple[float, float]:
    with closing(gymnasium.make_vec(env_id, members, mode)) as envs:
        return _rate(envs, seconds)


def _released(python: Path, members: int, seconds: float) -> tuple[float, float]:
    folder = ROOT / "benchmarks" / "vector"
    command = (
        str(python),
        "-m",
        "uvicorn",
        "--app-dir",
        str(folder / "apps"),
        "released:cart",
        "--port",
        "{port}",
    )
    with _serve((*command, "--log-level", "warning"), {"PYTHONPATH": ""}) as server:
        before = server.cpu_ns()
        client_command = [
            str(python),
            str(folder / "released_client.py"),
            str(server.port),
            str(members),
            str(seconds),
        ]
        rate, cpu_us = map(float, run(client_command, {"PYTHONPATH": ""}, None).splitlines()[-1].split())
        # The warm-up added a quarter of the steps. Connecting is counted too, but negligible.
        return rate, cpu_us + (server.cpu_ns() - before) / 1e3 / (1.25 * rate * seconds)


def _bare(pictures: int, seconds: float) -> tuple[float, float]:
    """Request frames as large as all pictures together, one by one, and read each as an array."""
    size = pictures * PICTURE_BYTES
    command = (sys.executable, "-m", "uvicorn", "benchmarks.vector.apps.bare:app", "--port", "{port}")
    settings = ("--ws", "websockets-sansio", "--ws-per-message-deflate", "false", "--log-level", "warning")
    env = {"PYTHONPATH": str(ROOT), "VECTOR_BYTES": str(size)}
    with _serve((*command, *settings), env, health=False) as server:
        return asyncio.run(_ask_bare(server, pictures, size, seconds))


class _Inbox(asyncio.Queue[bytes | bytearray]):
    """A queue of the frames that a carrier receives."""

    def on_frame(self, frame: bytes | bytearray) -> None:
        self.put_nowait(frame)

    def on_writable(self) -> None: ...

    def on_lost(self, error: ClientError) -> None: ...


async def _ask_bare(server: Server, pictures: int, size: int, seconds: float) -> tuple[float, float]:
    carrier = await open_socket(f"ws://127.0.0.1:{server.port}/", CarrierOptions(10.0, 2 * size, None, None))
    frames = _Inbox()
    carrier.listen(frames)
    for length in (seconds / 4, seconds):
        steps, clock = 0, _Clock(server)
        while clock.s() < length:
            carrier.send(b"next")
            assert np.frombuffer(await frames.get(), np.uint8).size == size
            steps += pictures
    await carrier.close()
    return clock.rates(steps)


if __name__ == "__main__":
    sys.exit(main())
