"""What holds up a server's loop is told from what holds up the whole machine."""

import asyncio
import signal
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from openenv_core.sandbox import Session

from .watch import COARSE_S, LONG_S, Watch, alone

BLOCK_S = LONG_S + 0.3


class Neighbour:
    """A session that answers at once."""

    def __init__(self) -> None:
        self._number = -1

    async def execute(self, code: str) -> Any:
        self._number += 1
        return SimpleNamespace(status="ok", result=f"('the neighbour', {self._number})", reason=None)


def watch() -> Watch:
    return Watch(cast(Session, Neighbour()), None, period_s=COARSE_S)


def test_what_two_feel_at_once_is_taken_off() -> None:
    beside = [(0.0, 1.0), (10.5, 11.0), (12.0, 20.0)]
    assert alone([(2.0, 5.0), (10.0, 13.0), (14.0, 16.0)], beside) == [3.0, 1.5, 0.0]


@pytest.mark.slow
async def test_a_loop_that_is_held_up_shows() -> None:
    async with watch() as watched:
        for _ in range(3):  # the machine may stand still at one of them
            await asyncio.sleep(2 * COARSE_S)
            time.sleep(BLOCK_S)  # noqa: ASYNC251 - it is to hold up the loop
        await asyncio.sleep(2 * COARSE_S)
    assert max(watched.felt.held) > LONG_S
    assert watched.felt.wrong == []


async def test_a_machine_that_stands_still_does_not() -> None:
    async with watch() as watched:
        await asyncio.sleep(2 * COARSE_S)
        assert watched._beside is not None
        watched._beside.send_signal(signal.SIGSTOP)
        time.sleep(BLOCK_S)  # noqa: ASYNC251 - it is to hold up the loop
        watched._beside.send_signal(signal.SIGCONT)
        await asyncio.sleep(2 * COARSE_S)
    assert max(watched.felt.loop) > LONG_S
    assert max(watched.felt.held) < LONG_S
