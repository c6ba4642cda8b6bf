"""Waiting for what other processes do, within a bound."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

WAIT_S = 150.0
"""A bound for what would hang otherwise; none is meant to come near it."""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - other processes make it true
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def held(folder: Path) -> int:
    """How many calls have begun to wait for a file of a folder to go; see `service_roles.pause`."""
    return len(list(folder.glob("held-*")))


async def until_gone(pids: Iterable[int]) -> None:
    wanted = set(pids)
    await until(lambda: not any(alive(pid) for pid in wanted))


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def pids_of(service: Any) -> list[int]:
    return [pid for status in service.replicas for pid in status.pids]


def all_serve(service: Any) -> bool:
    return all(status.state == "serving" for status in service.replicas)
