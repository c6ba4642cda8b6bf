"""Attacks through a real server: /health answers meanwhile, and nothing of them stays."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
from serve_process import ServeProcess, serve

from envs.code_interpreter_env import CodeInterpreterEnv

from .catalogue import CATALOGUE
from .model import EVERYWHERE, Attack, with_tools
from .watch import percentile

APP = "envs.code_interpreter_env.server.app:app"
ROOT = Path(__file__).resolve().parents[3]
HOST = {"calls": {}, "isolation": "", "deep": 100}
CATEGORIES = ("cpu", "output", "memory", "channel")
TOGETHER = 4
BAR_S = 0.1
CALM_S = 0.03
"""Beyond this without any attack, the machine has other things to do, and no bar says anything about the server."""


def started() -> AbstractContextManager[ServeProcess]:
    return serve(app=APP, CODE_INTERPRETER_PRELOAD="none", PYTHONPATH=str(ROOT))


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with started() as found:
        yield found


def chosen() -> list[Attack]:
    return [
        attack
        for attack in CATALOGUE
        if attack.category in CATEGORIES and attack.act is None and attack.holds == EVERYWHERE
    ]


class Health:
    """Asks for /health all the time."""

    def __init__(self, server: ServeProcess) -> None:
        self.took: list[float] = []
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> "Health":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._over.wait(0.02):
            began = time.perf_counter()
            status, _ = self._server.get("/health")
            self.took.append(time.perf_counter() - began)
            assert status == 200


def attacked(server: ServeProcess, attack: Attack) -> list[str]:
    limits = {"memory_bytes": attack.limits.memory_bytes, "grace_s": 0.1, "timeout_s": 10.0}
    statuses = []
    with CodeInterpreterEnv(base_url=f"http://{server.address}").sync() as client:
        client.reset(limits=limits)
        for cell in attack.cells:
            told = client.execute(with_tools(cell, HOST), timeout_s=min(1.0, attack.timeout_s))
            statuses.append(told.observation.status)
    return statuses


def is_calm(server: ServeProcess) -> bool:
    """Whether /health is answered at once where nobody attacks."""
    with Health(server) as health:
        time.sleep(3.0)
    return percentile(health.took, 0.99) <= CALM_S


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_health_answers_during_attacks(server: ServeProcess) -> None:
    calm = is_calm(server)
    family = len(server.family)
    with Health(server) as health, ThreadPoolExecutor(TOGETHER) as pool:
        ended = dict(zip(chosen(), pool.map(lambda attack: attacked(server, attack), chosen()), strict=True))
    wrong = {attack.title: statuses for attack, statuses in ended.items() if "sandbox_error" in statuses}
    assert wrong == {}
    deadline = time.monotonic() + 30
    while len(server.family) > family and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [process.cmdline() for process in server.family if process.status() != psutil.STATUS_ZOMBIE]
    assert len(left) <= family, left
    p99 = percentile(health.took, 0.99)
    with started() as fresh:  # what attacks have done to the other is no excuse for it
        if not (calm and is_calm(fresh)) or os.getloadavg()[0] > 3 * (os.cpu_count() or 1):
            pytest.skip(f"this machine is too busy to say what /health would take: {p99} s")
    assert p99 < BAR_S
