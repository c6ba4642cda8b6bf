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

from benchmarks.commandline import count, heading, measured, parser, progress, write
from benchmarks.wire.bars import Bar
from benchmarks.wire.contestants import DEFAULT_RELEASED_PYTHON
from benchmarks.wire.figures import Figures
from benchmarks.wire.processes import ROOT, Server, StartError, free_port, run, serving
from benchmarks.wire.report import table, verdicts
from openenv_core.adapters.vector import ServedVectorEnv
from openenv_core.client.carrier import CarrierOptions
from openenv_core.client.socket import open_socket

PICTURE_BYTES: Final = 84 * 84 * 4
MEMBERS: Final = 256
PICTURES: Final = 64
PROCESSES: Final = 16

STEPS: Final = "steps/s"
BYTES: Final = "MB/s"

_DESCRIPTION = """\
Steps a second of a vector of served environments, beside the released server with its own client and Gymnasium's
vectors in process; bytes a second of pictures, beside a bare WebSocket. In alternating rounds."""
_EXAMPLES = """\
examples:
  python -m benchmarks.vector                 about two minutes
  python -m benchmarks.vector --quick         does it run?
  python -m benchmarks.vector --rounds 9      on a machine that does other things too"""


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print what there is, and return the exit status."""
    options = parser("vector", _DESCRIPTION, _EXAMPLES)
    options.add_argument("--rounds", type=count, default=5, metavar="N", help="rounds; 5 by default")
    options.add_argument(
        "--released-python",
        type=Path,
        default=DEFAULT_RELEASED_PYTHON,
        metavar="PATH",
        help="interpreter of an installation of the released package (.venvs/released-0.10.0/bin/python)",
    )
    arguments = options.parse_args(words)
    rounds, seconds, share = (1, 0.1, 16) if arguments.quick else (arguments.rounds, 2.0, 1)
    figures, status = measured(
        lambda figures: _measure(figures, arguments.released_python, rounds, seconds, share), StartError
    )
    held = list(_bars(figures))
    print(heading("medians of rounds"))
    rows = [
        (who, load, f"{figures.median(name, who, load):,.0f} {name}") for name, who, load in figures.values
    ]
    print("\n\n".join([table(("of", "load", "measured"), rows), *verdicts(figures, held)]))
    write(arguments.json, figures, held)
    return status


def _measure(figures: Figures, released: Path, rounds: int, seconds: float, share: int) -> None:
    members, pictures, processes = MEMBERS // share, PICTURES // share, max(2, PROCESSES // share)
    plain, many, few = f"cart, {members}", f"CartPole, {members}", f"CartPole, {processes}"
    contestants: list[tuple[str, str, str, Callable[[], float]]] = [
        (STEPS, "ours", plain, partial(_ours, "cart", members, seconds)),
        (STEPS, "ours", many, partial(_gymnasium, members, seconds)),
        (STEPS, "SyncVectorEnv", many, partial(_local, "sync", members, seconds)),
        (STEPS, "AsyncVectorEnv", few, partial(_local, "async", processes, seconds)),
        (
            BYTES,
            "ours",
            f"pictures, {pictures}",
            lambda: _ours("pictures", pictures, seconds) * PICTURE_BYTES / 1e6,
        ),
        (BYTES, "bare WebSocket", f"pictures, {pictures}", partial(_bare, pictures * PICTURE_BYTES, seconds)),
    ]
    if released.exists():
        contestants.insert(0, (STEPS, "released", plain, partial(_released, released, members, seconds)))
    else:
        figures.notes.append(f"the released package: expected an interpreter at {released}, got none")
    for number in range(rounds):
        for figure, who, load, measure in contestants:
            progress(f"round {number + 1} of {rounds}: {who}, {load}")
            figures.add(figure, who, load, measure())


def _bars(figures: Figures) -> Iterator[Bar]:
    for who, against, bound, kind in (
        ("ours", "released", 30.0, "cart"),
        ("ours", "SyncVectorEnv", 0.5, "CartPole"),
        ("ours", "AsyncVectorEnv", 1.0, "CartPole"),
        ("ours", "bare WebSocket", 0.6, "pictures"),
    ):
        mine, theirs = (
            [figures.median(*key) for key in figures.values if key[1] == name and key[2].startswith(kind)]
            for name in (who, against)
        )
        if mine and theirs and mine[0] is not None and theirs[0]:
            yield Bar(f"{kind}: {who} / {against}", mine[0] / theirs[0], bound, "at least")


def _rate(envs: Any, seconds: float) -> float:
    """Return the steps a second of a vector."""
    envs.reset(seed=1)
    envs.action_space.seed(1)
    actions = cycle([envs.action_space.sample() for _ in range(16)])
    for length in (seconds / 4, seconds):
        steps, began = 0, time.perf_counter()
        while time.perf_counter() < began + length:
            envs.step(next(actions))
            steps += envs.num_envs
        rate = steps / (time.perf_counter() - began)
    return rate


@contextmanager
def _serve(command: Sequence[str], env: dict[str, str], *, health: bool = True) -> Iterator[int]:
    port = free_port()
    words = [word.format(port=port) for word in command]
    with serving(Server(words, port, env, None, health=health)) as server:
        yield server.port


def _ours(app: str, members: int, seconds: float) -> float:
    return _served(f"benchmarks.vector.apps.ours:{app}", {}, members, seconds)


def _gymnasium(members: int, seconds: float) -> float:
    return _served("envs.gymnasium_env.server.app:app", {"GYMNASIUM_ENV": "CartPole-v1"}, members, seconds)


def _served(app: str, env: dict[str, str], members: int, seconds: float) -> float:
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
        _serve(command, {"PYTHONPATH": str(ROOT), **env}) as port,
        closing(ServedVectorEnv(f"http://127.0.0.1:{port}", members)) as envs,
    ):
        return _rate(envs, seconds)


def _local(mode: str, members: int, seconds: float) -> float:
    with closing(gymnasium.make_vec("CartPole-v1", members, mode)) as envs:
        return _rate(envs, seconds)


def _released(python: Path, members: int, seconds: float) -> float:
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
    with _serve((*command, "--log-level", "warning"), {"PYTHONPATH": ""}) as port:
        words = [str(python), str(folder / "released_client.py"), str(port), str(members), str(seconds)]
        return float(run(words, {"PYTHONPATH": ""}, None).splitlines()[-1])


def _bare(size: int, seconds: float) -> float:
    """Return the MB a second of frames of this size that are asked for one by one, read as an array."""
    command = (sys.executable, "-m", "uvicorn", "benchmarks.vector.apps.bare:app", "--port", "{port}")
    settings = ("--ws", "websockets-sansio", "--ws-per-message-deflate", "false", "--log-level", "warning")
    with _serve(
        (*command, *settings), {"PYTHONPATH": str(ROOT), "VECTOR_BYTES": str(size)}, health=False
    ) as port:
        return asyncio.run(_ask_bare(f"ws://127.0.0.1:{port}/", size, seconds))


async def _ask_bare(url: str, size: int, seconds: float) -> float:
    carrier = await open_socket(url, CarrierOptions(10.0, 2 * size, None, None))
    for length in (seconds / 4, seconds):
        frames, began = 0, time.perf_counter()
        while time.perf_counter() < began + length:
            carrier.send(b"next")
            assert np.frombuffer(await carrier.recv(), np.uint8).size == size
            frames += 1
        rate = frames * size / 1e6 / (time.perf_counter() - began)
    await carrier.close()
    return rate


if __name__ == "__main__":
    sys.exit(main())
