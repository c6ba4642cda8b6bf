"""Attacks through a real server: /health answers meanwhile, and nothing of them stays."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from serve_process import ServeProcess, serve

from envs.code_interpreter_env import CodeInterpreterEnv

from .catalogue import CATALOGUE
from .model import EVERYWHERE, Attack, with_tools

pytestmark = pytest.mark.soak

APP = "envs.code_interpreter_env.server.app:app"
ROOT = Path(__file__).resolve().parents[3]
HOST = {"calls": {}, "isolation": "", "deep": 100}
CATEGORIES = ("cpu", "output", "memory", "channel")
TOGETHER = 4
STALL_S = 3.0
"""No busy machine keeps a server for so long from an answer; an attack that holds its event loop does."""
CHOSEN = [
    attack
    for attack in CATALOGUE
    if attack.category in CATEGORIES and attack.act is None and attack.holds == EVERYWHERE
]


@contextmanager
def asking_for_health(server: ServeProcess) -> Iterator[list[tuple[int, float]]]:
    """Poll /health continuously; collect the statuses and the seconds they took."""
    answers: list[tuple[int, float]] = []
    finished = threading.Event()

    def ask() -> None:
        while not finished.wait(0.02):
            began = time.monotonic()
            status, _ = server.get("/health")
            answers.append((status, time.monotonic() - began))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield answers
        finally:
            finished.set()
        asking.result()


def attacked(server: ServeProcess, attack: Attack) -> list[str]:
    limits = {"memory_bytes": attack.limits.memory_bytes, "grace_s": 0.1, "timeout_s": 10.0}
    with CodeInterpreterEnv(base_url=f"http://{server.address}").sync() as client:
        client.reset(limits=limits)
        timeout_s = min(1.0, attack.timeout_s)
        results = [client.execute(with_tools(cell, HOST), timeout_s=timeout_s) for cell in attack.cells]
    return [each.observation.status for each in results]


@pytest.mark.timeout(600)
def test_health_answers_during_attacks() -> None:
    options = {"app": APP, "CODE_INTERPRETER_PRELOAD": "none", "PYTHONPATH": str(ROOT)}
    with serve(**options) as server:
        family = len(server.family)
        with asking_for_health(server) as answers, ThreadPoolExecutor(TOGETHER) as pool:
            ended = zip(CHOSEN, pool.map(lambda attack: attacked(server, attack), CHOSEN), strict=True)
            wrong = {attack.title: statuses for attack, statuses in ended if "sandbox_error" in statuses}
        assert wrong == {}
        assert {status for status, _ in answers} == {200}
        assert max(took for _, took in answers) < STALL_S
        deadline = time.monotonic() + 30
        while len(server.family) > family and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [process.cmdline() for process in server.family if process.status() != psutil.STATUS_ZOMBIE]
        assert len(left) <= family, left
