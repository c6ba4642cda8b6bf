"""Signals interrupt a blocked event loop, and handlers are restored afterwards."""

import asyncio
import os
import signal
import threading
import time

import pytest

from rl_bridge.services.own_process import raise_on_signals

pytestmark = pytest.mark.slow

LONG_S = 60.0


def tell(number: int) -> None:
    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()


@pytest.mark.own_process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_blocking_call_is_interrupted_and_cleaned_up(number: int) -> None:
    events: list[str] = []

    async def blocked() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, events.append, "by the loop")
        try:
            with raise_on_signals():
                tell(number)
                time.sleep(LONG_S)  # noqa: ASYNC251 - as a scheduler's client does
        except BaseException:
            await asyncio.sleep(0)  # what has to be given back is given back
            events.append("given back")
            raise

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(blocked())
    assert "given back" in events


@pytest.mark.own_process
def test_loop_hears_of_signals_again() -> None:
    async def hears_sigterm() -> bool:
        received = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, received.set)
        with raise_on_signals():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(received.wait(), LONG_S)
        return received.is_set()

    before = signal.getsignal(signal.SIGINT)
    assert asyncio.run(hears_sigterm())
    assert signal.getsignal(signal.SIGINT) is before
