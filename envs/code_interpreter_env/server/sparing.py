"""Waits for code on behalf of a caller who may give it up: it is interrupted then, and the interpreter lives."""

import asyncio
from collections.abc import Callable
from typing import Final

from openenv_core.sandbox import Execution, Interpreter, Interruptible

TELL_S: Final = 1.0
"""How often a caller who waits is told so."""

INTERRUPT_S: Final = 1.0
"""What an interrupt gets, beside the session's own grace, before the interpreter is ended after all."""


async def spared(
    task: "asyncio.Task[Execution]", interpreter: Interpreter, grace_s: float, tell: Callable[[float], None]
) -> Execution:
    """Wait for an execution. It has ended when this does, however this does.

    Args:
        task: The execution.
        interpreter: What runs it.
        grace_s: What the interpreter itself gives an interrupt.
        tell: Called at once and every second with the seconds so far.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    tell(0.0)
    try:
        while not (await asyncio.wait([task], timeout=TELL_S))[0]:
            tell(clock() - began)
        return task.result()
    except asyncio.CancelledError:
        if isinstance(interpreter, Interruptible):
            interpreter.interrupt()
            await asyncio.wait([task], timeout=grace_s + INTERRUPT_S)
        raise
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def lost(task: "asyncio.Task[Execution]") -> bool:
    """Whether an execution that has ended, and that nobody waits for any more, has cost the interpreter its state."""
    return task.cancelled() or task.exception() is not None or task.result().state_lost
