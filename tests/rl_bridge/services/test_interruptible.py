"""What blocks the event loop ends when the process is told to go, and what hears of signals afterwards is as before."""

import asyncio
import os
import signal
import threading
import time

import pytest

from rl_bridge.services.shutdown import raise_on_signals

LONG_S = 60.0


def tell(number: int) -> None:
    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()


@pytest.mark.slow
@pytest.mark.own_process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_blocks_is_ended_and_left_in_order(number: int) -> None:
    heard: list[str] = []

    async def blocked() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, heard.append, "by the loop")
        try:
            with raise_on_signals():
                tell(number)
                time.sleep(LONG_S)  # noqa: ASYNC251 - as a scheduler's client does
        except BaseException:
            await asyncio.sleep(0)  # what has to be given back is given back
            heard.append("given back")
            raise

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(blocked())
    assert "given back" in heard


@pytest.mark.slow
@pytest.mark.own_process
def test_loop_hears_of_signals_again() -> None:
    async def told() -> bool:
        heard = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, heard.set)
        with raise_on_signals():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(heard.wait(), LONG_S)
        return heard.is_set()

    before = signal.getsignal(signal.SIGINT)
    assert asyncio.run(told())
    assert signal.getsignal(signal.SIGINT) is before
