"""The event loop of a service process's main thread, which alone may handle signals; actors run on another thread's.

`PROGRAM` is put in front of Monarch's program of a process, so that its loop is known when an actor asks.
"""

import asyncio
import runpy
import sys
import threading

PROGRAM = "from rl_bridge.services import main_loop; main_loop.run_module()"

_loop: asyncio.AbstractEventLoop | None = None


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        global _loop
        loop = super().new_event_loop()
        if threading.current_thread() is threading.main_thread():
            _loop = loop
        return loop


def run_module() -> None:
    """Run the module that the command line names after `-m`, as Python does, and record its main thread's loop."""
    asyncio.set_event_loop_policy(_Policy())
    del sys.argv[1]  # -m
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def find() -> asyncio.AbstractEventLoop | None:
    """Return the loop that the main thread runs; None if this process was not started with `PROGRAM`."""
    return _loop
